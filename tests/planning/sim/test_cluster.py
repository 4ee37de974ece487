from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.support import pairs
from tests.support.small_scenario import EXPERTS, HIDDEN, LAYERS, TOP_K, cluster

from moesaic.core.tokens import IntArray
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.figures import Figures
from moesaic.planning.sim.timeline import Timeline

SCHEDULES: list[dict[str, Any]] = [
    {"kind": "lockstep"},
    {"kind": "lockstep", "inflight_batches": 2},
    {"kind": "barrier"},
    {"kind": "async"},
    {"kind": "async", "run_rows": 0},
    {"kind": "async", "run_rows": 0, "combine": "partial", "queue_policy": "mtfs"},
]
CLOSED = {"kind": "closed", "clients": 1, "prompt": 1, "answer": 12, "requests": 3}
ALONE = {"workers": {"count": 1}, "servers": {"count": 1}, "workload": CLOSED, "duration": 60.0}


def times(found: Any) -> list[list[float]]:
    """When the tokens of each request came."""
    return [life.times for life in found.front.lives]


def loads(found: SimulatedCluster) -> IntArray:
    """[layers, E] pairs that each expert computed."""
    every: IntArray = np.sum([server.load for server in found.fleet.servers.values()], axis=0)
    return every


def exact(figures: Figures) -> str:
    return json.dumps(asdict(figures))


# ---- closed forms


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_worker_and_one_server_take_the_sum_of_their_parts(schedule: dict[str, Any]) -> None:
    found = cluster(**ALONE, schedule=schedule)
    found.run()
    row, answers = 4 * HIDDEN, 1 if schedule.get("combine") == "partial" else TOP_K
    out = 1e-4 + row / 1e6
    back = 1e-4 + answers * row / 1e6
    token = LAYERS * (2e-3 + out + (1e-3 + TOP_K * 0.25e-3) + back) + 2e-3
    if schedule["kind"] == "barrier":
        token += 2e-4  # to the barrier and back
    gaps = [later - earlier for one in times(found) for earlier, later in pairwise(one)]
    assert len(gaps) == 3 * 11
    assert gaps == pytest.approx([token] * len(gaps), rel=1e-9)


def test_a_server_that_is_heard_late_waits_for_no_call_that_does_not_come() -> None:
    """The first step begins while workers still connect, and most calls of it have no pairs."""
    many = {"workers": {"count": 8}, "servers": {"count": 8, "beside_workers": True}, "duration": 0.9}
    work = {"kind": "closed", "clients": 8, "prompt": 1, "answer": 12}
    found = cluster(**many, schedule={"kind": "barrier"}, workload=work)
    found.run()
    starts = [one[0] for one in times(found) if one]
    assert starts and min(starts) < 0.3


def test_the_sampler_has_its_own_time() -> None:
    found = cluster(**ALONE | {"workers": {"count": 1, "sampler_ms": 0.0}})
    found.run()
    row = 4 * HIDDEN / 1e6
    token = LAYERS * (2e-3 + (1e-4 + row) + 1.5e-3 + (1e-4 + TOP_K * row))
    gaps = np.diff(times(found)[0])
    assert gaps.tolist() == pytest.approx([token] * 11, rel=1e-9)


def test_a_worker_s_own_time_comes_on_top() -> None:
    ends = []
    for event in (0.0, 300.0):
        found = cluster(**ALONE | {"workers": {"count": 1, "event_us": event}})
        found.run()
        ends.append(np.diff(times(found)[0]))
    assert (ends[1] - ends[0]).tolist() == pytest.approx([300e-6] * 11)  # one event for each token: StepDone


@pytest.mark.slow
def test_two_batches_in_flight_overlap() -> None:
    work = {"kind": "closed", "clients": 16, "prompt": 1, "answer": 40}
    apart = {"workers": {"count": 1}, "servers": {"count": 1}, "workload": work, "duration": 4.0}
    one, two = (
        cluster(**apart, schedule={"kind": "lockstep", "inflight_batches": count}).run() for count in (1, 2)
    )
    assert two.throughput > 1.2 * one.throughput


# ---- conservation


KINDS = ("dies", "vanishes", "freezes")
FAULTS = list(itertools.product(SCHEDULES, KINDS))
FAULTS_NOW = [(one, KINDS[number % len(KINDS)]) for number, one in enumerate(SCHEDULES)]


@pytest.mark.parametrize(("schedule", "kind"), pairs.some(FAULTS, FAULTS_NOW))
def test_every_token_comes_though_servers_die(schedule: dict[str, Any], kind: str) -> None:
    faults = [
        {"at": at, "server": number, "kind": kind, "back": 1.5}
        for at, number in ((0.31, 0), (2.5, 1), (4.7, 0))
    ]
    work = {"kind": "closed", "clients": 12, "prompt": [3, 9], "answer": [10, 20], "requests": 100}
    found = cluster(
        schedule=schedule,
        faults=faults,
        workload=work,
        placement={"min_replicas": 2},
        duration=60.0,
    )
    figures = found.run()
    assert [len(one) for one in times(found)] == [
        life.request.params.max_tokens for life in found.front.lives
    ]
    assert figures.completed == len(found.front.lives) == 100
    assert figures.tokens == sum(map(len, times(found)))
    assert figures.failovers > 0
    assert (figures.silent_failovers > 0) == (kind != "dies")
    assert figures.resent_pairs > 0
    assert all(not worker.executor.experts.is_waiting for worker in found.workers)
    assert all(server.waiting_pairs == 0 for server in found.fleet.servers.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_token_comes_though_workers_die(schedule: dict[str, Any]) -> None:
    """Worker 0 dies twice and comes back once. Worker 1 then has all requests."""
    faults = [{"at": 0.31, "worker": 0, "back": 0.5}, {"at": 1.7, "worker": 0}, {"at": 1.9, "server": 0}]
    work = {"kind": "closed", "clients": 12, "prompt": [3, 9], "answer": [10, 20], "requests": 100}
    placement = {"min_replicas": 2}
    found = cluster(schedule=schedule, faults=faults, workload=work, placement=placement, duration=60.0)
    figures = found.run()
    lives = found.front.lives
    assert [len(one) for one in times(found)] == [life.request.params.max_tokens for life in lives]
    assert figures.completed == len(lives) == 100
    ends = [life for life in lives if life.times[-1] > 1.7]
    assert ends and all(life.worker == 1 for life in ends)
    assert len({life.worker for life in lives if life.times[-1] < 1.7}) > 1
    names = ["worker 0 dies", "worker 0 is back", "worker 0 dies", "server 0 dies"]
    assert [text for _, text in figures.changes] == names
    assert all(share >= 0 for idle in figures.idle.values() for share in idle.values())


def test_without_replicas_rows_wait_for_the_server_that_comes_back() -> None:
    work = {"kind": "closed", "clients": 4, "prompt": 4, "answer": 10, "requests": 12}
    faults = [{"at": 0.1, "server": 0, "back": 5.0}]
    found = cluster(workload=work, faults=faults, duration=20.0)
    figures = found.run()
    assert figures.completed == 12
    assert max(max(np.diff(one)) for one in times(found)) > 4.0
    assert figures.changes[0] == (0.1, "server 0 dies") and figures.changes[1][1] == "server 0 is back"


def test_a_lost_host_costs_a_timeout_and_a_broken_connection_does_not() -> None:
    work = {"kind": "closed", "clients": 8, "prompt": 4, "answer": 40, "requests": 8}
    longest = {}
    for kind in ("dies", "vanishes"):
        faults = [{"at": 0.2, "server": 0, "kind": kind}]
        found = cluster(workload=work, faults=faults, placement={"min_replicas": 2}, duration=20.0)
        found.run()
        longest[kind] = max(max(np.diff(one)) for one in times(found))
    assert longest["dies"] < 0.15
    assert 0.05 < longest["vanishes"] < 1.0  # the floor and the ceiling of ReplicaTimeout, and a step


def test_a_set_timeout_replaces_the_measured_one() -> None:
    work = {"kind": "closed", "clients": 8, "prompt": 4, "answer": 40, "requests": 8}
    longest = []
    for seconds in (0.2, 0.7):
        found = cluster(
            workload=work,
            faults=[{"at": 0.2, "server": 0, "kind": "vanishes"}],
            placement={"min_replicas": 2},
            schedule={"replica_timeout": seconds},
            duration=20.0,
        )
        found.run()
        longest.append(max(max(np.diff(one)) for one in times(found)))
    assert longest[1] - longest[0] == pytest.approx(0.5, abs=0.1)


# ---- determinism


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_seed_gives_one_run(schedule: dict[str, Any]) -> None:
    one, same, other = (cluster(schedule=schedule, seed=seed, duration=1.0).run() for seed in (3, 3, 4))
    assert exact(one) == exact(same) != exact(other)


@pytest.mark.slow
def test_the_routes_of_a_workload_do_not_depend_on_the_schedule() -> None:
    work = {"kind": "poisson", "rate": 40.0, "prompt": [3, 9], "answer": [4, 12], "requests": 30}
    found = []
    for schedule in SCHEDULES:
        run = cluster(schedule=schedule, workload=work, duration=30.0)
        run.run()
        found.append(loads(run))
    assert all(np.array_equal(load, found[0]) for load in found)


# ---- laws


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_device_computes_more_than_all_the_time(schedule: dict[str, Any]) -> None:
    work = {"kind": "closed", "clients": 64, "prompt": 4, "answer": 20}
    figures = cluster(schedule=schedule, workload=work, duration=4.0, warm_up=1.0).run()
    assert all(0 < share <= 1 + 1e-9 for share in figures.utilisation.values())
    assert max(figures.utilisation.values()) > 0.3
    names = {"worker": "attention worker", "server": "expert server"}
    for device, busy in figures.utilisation.items():
        kind, number = device.split()
        idle = sum(figures.idle[f"{names[kind]} {number}"].values())
        assert busy + idle == pytest.approx(1.0, abs=0.01)


def test_little_s_law_holds_for_requests() -> None:
    work = {"kind": "poisson", "rate": 30.0, "prompt": [3, 9], "answer": [4, 12], "requests": 200}
    run = cluster(workload=work, duration=30.0)
    figures = run.run()
    lives = run.front.lives
    assert all(life.has_ended for life in lives)
    latency = np.mean([life.times[-1] - life.request.arrival for life in lives])
    assert figures.in_flight == pytest.approx(len(lives) / 30.0 * latency, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_little_s_law_holds_for_the_servers_queues(schedule: dict[str, Any]) -> None:
    work = {"kind": "poisson", "rate": 60.0, "prompt": [3, 9], "answer": [4, 12], "requests": 60}
    run = cluster(workload=work, schedule=schedule, duration=30.0)
    figures = run.run()
    pairs = sum(figures.expert_load)
    waited = sum(server.pair_seconds for server in run.fleet.servers.values())
    assert waited > 0
    if schedule["kind"] == "async":  # a call may run in parts, and its mean ends with the first
        assert waited >= pairs * figures.call.queue * (1 - 1e-6)
    elif schedule["kind"] != "barrier":  # empty calls count as a pair in a queue, and as none in the mean
        assert waited == pytest.approx(pairs * figures.call.queue, rel=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_on_links_are_rows_times_hidden_times_bytes(schedule: dict[str, Any]) -> None:
    work = {"kind": "poisson", "rate": 60.0, "prompt": [3, 9], "answer": [4, 12], "requests": 30}
    run = cluster(workload=work, schedule=schedule, links={"number_bytes": 2}, duration=30.0)
    sent = {"rows": 0, "pairs": 0}
    for worker in run.workers:
        before = worker.executor.experts._on_call_answered

        def count(call: Any, now: float, before: Any = before) -> None:
            sent["rows"] += call.rows
            sent["pairs"] += len(call.pairs)
            before(call, now)

        worker.executor.experts._on_call_answered = count
    figures = run.run()
    out = sum(sum(to.values()) for name, to in figures.link_bytes.items() if name.startswith("worker"))
    back = sum(sum(to.values()) for name, to in figures.link_bytes.items() if name.startswith("server"))
    tokens = sum(len(life.request.prompt_token_ids) + len(life.times) - 1 for life in run.front.lives)
    assert sent["pairs"] == tokens * LAYERS * TOP_K == sum(figures.expert_load)
    assert out == sent["rows"] * HIDDEN * 2
    answers = sent["rows"] if schedule.get("combine") == "partial" else sent["pairs"]
    assert back == answers * HIDDEN * 2


@pytest.mark.slow
def test_an_overloaded_server_is_the_bottleneck_by_its_curve() -> None:
    """8 pairs and one expert take 1.25 ms; every run of more rows is at the slope of 1 ms for 8 pairs."""
    work = {"kind": "closed", "clients": 200, "prompt": 1, "answer": 30}
    figures = cluster(
        workload=work,
        schedule={"kind": "async", "run_rows": 0},
        servers={"count": 1},
        workers={"count": 8, "max_num_seqs": 25, "max_model_len": 64},
        duration=6.0,
        warm_up=2.0,
    ).run()
    assert figures.utilisation["server 0"] > 0.97
    most = 1 / (LAYERS * TOP_K * (0.125e-3 + 0.25e-3 * EXPERTS / (200 * TOP_K)))
    assert 0.6 * most < figures.throughput <= most


# ---- prompts, memory, sharing


def test_prompts_from_elsewhere_take_no_rows() -> None:
    work = {"kind": "closed", "clients": 1, "prompt": 9, "answer": 4, "requests": 5}
    pairs = []
    for prefill in (True, False):
        run = cluster(workload=work | {"prefill": prefill}, duration=20.0)
        pairs.append(sum(run.run().expert_load))
    assert pairs == [5 * (9 + 3) * LAYERS * TOP_K, 5 * (1 + 3) * LAYERS * TOP_K]


@pytest.mark.slow
def test_a_small_cache_preempts_and_still_answers() -> None:
    work = {"kind": "closed", "clients": 12, "prompt": 8, "answer": 24, "requests": 24}
    small = {"count": 1, "max_num_seqs": 16, "max_model_len": 40, "kv_tokens": 160, "block_size": 4}
    run = cluster(workload=work, workers=small, duration=60.0)
    figures = run.run()
    assert figures.preemptions > 0 and figures.completed == 24


@pytest.mark.slow
def test_a_worker_and_a_server_on_one_device_take_turns() -> None:
    work = {"kind": "closed", "clients": 32, "prompt": 1, "answer": 30}
    found = {}
    for beside in (False, True):
        servers = {"count": 2, "beside_workers": beside}
        links = {"latency_us": 0.0, "gb_per_s": 1000.0}
        found[beside] = cluster(
            workload=work,
            servers=servers,
            links=links,
            schedule={"kind": "async", "run_rows": 0},
            duration=3.0,
            warm_up=1.0,
        ).run()
    assert list(found[True].utilisation) == ["device 0", "device 1"]
    assert all(share <= 1 + 1e-9 for share in found[True].utilisation.values())
    assert found[True].throughput < found[False].throughput


# ---- balance


@pytest.mark.slow
def test_experts_move_when_a_server_has_too_much() -> None:
    work = {"kind": "closed", "clients": 64, "prompt": 1, "answer": 30}
    skew = {"kind": "zipf", "exponent": 2.0, "shuffled": False}
    found = {}
    for interval in (0.0, 2.0):
        table = {"rebalance_interval": interval, "read_gb_per_s": 100.0}
        run = cluster(
            workload=work,
            routing=skew,
            placement=table,
            schedule={"kind": "async"},
            duration=12.0,
            warm_up=6.0,
        )
        found[interval] = run.run()
    assert [what for _, what in found[2.0].changes] and not found[0.0].changes
    uneven, even = (max(one.expert_load) / sum(one.expert_load) for one in found.values())
    assert even < 0.75 < 0.85 < uneven


@pytest.mark.slow
def test_servers_are_added_under_load() -> None:
    work = {"kind": "closed", "clients": 64, "prompt": 1, "answer": 30}
    table = {"autoscale": "1:2", "start_seconds": 0.5}
    figures = cluster(
        workload=work,
        placement=table,
        schedule={"kind": "async", "run_rows": 0},
        servers={"count": 1, "batch_pairs": 1},
        workers={"count": 8, "max_num_seqs": 8},
        duration=8.0,
    ).run()
    assert [what for _, what in figures.changes] == ["2 servers"]
    assert len(figures.expert_load) == 2 and figures.expert_load[1] > 0


def test_popular_experts_change_with_time() -> None:
    work = {"kind": "closed", "clients": 8, "prompt": 1, "answer": 30}
    skew = {"kind": "zipf", "exponent": 2.0, "shuffled": False, "top_k": 1, "moves_every": 1.0}
    run = cluster(workload=work, routing=skew, duration=1.0)
    run.run()
    first = loads(run)
    assert first[:, 0].sum() > 0.6 * first.sum()
    run.timeline.run(6.0)
    later = loads(run) - first
    assert later[:, 0].sum() < 0.5 * later.sum()


def test_a_timeline_delivers_before_processes_go_on() -> None:
    order: list[str] = []
    timeline = Timeline()
    timeline.schedule(1.0, lambda: order.append("later"), 1)
    timeline.schedule(1.0, lambda: order.append("first"))
    timeline.schedule(1.0, lambda: order.append("second"))
    timeline.run()
    assert order == ["first", "second", "later"]
