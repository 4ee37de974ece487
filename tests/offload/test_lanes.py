from __future__ import annotations

import gc
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.core.errors import ConfigError
from moesaic.offload.lanes import Lanes
from moesaic.policy.offloading.pipeline import SCHEDULES, Schedule, decode
from moesaic.policy.offloading.tasks import Kind, Lane, Shape, Task

SHAPES = st.builds(
    Shape,
    layers=st.integers(1, 4),
    micro_batches=st.integers(1, 4),
    pages=st.integers(0, 5),
    uses_pinned_memory=st.booleans(),
    slow_attention=st.booleans(),
    cache_moves=st.booleans(),
    slow_experts=st.just(True),
    fast_experts=st.booleans(),
)
OTHERS = tuple(lane for lane in Lane if lane is not Lane.FAST)


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Makes Ctrl-C interrupt, even if the shell that started pytest in the background made it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def nothing(lane: Lane) -> AbstractContextManager[None]:
    return nullcontext()


def ticks() -> Callable[[], float]:
    """A clock that advances by one whenever it is read."""
    count = itertools.count()
    return lambda: float(next(count))


def task(lane: Lane, *needs: int, kind: Kind = Kind.PRE, part: int = 0) -> Task:
    return Task(kind, lane, 0, part, needs)


def lane_threads() -> list[str]:
    """The names of all lane threads. Lanes of another test's LLM end when it is collected, so collect it."""
    gc.collect()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lane ")]


class Log:
    """Records which tasks began and ended, in which order and in which thread."""

    def __init__(self, tasks: Sequence[Task], pauses: Sequence[float | None] = (None,)) -> None:
        self._places = {id(one): place for place, one in enumerate(tasks)}
        self._pauses = pauses
        self.events: list[tuple[str, int]] = []
        self.threads: dict[Lane, set[int]] = {lane: set() for lane in Lane}

    def do(self, one: Task) -> None:
        place = self._places[id(one)]
        self.events.append(("begin", place))
        self.threads[one.lane].add(threading.get_ident())
        pause = self._pauses[place % len(self._pauses)]
        if pause is not None:
            time.sleep(pause)
        self.events.append(("end", place))


def expanded(tasks: Sequence[Task], place: int) -> set[int]:
    """The tasks that a task needs. In place of a barrier it has the tasks that the barrier needs."""
    found: set[int] = set()
    for need in tasks[place].needs:
        found |= expanded(tasks, need) if tasks[need].kind is Kind.SYNC else {need}
    return found


def in_order(tasks: Sequence[Task], log: Log) -> None:
    at = {event: position for position, event in enumerate(log.events)}
    done = [place for place, one in enumerate(tasks) if one.kind is not Kind.SYNC]
    assert len(at) == len(log.events) == 2 * len(done)
    for place in done:
        for need in expanded(tasks, place):
            assert at["end", need] < at["begin", place], (tasks[need], tasks[place])
    for lane in Lane:
        mine = [place for place in done if tasks[place].lane is lane]
        wanted = [(what, place) for place in mine for what in ("begin", "end")]
        assert [event for event in log.events if event[1] in set(mine)] == wanted
        assert len(log.threads[lane]) == bool(mine)


def test_worked_example() -> None:
    tasks = [task(Lane.FAST), task(Lane.LINK_DOWN, 0), task(Lane.FAST, 1)]
    with Lanes(nothing, ticks()) as lanes:
        line = lanes.run(tasks, lambda one: None)
    assert (line.starts, line.ends) == ([1, 3, 5], [2, 4, 6])
    assert line.busy == {**dict.fromkeys(Lane, 0), Lane.FAST: 2, Lane.LINK_DOWN: 1}
    assert line.makespan == 6 and line.bottleneck is Lane.FAST


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(SHAPES, st.sampled_from(SCHEDULES), st.randoms(use_true_random=False), st.booleans())
def test_a_task_begins_when_what_it_needs_has_ended(
    shape: Shape, schedule: Schedule, rng: random.Random, paused: bool
) -> None:
    tasks = decode(schedule, shape)
    log = Log(tasks, rng.choices([None, 0.0, 2e-4, 6e-4], k=17) if paused else [None])
    with Lanes(nothing, ticks()) as lanes:
        line = lanes.run(tasks, log.do)
    in_order(tasks, log)
    for place, one in enumerate(tasks):
        assert all(line.ends[need] < line.starts[place] for need in one.needs)
        assert line.starts[place] < line.ends[place]
    for lane in Lane:
        mine = [place for place, one in enumerate(tasks) if one.lane is lane]
        assert line.busy[lane] == sum(line.ends[place] - line.starts[place] for place in mine)


@pytest.mark.slow
def test_threads_work_at_once_and_live_as_long_as_the_lanes() -> None:
    together = threading.Barrier(len(Lane))
    tasks = [task(lane) for lane in Lane] * 3
    with Lanes(nothing) as lanes:
        assert lanes.run([], lambda one: None).makespan == 0 and not lane_threads()
        lanes.run(tasks, lambda one: together.wait(timeout=60))
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("lane ")]
        assert len(threads) == len(OTHERS) and all(thread.daemon for thread in threads)
        idents = {thread.ident for thread in threads}
        for _ in range(20):
            log = Log(schedule := decode("cgopipe", Shape(3, 3, 3, uses_pinned_memory=True)))
            lanes.run(schedule, log.do)
            in_order(schedule, log)
            assert log.threads[Lane.FAST] == {threading.get_ident()}
            assert set.union(*(log.threads[lane] for lane in OTHERS)) <= idents
    assert not lane_threads()


class Rooms:
    """A setup that records which lanes entered and left, and fails as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.events: list[tuple[str, Lane, int]] = []

    @contextmanager
    def __call__(self, lane: Lane) -> Iterator[None]:
        if self.failures and lane is not Lane.FAST:
            self.failures -= 1
            raise OSError("no core")
        self.events.append(("in", lane, threading.get_ident()))
        yield
        self.events.append(("out", lane, threading.get_ident()))


def test_each_lane_in_use_is_set_up_once_in_its_thread() -> None:
    rooms, tasks = Rooms(), [task(Lane.LINK_DOWN), task(Lane.FAST, 0), task(Lane.LINK_DOWN, 1)]
    with Lanes(rooms) as lanes:
        assert rooms.events == [("in", Lane.FAST, threading.get_ident())]
        for _ in range(3):
            log = Log(tasks)
            lanes.run(tasks, log.do)
        (down,) = log.threads[Lane.LINK_DOWN]
        assert rooms.events[1:] == [("in", Lane.LINK_DOWN, down)]
    assert rooms.events[2:] == [("out", Lane.LINK_DOWN, down), ("out", Lane.FAST, threading.get_ident())]


def test_a_setup_that_fails_is_an_error_of_the_run_and_tried_again() -> None:
    tasks = [task(Lane.LINK_UP), task(Lane.FAST, 0)]
    with Lanes(Rooms(failures=2)) as lanes:
        for _ in range(2):
            log = Log(tasks)
            with pytest.raises(OSError, match="no core"):
                lanes.run(tasks, log.do)
            assert not log.events
        lanes.run(tasks, log.do)
        in_order(tasks, log)


class Trouble(Exception):
    pass


def is_stopped(lanes: Lanes) -> bool:
    """Whether the current run was told to stop."""
    return lanes._unfinished_run is not None and lanes._unfinished_run._is_stopped


def stopped(lanes: Lanes) -> bool:
    """As `is_stopped`, after waiting for it."""
    deadline = time.monotonic() + 60
    while not is_stopped(lanes) and time.monotonic() < deadline:
        time.sleep(1e-3)
    return is_stopped(lanes)


@pytest.mark.parametrize("bad", Lane)
def test_an_error_stops_every_lane_and_is_raised_once_they_rest(bad: Lane) -> None:
    """At the error each lane is in the middle of its first task. It ends that task and begins no other."""
    tasks = [task(lane, part=0) for lane in Lane]
    tasks += [task(lane, list(Lane).index(bad), part=1) for lane in Lane]
    tasks += [task(lane, part=2) for lane in Lane]
    together = threading.Barrier(len(Lane))
    ended: list[Lane] = []

    def do(one: Task) -> None:
        assert not one.micro_batch
        together.wait(timeout=60)
        if one.lane is bad:
            raise Trouble(bad.value)
        assert stopped(lanes)
        time.sleep(0.01)
        ended.append(one.lane)

    with Lanes(nothing) as lanes:
        for _ in range(2):
            ended.clear()
            with pytest.raises(Trouble, match=bad.value):
                lanes.run(tasks, do)
            assert set(ended) == set(Lane) - {bad}
        log = Log(tasks)
        lanes.run(tasks, log.do)
        in_order(tasks, log)
    assert not lane_threads()


def test_of_several_errors_the_first_is_raised() -> None:
    tasks = [task(lane) for lane in Lane]
    together = threading.Barrier(len(Lane))

    def do(one: Task) -> None:
        together.wait(timeout=60)
        if one.lane is not Lane.SLOW:
            stopped(lanes)
        raise Trouble(one.lane.value)

    with Lanes(nothing) as lanes, pytest.raises(Trouble, match=Lane.SLOW.value):
        lanes.run(tasks, do)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_error_anywhere_leaves_lanes_that_can_be_used(schedule: Schedule) -> None:
    tasks = decode(schedule, Shape(2, 3, 3, uses_pinned_memory=True, cache_moves=True, slow_experts=True))
    rng = random.Random(0)
    with Lanes(nothing) as lanes:
        for place in rng.sample(range(len(tasks)), 12):
            log = Log(tasks)

            def do(one: Task, bad: Task = tasks[place], log: Log = log) -> None:
                if one is bad:
                    raise Trouble
                log.do(one)

            if tasks[place].kind is Kind.SYNC:  # nothing is done for it
                lanes.run(tasks, do)
                continue
            with pytest.raises(Trouble):
                lanes.run(tasks, do)
            begun = {place for what, place in log.events if what == "begin"}
            assert begun == {place for what, place in log.events if what == "end"}
            assert not any(place in expanded(tasks, other) for other in begun)
        log = Log(tasks)
        lanes.run(tasks, log.do)
        in_order(tasks, log)


def interrupt(seen: Callable[[], bool]) -> None:
    """Sends Ctrl-C until it is noticed. A lane that is just falling asleep notices it only when it wakes."""
    for _ in range(20):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            if seen():
                return
            time.sleep(1e-3)
    raise AssertionError("nobody saw it")


@pytest.mark.parametrize("needed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_control_c_while_the_caller_waits(needed: bool) -> None:
    """The caller waits for a task, or at the end of the list."""
    tasks = [task(Lane.LINK_DOWN), task(Lane.LINK_DOWN, part=1), task(Lane.FAST, *([0] if needed else []))]
    log = Log(tasks)

    def do(one: Task) -> None:
        if one is tasks[0]:
            interrupt(lambda: is_stopped(lanes))
        log.do(one)

    with Lanes(nothing) as lanes:
        with pytest.raises(KeyboardInterrupt):
            lanes.run(tasks, do)
        assert log.events[-2:] == [("begin", 0), ("end", 0)] and ("begin", 1) not in log.events
        log = Log(tasks)
        lanes.run(tasks, log.do)
        in_order(tasks, log)


def test_control_c_in_a_task_of_the_caller() -> None:
    tasks = [task(Lane.FAST), task(Lane.LINK_DOWN, 0)]
    log = Log(tasks)
    with Lanes(nothing) as lanes:
        with pytest.raises(KeyboardInterrupt):
            lanes.run(tasks, lambda one: signal.raise_signal(signal.SIGINT))
        lanes.run(tasks, log.do)
        in_order(tasks, log)


def test_control_c_twice_does_not_wait_but_the_next_run_does() -> None:
    tasks, go, left = [task(Lane.LINK_DOWN), task(Lane.FAST, 0)], threading.Event(), threading.Event()
    events: list[str] = []

    def slow(one: Task) -> None:
        interrupt(lambda: is_stopped(lanes))
        interrupt(left.is_set)
        go.wait(timeout=60)
        events.append("old")

    with Lanes(nothing) as lanes:
        with pytest.raises(KeyboardInterrupt):
            lanes.run(tasks, slow)
        left.set()
        assert not events
        threading.Timer(0.05, go.set).start()
        lanes.run([task(Lane.FAST)], lambda one: events.append("new"))
    assert events == ["old", "new"]


@pytest.mark.parametrize("need", [1, 2])
def test_a_task_that_needs_no_earlier_one_is_refused(need: int) -> None:
    with Lanes(nothing) as lanes, pytest.raises(ConfigError, match="needs of task 1: got "):
        lanes.run([task(Lane.FAST), task(Lane.LINK_DOWN, need), task(Lane.FAST)], lambda one: None)
