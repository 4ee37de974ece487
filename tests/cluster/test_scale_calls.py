"""Scaling calls that replace or cancel each other: the last one decides, and nothing is left half done."""

from __future__ import annotations

from concurrent.futures import Future
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moesaic.cluster.change_queue import ChangeQueue
from moesaic.cluster.member import Stage
from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError, ScalingError
from tests.cluster.test_changes import LAYOUT, FakeProcess, Scene
from tests.cluster.test_scaling import names
from tests.support.cluster_driver import cluster

COPIES = 4
"""Copies of experts that a layer of the scene has, so at most so many servers."""


class Calls:
    """A cluster without processes, whose servers load when the test says so."""

    def __init__(self) -> None:
        self.scene = Scene(2)
        settings = ClusterConfig(expert_servers=2, rebalance_interval=0.0)
        self.queue = ChangeQueue(
            *(self.scene.members, self.scene.publisher, self.scene.router, settings),
            lambda: self.scene.now,
            lambda reason: None,
        )
        self.queue.set_layout(LAYOUT)
        self.calls: list[tuple[int, int, Future[None]]] = []
        """(servers, servers before it or before the calls that it replaced, future) of each accepted call."""

    def spawn(self, config: object) -> FakeProcess:
        return self.scene.process(self.scene.members.all_members[-1].name)

    def scale(self, servers: int) -> None:
        future, now = Future[None](), len(self.scene.members.servers)
        is_busy = bool(self.queue._list_requested_changes())
        former = self.calls[-1][1] if is_busy else now
        self.queue.scale(servers, None, None, future)
        if not future.done():
            self.calls.append((servers, former, future))
            return
        assert isinstance(future.exception(), ConfigError)
        assert servers > max(COPIES, now), "what has room is not refused"

    def cancel(self) -> None:
        future, is_busy = Future[None](), bool(self.queue._list_requested_changes())
        self.queue.cancel_scaling(future)
        assert is_busy or isinstance(future.exception(0), ScalingError)

    def turn(self) -> None:
        self.queue.advance(self.scene.now)
        self.scene.settle()
        self.scene.now += 0.2

    def load(self) -> None:
        """Every server has what it should hold."""
        for member in self.scene.members.servers:
            if member.stage is not Stage.DRAINING:
                self.scene.holds(member)

    def end(self) -> None:
        """Until nothing is left to do."""
        for _ in range(300):
            self.turn()
            self.load()
            if self.queue.change_description is None and not self.queue._list_requested_changes():
                return
        raise AssertionError("the change does not end")


STEPS = st.one_of(
    st.tuples(st.just("scale"), st.integers(1, COPIES + 2)),
    st.tuples(st.just("turn"), st.integers(1, 9)),
    st.sampled_from([("cancel", 0), ("load", 0)]),
)


@given(st.lists(STEPS, max_size=14))
@example([("scale", 4), ("turn", 2), ("scale", 1), ("turn", 1), ("cancel", 0), ("scale", 3)])
@example([("scale", 4), ("turn", 2), ("load", 0), ("turn", 5), ("cancel", 0), ("turn", 1), ("cancel", 0)])
@example([("scale", 4), ("turn", 2), ("load", 0), ("turn", 15), ("scale", 4), ("turn", 1), ("cancel", 0)])
def test_the_last_call_decides(steps: list[tuple[str, int]]) -> None:
    calls = Calls()
    with mock.patch("moesaic.cluster.launcher.spawn_server", calls.spawn):
        for name, number in steps:
            match name:
                case "scale":
                    calls.scale(number)
                case "turn":
                    for _ in range(number):
                        calls.turn()
                case "cancel":
                    calls.cancel()
                case "load":
                    calls.load()
        calls.end()
    servers = [member.number for member in calls.scene.members.servers]
    for _, _, future in calls.calls[:-1]:
        assert future.done()
    if calls.calls:
        wanted, former, future = calls.calls[-1]
        error = future.exception(0)
        assert len(servers) == (wanted if error is None else former)
        assert error is None or "was cancelled; the cluster is as it was" in str(error) or error.conflict  # type: ignore[attr-defined]
    placement = calls.scene.publisher.placement
    assert placement is not None and sorted(placement.servers) == sorted(servers)
    assert placement.replicas(0).tolist() == [1] * LAYOUT.num_experts
    calls.scene.members.stop()


@pytest.mark.slow
def test_a_typo_is_refused_and_a_long_call_is_replaced_and_cancelled() -> None:
    """The demo has 24 experts in each layer, so 24 servers have something to do, and not 1000."""
    with cluster(attention_workers=1, expert_servers=2) as served:
        supervisor = served.supervisor
        with pytest.raises(
            ConfigError, match="expert_servers: got 1000; allowed: at most 24: a layer has 24"
        ):
            supervisor.scale(expert_servers=1000).result(60)
        with pytest.raises(
            ConfigError, match=r"attention_workers: got 1000; allowed: at most \d+: each takes"
        ):
            supervisor.scale(attention_workers=1000).result(60)
        with pytest.raises(ScalingError, match="no scaling call is under way"):
            supervisor.cancel_scaling().result(60)
        first, second = supervisor.scale(expert_servers=24), supervisor.scale(expert_servers=3)
        with pytest.raises(ScalingError, match="a newer scaling call replaced this one") as replaced:
            first.result(60)
        assert replaced.value.conflict
        served.until(second.done)
        second.result()
        assert len(names(served)) == 4
        third = supervisor.scale(expert_servers=24)
        served.until(lambda: len(names(served)) > 4)
        cancelled = supervisor.cancel_scaling()
        with pytest.raises(ScalingError, match="the scaling call was cancelled; the cluster is as it was"):
            third.result(60)
        cancelled.result(60)
        assert len(names(served)) == 4
