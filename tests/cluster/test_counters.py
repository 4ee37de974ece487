"""Counters of processes: none ever decreases, whatever ends, is replaced, joins or leaves."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from moesaic.cluster.member import Member, RestartRule, Role, Stage
from moesaic.cluster.report import counters, process_status
from moesaic.cluster.totals import counters_only, server_counters_only, sum_stats
from moesaic.core import messages
from moesaic.core.cluster_status import ClusterStatus
from moesaic.core.metrics import (
    BlockStats,
    ExpertServerStats,
    ExpertStats,
    PaceStats,
    ResidencyStats,
    WorkerStats,
)
from moesaic.server.cluster_metrics import ClusterCollector
from tests.cluster.test_changes import Scene
from tests.cluster.test_identity import workload
from tests.support.cluster_driver import Cluster, cluster
from tests.support.fake_worker import info

Totals = dict[str, float]
"""Counter -> the sum of its series."""


def read_totals(report: Callable[[], ClusterStatus]) -> Totals:
    """Every counter of /metrics of the processes, summed over its series."""

    class Source:
        def report(self) -> ClusterStatus:
            return report()

        def load(self) -> None:
            return None

    registry = CollectorRegistry(auto_describe=False)
    registry.register(ClusterCollector(Source(), "m"))  # type: ignore[arg-type]
    totals: Totals = {}
    for line in generate_latest(registry).decode().splitlines():
        found = re.match(r"(\S+?_total)(?:\{.*\})? (\S+)", line)
        if found:
            totals[found[1]] = totals.get(found[1], 0.0) + float(found[2])
    assert totals
    return totals


def assert_grown(before: Totals, after: Totals) -> None:
    smaller = {
        name: (count, after.get(name)) for name, count in before.items() if after.get(name, 0.0) < count
    }
    assert not smaller, "these counters decreased"


def server_stats(work: int) -> ExpertServerStats:
    """What a server says after so much work."""
    residency = ResidencyStats(*(work + step for step in range(len(fields(ResidencyStats)))))
    return ExpertServerStats(2, 7, 3 * work, work, work, float(work), residency, PaceStats(work, work))


def worker_stats(work: int) -> WorkerStats:
    experts = ExpertStats(work, work, work, work, work, work, far_bytes=work, pace=PaceStats(work, work))
    return WorkerStats(3, 4, work, work, blocks=BlockStats(9, 5, 2, 2, work, work), experts=experts)


class Counting:
    """A cluster without processes, which work, die, join and leave as a test says."""

    def __init__(self) -> None:
        self.scene = Scene(2)
        members, router = self.scene.members, self.scene.router
        router.join(members.workers[0].worker_id, members.workers[0].child.connection, info())  # type: ignore[union-attr]
        self.work: dict[tuple[str, int], int] = {}

    def member(self, place: int) -> Member | None:
        members = self.scene.members.all_members
        return members[place % len(members)] if members else None

    def do(self, step: str, place: int, work: int) -> None:
        scene, member = self.scene, self.member(place)
        if step == "join":
            added = scene.members.add(Role.SERVER if place % 2 else Role.WORKER)
            self.start(added)
        elif member is None:
            return
        elif step == "work" and member.child is not None:
            key = member.name, member.incarnation
            self.work[key] = self.work.get(key, 0) + work
            if member.role is Role.SERVER:
                member.record_stats(server_stats(self.work[key]))
            else:
                scene.router.take(member.worker_id, messages.Stats(worker_stats(self.work[key])))
        elif step == "die" and member.child is not None:
            member.record_death("it died", 0.0, RestartRule())
            if member.is_client:
                scene.router.leave(member.worker_id)
        elif step == "restart" and member.child is None:
            self.start(member)
        elif step == "leave":
            if member.is_client:
                scene.router.leave(member.worker_id)
            scene.members.remove(member)

    def start(self, member: Member) -> None:
        scene = self.scene
        scene.members._listen(member, scene.process(member.name))
        member.stage = Stage.SERVING
        if member.is_client:
            assert member.child is not None
            scene.router.join(member.worker_id, member.child.connection, info())

    def report(self) -> ClusterStatus:
        members, past_members = self.scene.members.snapshot()
        return ClusterStatus(
            1,
            1,
            None,
            [process_status(member, None, 0.0) for member in members],
            [],
            [],
            counters(members, past_members, self.scene.router, 0),
            past_servers=past_members.server_stats,
        )


STEPS = st.tuples(
    st.sampled_from(["work", "work", "work", "die", "restart", "join", "leave"]),
    st.integers(0, 5),
    st.integers(0, 9),
)


@given(st.lists(STEPS, max_size=20))
def test_no_counter_ever_decreases(steps: list[tuple[str, int, int]]) -> None:
    counting = Counting()
    totals, worked = read_totals(counting.report), counting.scene.router.stats()
    for step in steps:
        counting.do(*step)
        totals_now = read_totals(counting.report)
        assert_grown(totals, totals_now)
        worked_now = counting.scene.router.stats()
        assert worked_now.steps >= worked.steps and worked_now.experts.calls >= worked.experts.calls
        assert worked_now.blocks.prefix_hits >= worked.blocks.prefix_hits
        totals, worked = totals_now, worked_now
    servers = sum(count for (name, _), count in counting.work.items() if name.startswith("expert"))
    workers = sum(count for (name, _), count in counting.work.items() if not name.startswith("expert"))
    assert totals["moesaic:paced_runs_total"] == servers + workers, "and nothing is counted twice"
    assert worked.steps == workers
    counting.scene.members.stop()


def numbers_of(record: Any, prefix: str = "") -> dict[str, float]:
    """The numbers of a record and of the records in it."""
    found: dict[str, float] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, int | float):
            found[prefix + field.name] = value
        elif not isinstance(value, tuple):
            found |= numbers_of(value, f"{prefix}{field.name}.")
    return found


@given(st.integers(1, 99), st.integers(1, 99))
def test_what_remains_of_a_process_is_what_it_has_counted(first: int, second: int) -> None:
    server = sum_stats([server_counters_only(server_stats(first)), server_stats(second)])
    worker = sum_stats([counters_only(worker_stats(first)), worker_stats(second)])
    blocks = {f"blocks.num_{kind}" for kind in ("total", "free", "cached", "used")}
    for parts, total, states in (
        ((server_stats(first), server_stats(second)), server, {"clients", "waiting_pairs"}),
        ((worker_stats(first), worker_stats(second)), worker, {"running", "waiting", *blocks}),
    ):
        before, now, whole = (numbers_of(record) for record in (*parts, total))
        assert {name for name in whole if whole[name] != now[name] + before[name]} == states


def exercise(served: Cluster) -> None:
    served.submit(*workload(2, 12))
    served.finish()


@pytest.mark.slow
def test_counters_of_real_processes_that_die_and_leave() -> None:
    """Servers of half of their experts' memory, so that each counts what it reads."""
    with cluster(attention_workers=2, expert_servers=2, server_memory=1 << 20) as served:
        supervisor, totals = served.supervisor, Totals()

        def check() -> None:
            nonlocal totals
            now = read_totals(supervisor.report)
            assert_grown(totals, now)
            totals = now

        def works() -> bool:
            check()
            return totals["moesaic:expert_server_bytes_total"] > 0

        exercise(served)
        served.until(works)
        for name in ("expert server 0", "attention worker 1"):
            os.kill(served.pid(name), signal.SIGKILL)
            exercise(served)
            served.until(lambda: all(one.stage == "serving" for one in supervisor.status()))
            check()
        for servers, workers in ((1, 1), (2, 2), (1, 1)):
            future = supervisor.scale(servers, workers)
            while not future.done():
                served.take(0.02)
                check()
            future.result()
            exercise(served)
            check()
        assert totals["moesaic:process_deaths_total"] == 2
        residency = supervisor.report().past_servers.residency
        assert residency.loaded_bytes > 0, "servers that have left have read experts"
