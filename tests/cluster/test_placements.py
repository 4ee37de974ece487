"""Placements from files in colocated ranks: the bits stay what they are, what is local is counted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic import LLM
from moesaic.cluster.report import layer_locality
from moesaic.commands.place_formats import save
from moesaic.core.coclusters import Coclusters
from moesaic.core.metrics import ExpertStats
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile, Routes
from moesaic.core.request import TokenLogprob
from moesaic.core.routing import Assembly
from moesaic.models import files, registry
from moesaic.policy.placement import redundancy
from moesaic.policy.placement.locality import homes_in, hosts
from moesaic.policy.placement.solvers import SOLVERS, annealing
from moesaic.policy.placement.solvers.tokens import label_tokens
from moesaic.testing import byte_tokenizer
from tests.cluster.test_identity import workload
from tests.support import model_configs, pairs, tiny_models
from tests.support.cluster_driver import Answer, Cluster, cluster

RANKS: dict[str, Any] = {"expert_servers": 0, "data_parallel_size": 2, "enable_expert_parallel": True}
COUNT, TOKENS = 8, 24
UNANSWERED_SECONDS, REPLICA_TIMEOUT = 0.05, 10.0
"""A server that is frozen so long gets calls, but is not late. So it has some when it is killed."""
BRIEF = annealing.AnnealingSearch(steps=1_000, brief=500)
"""Bits don't depend on how good a placement is."""


class Alone:
    """The workload in one process: its answers, and the experts of all rows."""

    def __init__(self, path: str) -> None:
        spec = registry.routed_model(files.resolve(path, None))
        assembly = Assembly(spec, 1 << 30)
        model = LLM(path, threads=1, kv_cache_memory="64MiB", routing=assembly.add)
        self.answers: list[Answer] = []
        for completion in model.generate(*workload(COUNT, TOKENS)):
            [output] = completion.outputs
            logprobs = [one.logprob for one in output.logprobs or [] if isinstance(one, TokenLogprob)]
            self.answers.append((output.token_ids, logprobs))
        self.routes: Routes = assembly.take()[1]
        self.profile = Profile.from_routes(
            spec.model, spec.vocab_size, spec.num_experts, spec.layers, self.routes
        )


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone("demo")


def shuffled(profile: Profile, seed: int) -> Coclusters:
    """Experts on two ranks at random, as many on each."""
    rng = np.random.default_rng(seed)
    row = np.arange(profile.num_experts) % 2
    experts = np.stack([rng.permutation(row) for _ in profile.layers]).astype(np.int16)
    return label_tokens(profile, experts)


def write(folder: Path, profile: Profile, clusters: Coclusters, copies: int = 0) -> str:
    """The placement's file, its tables beside it."""
    placement = redundancy.place(profile, clusters, copies, "placement.tables.npz")
    save(placement, redundancy.tables_of(profile, clusters, placement), folder / "placement.json")
    return str(folder / "placement.json")


def pairs_of(served: Cluster) -> list[tuple[int, int]]:
    """Of each layer: sent, and of those to the own rank."""
    return [(one.pairs, one.local_pairs) for one in served.supervisor.report().locality]


@pytest.mark.slow
def test_what_is_counted_as_local_is_what_the_routes_say(alone: Alone, tmp_path: Path) -> None:
    """A random placement, some experts on both ranks, requests on one rank after the other."""
    file = write(tmp_path, alone.profile, shuffled(alone.profile, 0), copies=3)
    routes = alone.routes
    own = np.broadcast_to((routes.owners % 2)[:, None], routes.experts.shape[:2]).astype(np.int16)
    homes = homes_in(Placement.read(file, 2), alone.profile.layers)
    local = (hosts(routes.experts, homes, own) == own[:, :, None]).sum(axis=(0, 2)).tolist()
    sent = len(routes.tokens) * alone.profile.top_k
    expected = [(sent, count) for count in local]
    assert all(0.3 * sent < count < 0.8 * sent for count in local) and len(set(local)) > 1
    with cluster(placement=file, dispatch="round-robin", **RANKS) as served:
        served.until(lambda: connected(served))  # who comes before asks the server that is there
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == alone.answers
        served.until(lambda: pairs_of(served) == expected)
        report = served.supervisor.report()
        assert report.dispatch == "round-robin"
        assert [one.layer for one in report.locality] == list(alone.profile.layers)
        assert report.locality[0].local_activation_rate == local[0] / sent


def homes_stay(served: Cluster, file: str) -> bool:
    now, homes = served.supervisor.placement, Placement.read(file, 2)
    assert now is not None
    return all(
        set(homes.experts_of(server, layer)) <= set(now.experts_of(server, layer))
        for layer in homes.layers
        for server in homes.servers
    )


@pytest.mark.slow
def test_copies_beside_a_file_follow_the_load(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Homes stay, the redundant copies move, and the bits are the same."""
    monkeypatch.setattr("moesaic.cluster.balancing.HORIZON", 10**6)  # tiny experts: any gain is worth it
    file = write(tmp_path, alone.profile, shuffled(alone.profile, 0))
    with cluster(placement=file, redundant_experts=4, rebalance_interval=1.0, **RANKS) as served:
        before = served.supervisor.placement
        assert before is not None and homes_stay(served, file)
        assert {int(before.replicas(layer).sum()) for layer in before.layers} == {28}
        while not served.supervisor.report().counters.rebalances or served.supervisor.report().change:
            served.submit(*workload(COUNT, TOKENS))
            served.until(lambda: not served.running.unfinished)
            assert len(served.running.answers) < 100 * COUNT, "no copy moved"
        answers = served.finish()
        assert answers == alone.answers * (len(answers) // COUNT)
        after = served.supervisor.placement
        assert (
            after is not None
            and after.experts_by_layer != before.experts_by_layer
            and homes_stay(served, file)
        )
        assert after.tables == before.tables != ""


@pytest.mark.slow
def test_with_two_copies_beside_a_file_no_request_waits_for_a_dead_server(
    alone: Alone, tmp_path: Path
) -> None:
    file = write(tmp_path, alone.profile, shuffled(alone.profile, 0))
    with cluster(placement=file, min_replicas=2, replica_timeout=REPLICA_TIMEOUT, **RANKS) as served:
        served.until(lambda: connected(served))
        killed: list[int] = []

        def disturb(tokens: int) -> None:
            if tokens > 40 and not killed:
                killed.append(served.pid("expert server 1"))
                os.kill(killed[0], signal.SIGSTOP)
                time.sleep(UNANSWERED_SECONDS)
                os.kill(killed[0], signal.SIGKILL)

        served.submit(*workload(COUNT, TOKENS))
        assert served.finish(disturb) == alone.answers and killed
        served.until(lambda: served.broken_off > 0)  # workers report it a little later
        assert homes_stay(served, file)


def test_worked_example() -> None:
    placement = Placement(0, 2, {1: {0: [0, 1]}, 2: {0: [0, 1]}})
    [first, second] = layer_locality(placement, ExpertStats(layer_pairs=(8, 8), local_pairs=(6, 2)))
    assert (first.layer, first.local_activation_rate) == (1, 0.75)
    assert (second.layer, second.local_activation_rate) == (2, 0.25)
    assert layer_locality(placement, ExpertStats(layer_pairs=(8, 8))) == []
    assert layer_locality(None, ExpertStats()) == []


def connected(served: Cluster) -> bool:
    """Whether both workers reach both servers."""
    servers = [one for one in served.supervisor.status() if one.role == "expert server"]
    return all(server.stats.clients == 2 for server in servers)


@pytest.mark.parametrize("seed", pairs.some([1, 2], [1]))
def test_the_same_bits_under_random_placements(seed: int, alone: Alone, tmp_path: Path) -> None:
    file = write(tmp_path, alone.profile, shuffled(alone.profile, seed))
    with cluster(placement=file, **RANKS) as served:
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == alone.answers
        assert served.supervisor.report().dispatch == "affinity"


@pytest.mark.parametrize("solver", pairs.some(SOLVERS, ("eplb", "ours")))
def test_the_same_bits_under_each_solvers_placement(solver: str, alone: Alone, tmp_path: Path) -> None:
    if solver == "metis":
        pytest.importorskip("pymetis")
    solve = partial(annealing.solve, search=BRIEF) if solver == "ours" else SOLVERS[solver]
    clusters = solve(alone.profile, 2, 0)
    with cluster(placement=write(tmp_path, alone.profile, clusters), **RANKS) as served:
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == alone.answers


OTHERS: dict[str, dict[str, Any]] = {
    "mixtral": model_configs.mixtral(vocab_size=1024),
    "deepseek_v2": model_configs.deepseek(vocab_size=1024),
}
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("demo", {"schedule": "barrier"}),
    ("demo", {"schedule": "async"}),
    ("deepseek_v2", {"schedule": "async", "queue_policy": "mtfs"}),
    ("demo", {"schedule": "async", "queue_policy": "flfs", "dispatch": "affinity-rounds"}),
    ("mixtral", {"inflight_batches": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    SCHEDULES,
    ids=[" ".join(map(str, [name, *how.values()])) for name, how in SCHEDULES],
)
def test_the_same_bits_under_every_schedule_with_copies(
    name: str, settings: dict[str, Any], alone: Alone, tmp_path: Path
) -> None:
    path = name
    if name in OTHERS:
        path = str(tiny_models.save(tiny_models.build(name, OTHERS[name]), tmp_path / name))
        byte_tokenizer(Path(path))
        alone = Alone(path)
    profile = alone.profile
    file = write(tmp_path, profile, SOLVERS["sem-moe"](profile, 2, 0), copies=profile.num_experts // 5)
    with cluster(path, placement=file, **settings, **RANKS) as served:
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == alone.answers
        sent = [len(alone.routes.tokens) * profile.top_k] * len(profile.layers)
        served.until(lambda: [pairs for pairs, _ in pairs_of(served)] == sent)
        assert served.supervisor.report().dispatch == settings.get("dispatch", "affinity")


@pytest.mark.parametrize(
    "dispatch", pairs.some(("affinity", "least-loaded", "round-robin"), ("affinity", "round-robin"))
)
def test_requests_of_a_killed_worker_go_on(dispatch: str, alone: Alone, tmp_path: Path) -> None:
    file = write(tmp_path, alone.profile, shuffled(alone.profile, 3))
    with cluster(placement=file, dispatch=dispatch, **RANKS) as served:
        while not served.supervisor.report().counters.moved_requests:  # it may have just ended its requests
            served.submit(*workload(COUNT, TOKENS))
            killing = once(served.running.tokens + 40, lambda: kill(served, "attention worker 0"))
            assert served.finish(killing)[-COUNT:] == alone.answers
            served.until(lambda: all(member.stage == "serving" for member in served.supervisor.status()))
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish()[-COUNT:] == alone.answers


def once(tokens: int, action: Callable[[], None]) -> Callable[[int], None]:
    """Do it when there are so many tokens."""
    waiting = [action]
    return lambda now: waiting.pop()() if waiting and now >= tokens else None


def kill(served: Cluster, name: str) -> None:
    os.kill(served.pid(name), signal.SIGKILL)


HOSTS = """
[links]
latency_us = 100
gb_per_s = 1
inside_latency_us = 5
inside_gb_per_s = 10
[[hosts]]
name = "a"
workers = [0]
servers = [0]
[[hosts]]
name = "b"
workers = [1]
servers = [1]
"""


@pytest.mark.slow
def test_on_hosts_affinity_needs_no_ranks(alone: Alone, tmp_path: Path) -> None:
    """Requests go where links leave most of their pairs, and the bits are the same."""
    file = write(tmp_path, alone.profile, shuffled(alone.profile, 0))
    hosts_file = tmp_path / "hosts.toml"
    hosts_file.write_text(HOSTS)
    shape = {"attention_workers": 2, "expert_servers": 2, "placement": file}
    with cluster(**shape, topology=str(hosts_file)) as served:
        served.connected()
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == alone.answers
        served.until(lambda: served.supervisor.report().counters.far_bytes > 0)
        report = served.supervisor.report()
        assert report.dispatch == "affinity"
        assert [host.name for host in report.hosts] == ["a", "b"]
