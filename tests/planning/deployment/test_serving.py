"""The commands that a plan prints are read by the parser of the command line."""

from __future__ import annotations

import shlex

import pytest

from moesaic.commands import cli
from moesaic.config import ClusterConfig
from moesaic.planning.deployment import serving
from moesaic.planning.deployment.layouts import Layout
from moesaic.planning.deployment.search import Deployments
from moesaic.planning.deployment.trials import Candidate
from tests.support import small_plan
from tests.support.small_scenario import MODEL

[POOL] = small_plan.machines(8, 2).pools
LAYOUTS = (
    Layout(POOL, 1, 1, 3),
    Layout(POOL, 1, 2, 6),
    Layout(POOL, 3, 1, 1),
    Layout(POOL, 4, 1, 4, is_colocated=True),
    Layout(POOL, 1, 1, 1, is_colocated=True),
)


def plan(slo: str | None) -> Deployments:
    search = small_plan.search(slo=slo)
    return Deployments(MODEL, search.spec, search.demand, search.objectives, [], 0, 0, True, 0)


@pytest.mark.parametrize("slo", [None, "ttft=2s,itl=50ms"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_every_command_is_understood(layout: Layout, slo: str | None) -> None:
    found = plan(slo)
    for schedule, inflight, replicas, redundant in (
        ("barrier", 1, 1, 0),
        ("lockstep", 2, 2, 0),
        ("async", 1, 1, 2),
    ):
        one = Candidate(layout, 64, 512, 1000, schedule, inflight, replicas, redundant)  # type: ignore[arg-type]
        commands = serving.list_commands(found, one, "a model")
        for command in commands[:2]:
            name, *words = shlex.split(command)
            assert name == "moesaic"
            cli.app.parse_args(words, exit_on_error=False, print_error=False)
        _, bound, _ = cli.app.parse_args(shlex.split(commands[0])[1:], exit_on_error=False, print_error=False)
        assert bound.arguments["model"].model == "a model"
        assert bound.arguments["scheduler"].max_num_seqs == 64
        cluster: ClusterConfig = bound.arguments.get("cluster", ClusterConfig()).resolve()
        if serving.is_single_process(one):
            assert not cluster.has_several_processes
            continue
        assert cluster.attention_workers == layout.workers
        assert cluster.tensor_parallel_size == layout.ranks
        assert cluster.expert_servers + len(commands) - 1 == layout.servers
        assert bound.arguments["scheduler"].schedule == schedule
        assert cluster.redundant_experts == redundant and cluster.slo_ttft == (slo and 2000)


def test_a_cluster_of_two_hosts_has_commands_for_both() -> None:
    one = Candidate(LAYOUTS[1], 64, 512, 1000)
    serve, *joins = serving.list_commands(plan(None), one, "demo")
    assert "--tensor-parallel-size 2" in serve and "--cluster-address tcp:FIRST_HOST:7000" in serve
    assert joins == ["moesaic join FIRST_HOST:7000 --secret-file cluster.secret"] * 4
    assert any(
        "give each its own CUDA_VISIBLE_DEVICES" in note for note in serving.list_notes(plan(None), one)
    )
