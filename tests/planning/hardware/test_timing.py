from __future__ import annotations

import pytest

from moesaic.planning.hardware.timing import SHORTEST, Stopwatch


class Clock:
    """A clock that shows what it is told, and advances while something runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_median_of_what_fits_without_the_first_run() -> None:
    clock, left = Clock(), [0.9, 0.2, 0.1, 0.6, 0.1, 0.3]

    def run() -> None:
        clock.now += left.pop(0)

    assert Stopwatch(limit=1.2, clock=clock).seconds(run) == pytest.approx(0.2)
    assert left == []


def test_what_takes_longer_than_there_is_time_for_runs_once() -> None:
    clock = Clock()
    done: list[int] = []

    def run() -> None:
        done.append(1)
        clock.now += 3.0

    assert Stopwatch(limit=1.0, clock=clock).seconds(run) == 3.0 and len(done) == 1


def test_short_runs_share_a_timing_and_the_device_is_waited_for() -> None:
    clock = Clock()
    waited: list[float] = []

    def run() -> None:
        clock.now += SHORTEST / 4

    def wait() -> None:
        waited.append(clock.now)

    found = Stopwatch(limit=2 * SHORTEST, clock=clock, wait=wait).seconds(run)
    assert abs(found - SHORTEST / 4) < 1e-12
    assert len(waited) == 2 * (1 + 2), "before and after the first run and two timings of four runs"


def test_work_that_is_only_ordered_is_counted_when_it_is_done() -> None:
    clock = Clock()
    ordered: list[int] = []

    def wait() -> None:
        clock.now += 0.5 * len(ordered)
        ordered.clear()

    assert Stopwatch(limit=0.4, clock=clock, wait=wait).seconds(lambda: ordered.append(1)) == 0.5


def test_a_clock_that_stands_still_gives_a_number() -> None:
    assert Stopwatch(limit=1e-12, clock=lambda: 1.0).seconds(lambda: None) > 0
