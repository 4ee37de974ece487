"""A loop that dies or hangs goes on in another thread, until that happens too often."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from moesaic.cluster import watchdog
from moesaic.cluster.member import RestartRule
from moesaic.cluster.watchdog import Watchdog
from tests.support.hosts import soon


class Loop:
    """Does one thing after the other."""

    def __init__(self) -> None:
        self.todo: list[Callable[[], object]] = []
        self.done: list[str] = []
        self.faults: list[str] = []
        self.given_up: list[str] = []
        self.watchdog = Watchdog(self.run, self.resume, self.fault, self.given_up.append, time.monotonic)
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            self.watchdog.beat()
            if self.todo:
                self.todo.pop(0)()
            time.sleep(0.001)

    def resume(self) -> None:
        self.done.append("resumed")

    def fault(self, what: str, error: BaseException | None) -> None:
        self.faults.append(what)

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr(watchdog, "TURN", 0.01)
    made = Loop()
    made.watchdog.is_armed, made.watchdog.hung_seconds = True, 0.5  # fifty turns, however busy the cores are
    made.watchdog.rule = RestartRule(first_delay=0.0)
    made.watchdog.start()
    yield made
    made.watchdog.stop(made.end)


def dying() -> None:
    raise SystemExit("a bug")


def spinning() -> None:
    while True:
        pass


def test_a_thread_that_dies_is_replaced(loop: Loop) -> None:
    loop.todo += [dying, lambda: loop.done.append("next")]
    soon(lambda: "next" in loop.done)
    assert loop.done == ["resumed", "next"] and loop.faults == ["its thread died: SystemExit: a bug"]
    assert loop.watchdog.restarts == 1 and not loop.given_up


def test_a_thread_that_hangs_is_replaced_and_ends_once_it_runs_again(loop: Loop) -> None:
    hanging = threading.Lock()
    hanging.acquire()

    def late() -> None:
        hanging.acquire(timeout=60)
        loop.done.append("what the old thread wanted to do next")

    old = loop.watchdog._thread
    loop.todo += [late, lambda: loop.done.append("next")]
    soon(lambda: "next" in loop.done)
    assert old.is_alive() and loop.faults[0].startswith("its thread hangs in late (test_watchdog.py, line ")
    hanging.release()
    soon(lambda: not old.is_alive())
    assert loop.done == ["resumed", "next"]


def test_an_endless_loop_in_python_ends(loop: Loop) -> None:
    old = loop.watchdog._thread
    loop.todo += [spinning, lambda: loop.done.append("next")]
    soon(lambda: "next" in loop.done and not old.is_alive())


def test_who_dies_six_times_within_a_minute_is_given_up(loop: Loop) -> None:
    loop.todo += [dying] * 6
    soon(lambda: bool(loop.given_up))
    assert loop.given_up == ["its thread died: SystemExit: a bug"] and len(loop.faults) == 5


def test_who_hangs_six_times_is_given_up_however_long_each_hang_is(loop: Loop) -> None:
    loop.watchdog.rule, loop.watchdog.hung_seconds = RestartRule(first_delay=0.0, window=1.0), 0.25
    loop.todo += [spinning] * 6
    soon(lambda: bool(loop.given_up))
    assert len(loop.faults) == 5


def test_before_the_cluster_serves_nothing_hangs_and_one_death_is_the_end(loop: Loop) -> None:
    loop.watchdog.is_armed, loop.watchdog.hung_seconds = False, 0.1
    loop.todo += [lambda: time.sleep(0.3), lambda: loop.done.append("late"), dying]
    soon(lambda: bool(loop.given_up))
    assert loop.done == ["late"] and not loop.faults
