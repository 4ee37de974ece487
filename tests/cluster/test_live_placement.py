"""Placement and dispatch tables that follow live routing: tokens stay, also where a swap meets a death."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic.cluster.dispatching import RankDispatch, choose_dispatch
from moesaic.cluster.live_placement import LivePlacement
from moesaic.cluster.scaling import Changes
from moesaic.cluster.solving.job import Job
from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.routing import RoutedModel
from moesaic.policy.placement import predict
from moesaic.policy.placement.dispatch import WorkerLoad
from moesaic.policy.placement.online import Forecast, Traffic, Verdict
from moesaic.policy.placement.online_solution import Fleet
from moesaic.policy.placement.solvers import SOLVERS
from moesaic.trace.live_routing import LiveRouting
from moesaic.trace.options import RecordConfig
from tests.cluster.test_identity import workload
from tests.cluster.test_placements import RANKS, Alone, shuffled, write
from tests.support import pairs
from tests.support.cluster_driver import Cluster, cluster
from tests.support.processes import gone

COUNT, TOKENS = 8, 24


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone("demo")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solves often, by a quick solver."""
    monkeypatch.setattr("moesaic.cluster.live_placement.SOLVER", "sem-moe")
    monkeypatch.setattr("moesaic.policy.placement.online.LEAST_REQUESTS", 8)
    monkeypatch.setattr("moesaic.policy.placement.online.LEAST_TOKENS", 64)


@pytest.fixture
def any_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other placement counts as worth its moves. test_online.py has the real verdicts."""

    def judge(before: Forecast, after: Forecast, moves: int, size: int, traffic: Traffic) -> Verdict:
        return Verdict(1.0, 0.0, "" if moves else "the same")

    monkeypatch.setattr("moesaic.cluster.change_queue.judge", judge)


def recorded(folder: Path) -> RecordConfig:
    return RecordConfig(str(folder / "routing.npz"), record_routing_share=1.0)


def state(served: Cluster) -> str:
    told = served.supervisor.report().placement_solve
    assert told is not None
    return told.state


def drive(served: Cluster, swaps: int) -> None:
    """Requests until so many placements were swapped in."""
    while served.supervisor.report().placement_solve.swaps < swaps:  # type: ignore[union-attr]
        served.submit(*workload(COUNT, TOKENS))
        served.until(lambda: not served.running.unfinished and state(served) != "solving")
        assert len(served.running.answers) < 200 * COUNT, served.supervisor.report().placement_solve


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain", marks=pytest.mark.full),
        pytest.param({"redundant_experts": 4}, id="copies", marks=pytest.mark.slow),
        pytest.param(
            {"min_replicas": 2, "data_parallel_size": 3, "placement": None},
            id="three ranks with two copies",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_placement_follows_live_routing(
    settings: dict[str, Any], alone: Alone, tmp_path: Path, eager: None, any_move: None
) -> None:
    """It begins with a file of random homes and its tables, and ends with others; tokens are the same."""
    file = write(tmp_path, alone.profile, shuffled(alone.profile, 0))
    asked = {"rebalance": "routing", "rebalance_interval": 1.0, "placement": file, **RANKS, **settings}
    with cluster(record=recorded(tmp_path), **asked) as served:
        before = served.supervisor.placement
        drive(served, 1)
        served.submit(*workload(COUNT, TOKENS))
        answers = served.finish()
        assert answers == alone.answers * (len(answers) // COUNT)
        after, report = served.supervisor.placement, served.supervisor.report()
        assert before is not None and after is not None and after.experts_by_layer != before.experts_by_layer
        assert report.dispatch == "affinity" and report.counters.rebalances >= 1
        told = report.placement_solve
        assert told is not None and told.solves >= 1 and told.gain_seconds > 0
        assert all(layer.least >= settings.get("min_replicas", 1) for layer in report.replicas)
        assert served.broken_off == 0
    assert (tmp_path / "routing.npz").stat().st_size, "the recording is kept as well"


DEATHS = [("expert server 1", "_move"), ("attention worker 0", "_move"), ("expert server 0", "_settle")]


@pytest.mark.parametrize(("name", "step"), pairs.some(DEATHS, DEATHS[:1]))
def test_a_death_during_the_swap(
    name: str,
    step: str,
    alone: Alone,
    tmp_path: Path,
    eager: None,
    any_move: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process dies as servers load their experts, or as clients begin to route by the new placement.

    No file at first, so requests go by load.
    """
    killed: list[int] = []
    real = getattr(Changes, step)

    def killing(self: Changes, *arguments: Any, **named: Any) -> Any:
        [member] = [one for one in self._members.all_members if one.name == name]
        assert member.child is not None and member.child.pid is not None
        if not killed:  # a slow machine swaps again before all answers are there
            killed.append(member.child.pid)
            os.kill(member.child.pid, signal.SIGKILL)
        yield from real(self, *arguments, **named)

    monkeypatch.setattr(Changes, step, killing)
    with cluster(rebalance="routing", rebalance_interval=1.0, record=recorded(tmp_path), **RANKS) as served:
        served.connected()
        assert served.supervisor.report().dispatch == "least-loaded"
        drive(served, 1)
        monkeypatch.setattr(Changes, step, real)
        assert killed
        answers = served.finish()
        assert answers == alone.answers * (len(answers) // COUNT)
        served.until(lambda: all(one.stage == "serving" for one in served.supervisor.status()))
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish()[-COUNT:] == alone.answers
        assert served.supervisor.report().dispatch == "affinity"


@pytest.mark.slow
def test_what_does_not_pay_is_not_swapped(
    alone: Alone, tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real horizon the gain of tiny experts is nothing beside their moves."""
    monkeypatch.setattr("moesaic.cluster.balancing.HORIZON", 0)
    with cluster(rebalance="routing", rebalance_interval=1.0, record=recorded(tmp_path), **RANKS) as served:
        before = served.supervisor.placement
        while not state(served).startswith("not swapped"):
            served.submit(*workload(COUNT, TOKENS))
            served.until(lambda: not served.running.unfinished and state(served) != "solving")
            assert len(served.running.answers) < 200 * COUNT, state(served)
        told = served.supervisor.report().placement_solve
        assert told is not None and told.state.startswith("not swapped: a gain of 0 s in 0 s is not more")
        assert served.supervisor.placement == before and told.swaps == 0


# ---- parts


def test_workers_that_came_later_have_their_servers_rank() -> None:
    asked = []

    def dispatch(workers: dict[int, WorkerLoad], prompt: Any = ()) -> int:
        asked.append({worker: load.rank for worker, load in workers.items()})
        return 4

    loads = {0: WorkerLoad(8, 0, 0), 4: WorkerLoad(8, 0, 0), 9: WorkerLoad(8, 0, 0)}
    assert RankDispatch(dispatch, {0: 0, 4: 1})(loads) == 4  # type: ignore[arg-type]
    assert asked == [{0: 0, 4: 1, 9: -1}]


TRAFFIC = Traffic(1.0, 0.5, 1e9, 1e9, 60.0)


def test_tables_are_those_of_their_workers(alone: Alone) -> None:
    clusters = SOLVERS["vanilla"](alone.profile, 2, 0)
    tables = predict.build(alone.profile, clusters)
    live = LivePlacement(LiveRouting(1 << 20, 1.0), 1.0, 0.0, tables, range(2))
    assert live.tables_for([0, 1]) is tables and live.tables_for([0, 2]) is None


def ended(live: LivePlacement, job: Any, now: float) -> Any:
    """The solution that `take` gives once the solve has ended."""
    assert live.take(now, job, lambda: TRAFFIC) is None and live._thread is not None
    live._thread.join()
    solved = live.take(now, job, lambda: TRAFFIC)
    return None if solved is None else solved[0]


@pytest.fixture
def live(alone: Alone, eager: None) -> LivePlacement:
    routing = LiveRouting(1 << 26, 1.0)
    routing.add(alone_model(alone), alone.routes)
    return LivePlacement(routing, 1.0, 0.0, None)


def alone_model(alone: Alone) -> Any:

    profile = alone.profile
    return RoutedModel(
        profile.model, profile.vocab_size, profile.num_experts, profile.top_k, profile.layers, 64
    )


def job_of(alone: Alone, solver: str) -> Any:
    clusters = SOLVERS["vanilla"](alone.profile, 2, 0)
    present = clusters.placement(alone.profile.layers, alone.profile.model)
    return lambda profile: Job(profile, present, None, Fleet((0, 1), {0: 1.0, 1: 1.0}), solver)


@pytest.mark.slow
def test_a_process_solves_it(alone: Alone, live: LivePlacement) -> None:
    found = ended(live, job_of(alone, "sem-moe"), 1.0)
    assert found is not None, live.status.state
    assert isinstance(found.placement, Placement) and found.placement.is_complete
    assert live.status.solves == 1 and live.status.last and found.new_forecast.local > 0
    assert live.take(9.0, job_of(alone, "sem-moe"), lambda: TRAFFIC) is None, "nothing was recorded since"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "seconds", "why"),
    [
        ("nobody", 60, "not solved: the solver ended by exit code 1 after at most 60 s: KeyError: 'nobody'"),
        ("ours", 1, "not solved: the solver ended by signal 14 after at most 1 s"),
    ],
)
def test_a_solver_that_fails_or_takes_too_long(
    solver: str, seconds: int, why: str, alone: Alone, live: LivePlacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.cluster.live_placement.SECONDS", seconds)
    assert ended(live, job_of(alone, solver), 1.0) is None
    assert live.status.state == why and not live.status.solves


@pytest.mark.slow
def test_the_solver_ends_with_the_cluster(alone: Alone, live: LivePlacement) -> None:
    assert live.take(1.0, job_of(alone, "ours"), lambda: TRAFFIC) is None
    while live._process is None:
        pass
    pid = live._process.pid
    live.stop()
    assert gone(pid)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rebalance": "routing", "expert_servers": 2}, "--rebalance: got 'routing'; allowed: load without"),
        ({"rebalance": "load"}, "--expert-servers: got 0; allowed: at least 1 with --rebalance"),
        ({"rebalance": "x", "expert_servers": 2}, "--rebalance: got 'x'; allowed: load, routing"),
        (
            {"rebalance": "load", "expert_servers": 2, "rebalance_interval": 0.0},
            "--rebalance-interval: got 0; allowed: more than 0 with --rebalance",
        ),
        (
            {"rebalance": "routing", "dispatch": "round-robin", **RANKS},
            "--dispatch: got 'round-robin'; allowed: affinity, affinity-rounds with --rebalance routing",
        ),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**settings).resolve()


def test_where_load_moves_experts_no_table_says_where_they_are(alone: Alone, tmp_path: Path) -> None:
    file = write(tmp_path, alone.profile, shuffled(alone.profile, 0))
    settings = ClusterConfig(placement=file, rebalance="load", **RANKS).resolve()
    assert choose_dispatch(settings, Placement.read(file, 2))[0] == "least-loaded"
    with pytest.raises(ConfigError, match="--dispatch: got 'affinity'; allowed: .* without --rebalance load"):
        choose_dispatch(replace(settings, dispatch="affinity"), Placement.read(file, 2))


@pytest.mark.slow
def test_load_moves_experts_of_a_file_where_asked(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.cluster.balancing.HORIZON", 10**6)
    loads = alone.profile.loads
    held = {}
    for row, layer in enumerate(alone.profile.layers):
        order = np.argsort(-loads[row])
        half = len(order) // 2
        held[layer] = {0: order[:half].tolist(), 1: order[half:].tolist()}  # the hot ones together
    file = tmp_path / "hot.json"
    file.write_text(Placement(0, alone.profile.num_experts, held, alone.profile.model).to_json())
    with cluster(expert_servers=2, placement=str(file), rebalance="load", rebalance_interval=1.0) as served:
        before = served.supervisor.placement
        while not served.supervisor.report().counters.rebalances or served.supervisor.report().change:
            served.submit(*workload(COUNT, TOKENS))
            served.until(lambda: not served.running.unfinished)
            assert len(served.running.answers) < 100 * COUNT, "no expert moved"
        answers = served.finish()
        assert answers == alone.answers * (len(answers) // COUNT)
        after = served.supervisor.placement
        assert before is not None and after is not None and after.experts_by_layer != before.experts_by_layer
