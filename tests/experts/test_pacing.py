"""The timing of modelled devices, on a clock that only moves when somebody sleeps."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from moesaic.core.curves import Curve
from moesaic.core.errors import ConnectionLost
from moesaic.core.metrics import PaceStats
from moesaic.core.paced_devices import LinkModel, PacedDevices
from moesaic.core.tokens import IntArray
from moesaic.experts.backend import CallPairs
from moesaic.experts.pacing import Pace, PacedBackend, PacedCaller
from moesaic.transport.calls import Call

ROWS = np.zeros((4, 2), np.float32)


@dataclass
class Time:
    now: float = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pace(self, dilation: float = 1.0) -> Pace:
        return Pace(dilation, None, self.clock, self.sleep)


def test_a_run_is_held_until_its_modelled_end() -> None:
    at = Time()
    pace = at.pace(10.0)
    at.now += 3.0
    pace.hold(100.0, 0.5)
    assert at.now == 105.0, "five seconds after its beginning"
    pace.hold(100.0, 0.5)
    assert at.now == 105.0 and pace.stats == PaceStats(2, 0)
    at.now += 0.1
    pace.hold(100.0, 0.5)
    assert at.now == 105.1 and pace.stats == PaceStats(3, 1), "it took longer than the device"


def test_what_is_due_happens_at_its_time_and_in_order() -> None:
    at, done = Time(), list[tuple[str, float]]()
    pace = at.pace()
    for name, due in (("c", 103.0), ("a", 101.0), ("b", 101.0), ("later", 110.0)):
        pace.schedule(due, lambda name=name: done.append((name, at.now)))  # type: ignore[misc]
    pace.act()
    assert done == []
    pace.hold(100.0, 4.0)
    assert done == [("a", 101.0), ("b", 101.0), ("c", 103.0)] and at.now == 104.0


def test_it_rings_when_something_is_due() -> None:
    rung, done = threading.Event(), list[int]()
    pace = Pace(1.0, rung.set)
    pace.schedule(time.monotonic() + 0.02, lambda: done.append(1))
    assert rung.wait(10.0)
    pace.act()
    assert done == [1]


@dataclass
class Backend:
    """Takes 0.1 s for each run."""

    at: Time
    name: str = "slow"
    device_name: str = ""
    resident_experts: dict[int, list[int]] = field(default_factory=lambda: {0: [1, 2]})
    ran: list[int] = field(default_factory=list)

    def load(self, experts_by_layer: object) -> None: ...
    def keep_only(self, experts_by_layer: object) -> None: ...
    def run(self, layer: int, parts: object) -> None:
        self.at.now += 0.1
        self.ran.append(layer)


def test_a_server_takes_its_curve() -> None:
    at = Time()
    devices = PacedDevices("", Curve(((1, 1.0),)), Curve(((2, 1.0), (4, 2.0)), 0.25), LinkModel(0, 1))
    backend = PacedBackend(Backend(at), devices, at.pace(2.0))
    parts = [CallPairs(ROWS, np.arange(3), np.array([5, 7, 5]), ROWS, np.arange(3))]
    backend.run(3, [*parts, CallPairs(ROWS, np.arange(1), np.array([7]), ROWS, np.arange(1))])
    assert at.now == 100.0 + 2.0 * (2.0 + 2 * 0.25), "four pairs, two experts"
    assert backend.name == "slow, paced" and backend.resident_experts == {0: [1, 2]}


@dataclass(eq=False)
class Sent:
    number: int
    size: int
    rows: int = 2
    row_bytes: int = 8

    @property
    def request(self) -> bytes:
        return bytes(self.size)


@dataclass
class Line:
    """A caller that notes when a call is posted."""

    at: Time
    posted: list[tuple[int, float]] = field(default_factory=list)
    lost: bool = False

    def post(self, call: Call) -> None:
        if self.lost:
            raise ConnectionLost("gone")
        self.posted.append((call.number, self.at.now))

    def poll(self) -> list[tuple[Call, IntArray]]:
        return []

    def release(self, call: Call) -> None: ...
    def close(self) -> None: ...


def test_requests_pass_a_link_one_after_another_and_answers_take_their_way() -> None:
    at = Time()
    pace, line = at.pace(10.0), Line(at)
    caller = PacedCaller(line, LinkModel(0.25, 32.0), pace)  # type: ignore[arg-type]
    for number, size in ((1, 16), (2, 48), (3, 16)):
        caller.post(Sent(number, size))  # type: ignore[arg-type]
    caller.release(Sent(3, 16))  # type: ignore[arg-type]
    assert line.posted == []
    at.now = 115.0
    caller.poll()
    assert line.posted == [(1, 115.0)], "16 + 16 bytes: one second, and half a second of latency, times ten"
    pace.hold(115.0, 10.0)
    assert line.posted == [(1, 115.0), (2, 135.0)], "64 bytes more behind it; the third was released"


@pytest.mark.parametrize("closed", [True, False])
def test_a_lost_connection_is_found_by_polling(closed: bool) -> None:
    at = Time()
    pace, line = at.pace(), Line(at, lost=True)
    caller = PacedCaller(line, LinkModel(0.0, 32.0), pace)  # type: ignore[arg-type]
    caller.post(Sent(1, 16))  # type: ignore[arg-type]
    if closed:
        caller.close()
    at.now += 100.0
    caller.poll()
    assert line.posted == []
