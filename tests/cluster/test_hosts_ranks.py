"""Groups of ranks over several hosts: the bits of a group on one host, through the loss of a rank's host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesaic import LLM
from moesaic.testing import byte_tokenizer
from tests.cluster.test_groups_with_servers import workload
from tests.support import model_configs, pairs, tiny_models
from tests.support.cluster_driver import Answer, cluster
from tests.support.hosts import Hosts, missing, soon
from tests.support.joined_cluster import PREFILL, RANKS, SERVER, WORKER, After, joined_cluster

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
KILL, CUT = "kill", "cut"
FAMILIES = {
    "mixtral": ("mixtral", model_configs.mixtral(num_attention_heads=8, num_key_value_heads=4)),
    "mixtral of 6 heads": ("mixtral", model_configs.mixtral()),
    "qwen3-next": model_configs.CASES["qwen3-next"],
}
STEADY: dict[str, Any] = {"rebalance_interval": 0.0}
TWO = {"tensor_parallel_size": 2, "nnodes": 2}
"""A rank on each of two hosts."""


@pytest.fixture(scope="module")
def models(shared: Path) -> Callable[[str], str]:
    """The path of a family's checkpoint, which all hosts have."""

    @functools.cache
    def path(family: str) -> str:
        folder = shared / family
        tiny_models.save(tiny_models.build(*FAMILIES[family]), folder)
        byte_tokenizer(folder)
        return str(folder)

    return path


@functools.cache
def of_one_process(path: str) -> list[list[int]]:
    """The tokens that one process computes."""
    found = LLM(path, threads=1, enforce_eager=True).generate(*workload())
    return [completion.outputs[0].token_ids for completion in found]


@functools.cache
def of_one_host(path: str, **shape: Any) -> list[Answer]:
    """What a group on one host computes."""
    with cluster(path, **STEADY, **shape) as served:
        served.submit(*workload())
        found = served.finish()
    assert [tokens for tokens, _ in found] == of_one_process(path)
    return found


@pytest.mark.parametrize(
    ("family", "ranks"), pairs.some([("mixtral", 4), ("qwen3-next", 2)], [("mixtral", 4)])
)
def test_the_host_of_some_ranks_is_killed_and_returns(
    family: str, ranks: int, hosts: Hosts, shared: Path, models: Callable[[str], str]
) -> None:
    """Requests wait until the host is there again, and go on with the same bits."""
    shape: dict[str, Any] = {"expert_servers": 0, "tensor_parallel_size": ranks}
    expected = of_one_host(models(family), **shape)
    shape |= {"model": models(family), "nnodes": 2, **STEADY}
    with joined_cluster(hosts, shared, [(hosts[1], RANKS)], **shape) as joined:
        assert joined.numbers(RANKS) == {0}
        assert joined.answers(*workload()) == expected

        def restart() -> None:
            hosts[1].kill()
            hosts[1].boot()
            joined.join(hosts[1], RANKS)

        away = After(20, restart)
        assert joined.answers(*workload(), away) == expected and away.done
        assert joined.numbers(RANKS) == {1} and joined.numbers(WORKER) == {0}
        assert joined.served.supervisor.report().counters.moved_requests > 0
    assert joined.joined[-1].wait(30) == 0, joined.logs()


@pytest.mark.full
@pytest.mark.parametrize("form", ["deepspeed", "all-reduce", "reduce-scatter"])
def test_a_link_is_cut_and_the_group_is_built_anew(
    form: str, hosts: Hosts, shared: Path, models: Callable[[str], str]
) -> None:
    """Both ends notice. The process of the other host joins again by itself, once the link is there."""
    shape: dict[str, Any] = {"expert_servers": 0, "moe_collectives": form}
    expected = of_one_host(models("mixtral"), tensor_parallel_size=2, **shape)
    shape |= {"model": models("mixtral"), **TWO, **STEADY}
    with joined_cluster(hosts, shared, [(hosts[1], RANKS)], **shape) as joined:

        def blink() -> None:
            hosts[1].cut()
            soon(lambda: not joined.numbers(WORKER))
            hosts[1].heal()

        away = After(20, blink)
        assert joined.answers(*workload(), away) == expected and away.done
        assert joined.numbers(RANKS) == {1} and joined.joined[0].poll() is None


@pytest.mark.full
@pytest.mark.parametrize("fault", [KILL, CUT])
def test_a_group_without_work_is_replaced_too(
    fault: str, hosts: Hosts, shared: Path, models: Callable[[str], str]
) -> None:
    """No round tells of the rank, so the supervisor does. Requests that come meanwhile wait."""
    shape: dict[str, Any] = {"model": models("qwen3-next"), "expert_servers": 0, **TWO, **STEADY}
    expected = of_one_host(models("qwen3-next"), expert_servers=0, tensor_parallel_size=2)
    with joined_cluster(hosts, shared, [(hosts[1], RANKS)], **shape) as joined:
        (hosts[1].kill if fault == KILL else hosts[1].cut)()
        joined.served.until(lambda: "waits for" in joined.served.supervisor.status()[0].waiting)
        joined.served.submit(*workload())
        if fault == KILL:
            hosts[1].boot()
            joined.join(hosts[1], RANKS)
        else:
            hosts[1].heal()
        assert joined.served.finish() == expected


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["lockstep", "async"])
def test_ranks_of_hosts_beside_expert_servers(
    schedule: str, hosts: Hosts, shared: Path, models: Callable[[str], str]
) -> None:
    """The host with a rank and a server is killed. Attention over hosts has the bits of one host."""
    shape: dict[str, Any] = {"expert_servers": 2, "min_replicas": 2, "schedule": schedule}
    expected = of_one_host(models("qwen3-next"), tensor_parallel_size=2, **shape)
    shape |= {"model": models("qwen3-next"), **TWO, **STEADY}
    with joined_cluster(hosts, shared, [(hosts[1], RANKS)], **shape) as joined:
        joined.bring(hosts[1], [SERVER])

        def restart() -> None:
            hosts[1].kill()
            hosts[1].boot()
            joined.join(hosts[1], RANKS)

        away = After(20, restart)
        assert joined.answers(*workload(), away) == expected and away.done


@pytest.mark.full
def test_prefill_apart_from_decode_in_groups_over_hosts(
    hosts: Hosts, shared: Path, models: Callable[[str], str]
) -> None:
    """Each of the two groups takes one of the processes that joined. KV goes from group to group."""
    shape: dict[str, Any] = {"expert_servers": 0, "prefill_workers": 1}
    expected = of_one_host(models("qwen3-next"), tensor_parallel_size=2, **shape)
    shape |= {"model": models("qwen3-next"), **TWO, **STEADY}
    first = [(hosts[1], RANKS), (hosts[2], RANKS)]
    with joined_cluster(hosts, shared, first, **shape) as joined:
        assert joined.answers(*workload()) == expected
        assert len(joined.numbers(RANKS)) == 2 and joined.numbers(PREFILL) == {0}


@pytest.mark.full
def test_a_rank_on_each_of_three_hosts(hosts: Hosts, shared: Path, models: Callable[[str], str]) -> None:
    """A fourth process waits, and takes the place of the one that is killed."""
    shape: dict[str, Any] = {"expert_servers": 0, "tensor_parallel_size": 3}
    expected = of_one_host(models("mixtral of 6 heads"), **shape)
    shape |= {"model": models("mixtral of 6 heads"), "nnodes": 3, **STEADY}
    first = [(hosts[1], RANKS), (hosts[2], RANKS), (hosts[2], RANKS)]
    with joined_cluster(hosts, shared, first, **shape) as joined:
        away = After(20, hosts[1].kill)
        assert joined.answers(*workload(), away) == expected and away.done
        assert len(joined.numbers(RANKS)) == 2


@pytest.mark.full
def test_a_host_with_another_checkpoint_is_refused_and_serving_waits(
    hosts: Hosts, shared: Path, models: Callable[[str], str]
) -> None:
    shape: dict[str, Any] = {"model": models("mixtral"), "expert_servers": 0, **TWO, **STEADY}
    wrong = ("--model", models("mixtral of 6 heads"))
    with joined_cluster(hosts, shared, [(hosts[1], RANKS, *wrong), (hosts[2], RANKS)], **shape) as joined:
        assert joined.joined[0].wait(60) == 2
        assert "--model: got" in joined.logs() and "this one has other" in joined.logs()
        assert joined.answers(*workload()) == of_one_host(
            models("mixtral"), expert_servers=0, tensor_parallel_size=2
        )
