"""Runs a list of tasks on lanes in parallel, with one thread per lane.

A lane runs its tasks in the order of the list. A task begins when the tasks that it needs have ended. A lane
that has to wait sleeps; it does not spin.

Question: Which lane runs a task, and which thread copies weights or caches?
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread

from moesaic.core.errors import ConfigError
from moesaic.policy.offloading.tasks import Kind, Lane, Task
from moesaic.policy.offloading.timeline import Timeline

Setup = Callable[[Lane], AbstractContextManager[object]]
RunTask = Callable[[Task], object]
Clock = Callable[[], float]


class Lanes:
    """Use it as a context: `with Lanes(setup) as lanes: timeline = lanes.run(tasks, do)`.

    The fast lane is the thread that enters the context and runs one list at a time. Each other lane gets a
    thread when a list first uses it. That thread sleeps between lists and ends with the context.
    """

    def __init__(self, setup: Setup, clock: Clock = time.perf_counter) -> None:
        """setup: called in each lane's own thread before its first task. The lane enters the returned context
        and leaves it when the context of Lanes ends. clock: returns seconds.
        """
        self._setup, self._clock = setup, clock
        self._threads: dict[Lane, _LaneThread] = {}
        self._stack = ExitStack()
        self._unfinished_run: _Run | None = None

    def __enter__(self) -> Lanes:
        self._stack.enter_context(self._setup(Lane.FAST))
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack:
            self._settle()
            for thread in self._threads.values():
                thread.close()
            self._threads.clear()

    def run(self, tasks: Sequence[Task], run_task: RunTask) -> Timeline:
        """Runs every task: calls `do(task)` in its lane's thread, except for Kind.SYNC.

        Returns when each task began and ended, in seconds since this run began, and each lane's busy time.
        After an error in any lane no further task begins. When all lanes have stopped, this raises the first
        error, and the lanes can be used again. Ctrl-C is such an error. It is noticed at the latest when the
        task ends that the caller waits for. A second Ctrl-C returns without waiting for the lanes, and the
        next run waits for them instead. Raises ConfigError for a task that needs itself or a later task.

        Example: tasks a (fast), b (down, needs a), c (fast, needs b) with a clock that counts how often it is
        read. They begin at 1, 3, 5 and end at 2, 4, 6. Busy: fast 2, down 1.
        """
        self._settle()
        self._unfinished_run = run = _Run(tasks, run_task, self._clock)
        with run:
            for lane in run.lanes:
                if lane is not Lane.FAST:
                    self._thread(lane).post(run)
            run.work(Lane.FAST)
            self._wait()
            self._unfinished_run = None
        self._settle()
        return run.result()

    def _thread(self, lane: Lane) -> _LaneThread:
        if lane not in self._threads:
            self._threads[lane] = _LaneThread(lane, self._setup)
        return self._threads[lane]

    def _settle(self) -> None:
        """Stops the lanes after a run that was interrupted, and waits for them."""
        if self._unfinished_run is not None:
            self._unfinished_run.stop()
            self._wait()
            self._unfinished_run = None

    def _wait(self) -> None:
        for thread in self._threads.values():
            thread.wait()


class _LaneThread:
    """A thread that does one lane's tasks for all runs."""

    def __init__(self, lane: Lane, setup: Setup) -> None:
        self._lane, self._setup = lane, setup
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._stack = ExitStack()
        self._is_set_up = False
        # A daemon, so that a second Ctrl-C can end the process while a read or a product goes on.
        self._thread = Thread(target=self._live, name=f"lane {lane.value}", daemon=True)
        self._thread.start()

    def post(self, run: _Run) -> None:
        self._calls.put(partial(self._work, run))

    def wait(self) -> None:
        """Waits until the thread has done everything that was posted."""
        wakeup = _acquire_new_lock()
        self._calls.put(wakeup.release)
        wakeup.acquire()

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _live(self) -> None:
        with self._stack:
            while (call := self._calls.get()) is not None:
                call()
                del call  # do not keep the run's memory alive until the next run

    def _work(self, run: _Run) -> None:
        with run:
            if not self._is_set_up:
                self._stack.enter_context(self._setup(self._lane))
                self._is_set_up = True
            run.work(self._lane)


class _Run:
    """A run of a task list. As a context manager it records a lane's error and stops all lanes."""

    def __init__(self, tasks: Sequence[Task], run_task: RunTask, clock: Clock) -> None:
        self._tasks, self._run_task, self._clock = tasks, run_task, clock
        self.lanes = _tasks_by_lane(tasks)
        self._mutex = Lock()  # guards the fields below
        self._is_finished = [False] * len(tasks)
        self._waiting_lanes: dict[int, list[Lane]] = {}
        """Task -> lanes that sleep until it has ended."""
        self._wakeups = {lane: _acquire_new_lock() for lane in self.lanes}
        """Lane -> lock that is released to wake the lane."""
        self._is_stopped = False
        self._error: BaseException | None = None
        self._starts, self._ends = [0.0] * len(tasks), [0.0] * len(tasks)
        self._zero = clock()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.stop(error)
        return True

    def stop(self, error: BaseException | None = None) -> None:
        """Lets no further task begin. Only the first error is kept."""
        with self._mutex:
            self._is_stopped = True
            if self._error is None:
                self._error = error
            for wakeup in self._wakeups.values():
                if wakeup.locked():
                    wakeup.release()

    def work(self, lane: Lane) -> None:
        """Runs the lane's tasks in order until any lane has an error."""
        for index in self.lanes.get(lane, ()):
            task = self._tasks[index]
            for need in reversed(task.needs):  # wait for the latest first: usually the others have ended then
                if not self._is_finished[need]:
                    self._sleep_until(need, lane)
            if self._is_stopped:
                return
            self._starts[index] = self._clock() - self._zero
            if task.kind is not Kind.SYNC:
                self._run_task(task)
            self._ends[index] = self._clock() - self._zero
            self._end(index)

    def _sleep_until(self, need: int, lane: Lane) -> None:
        with self._mutex:
            if self._is_finished[need] or self._is_stopped:
                return
            self._waiting_lanes.setdefault(need, []).append(lane)
        # Outside of the mutex, which the lane that ends the task needs.
        self._wakeups[lane].acquire()

    def _end(self, index: int) -> None:
        with self._mutex:
            self._is_finished[index] = True
            if self._is_stopped:
                return  # `stop` has already woken all lanes
            for lane in self._waiting_lanes.pop(index, ()):
                self._wakeups[lane].release()

    def result(self) -> Timeline:
        """Returns the timeline, or raises the error that stopped the run."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # break the reference cycle with its traceback, so that both are freed
        busy = {
            lane: sum(self._ends[index] - self._starts[index] for index in self.lanes.get(lane, ()))
            for lane in Lane
        }
        return Timeline(self._starts, self._ends, busy)


def _tasks_by_lane(tasks: Sequence[Task]) -> dict[Lane, list[int]]:
    """Returns lane -> indices of its tasks, in order."""
    indices: dict[Lane, list[int]] = {}
    for index, task in enumerate(tasks):
        if task.needs and max(task.needs) >= index:
            raise ConfigError.field(f"needs of task {index}", task.needs, f"0 to {index - 1}")
        indices.setdefault(task.lane, []).append(index)
    return indices


def _acquire_new_lock() -> Lock:
    lock = Lock()
    lock.acquire()
    return lock
