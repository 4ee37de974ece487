"""A worker's loop: an event arrives, the scheduler returns actions, the executor carries them out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.metrics import WorkerStats
from moesaic.experts.client import RoutedExperts
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Admit,
    Arrived,
    Cancelled,
    Event,
    Release,
    RunSegment,
    RunStep,
    Scheduler,
    SegmentDone,
    StepDone,
    StepFailed,
)
from moesaic.runtime.executor import Executor
from moesaic.runtime.observer import UNOBSERVED, WorkerObserver
from moesaic.transport.base import Connection
from moesaic.transport.wakeup import Wakeup

STATS_INTERVAL = 0.25
"""Seconds between two snapshots to the engine while busy; falling idle sends one at once."""

Journal = Callable[[Event, float, list[Action]], None]
"""Is shown every event, its time and the actions it led to (for replays)."""


class Worker:
    """Joins a connection, a scheduler and an executor. `clock` is the engine's: seconds, monotonic."""

    def __init__(
        self,
        connection: Connection,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        journal: Journal | None = None,
        experts: RoutedExperts | None = None,
        wakeup: Wakeup | None = None,
        linger: float = 0.0,
        observer: WorkerObserver = UNOBSERVED,
    ) -> None:
        """experts: who is asked for them, where that is not this process. bell: rings at each message.

        linger: seconds in which, while nothing is under way, another message may follow the last one. For
        callers who send so many and then wait: a stream without pauses would hold up the first step.
        """
        self._connection = connection
        self._scheduler = scheduler
        self._executor = executor
        self._experts = experts
        self._wakeup = wakeup
        self._linger = linger
        self._observer = observer
        self._clock = clock
        self._journal = journal
        self._events: deque[Event] = deque()
        self._stopping = False
        self._last_stats = -STATS_INTERVAL
        self._unreported = False
        """Something happened since the last snapshot."""
        self._settled = -1

    def run(self) -> None:
        """Until the engine says so. Raises ConnectionLost when it, or another rank of the group, is gone."""
        self._events.append(Arrived([]))  # a scheduler that has something to say first can say it
        while not self._stopping:
            self.turn(timeout=None)

    def turn(self, timeout: float | None) -> bool:
        """Take in what arrived and handle one event.

        Waits `timeout` seconds (None: for ever) only when there is nothing to do. False when
        nothing was done.
        """
        busy = bool(self._events) or self._executor.busy
        self._collect(0.0 if busy else timeout, 0.0 if busy else self._linger)
        if not self._events and not self._stopping:
            self._progress(timeout)
        self._settle()
        if not self._events or self._stopping:
            if self._unreported:
                self._report(self._clock())
            return False
        event = self._events.popleft()
        now = self._clock()
        actions = self._scheduler.handle(event, now)
        self._observer.scheduled(event, now)
        if self._journal is not None:
            self._journal(event, now, actions)
        self._carry_out(actions)
        self._report(now)
        return True

    def stats(self) -> WorkerStats:
        """A snapshot of this worker."""
        stats = self._scheduler.stats()
        return stats if self._experts is None else replace(stats, experts=self._experts.stats())

    def _progress(self, timeout: float | None) -> None:
        """The steps under way as far as they get; where they wait for experts, so does the worker, until
        something happened or a message is there."""
        limit = timeout
        if self._unreported:  # a worker that waits for others to begin is busy, perhaps for ever
            limit = STATS_INTERVAL if timeout is None else min(timeout, STATS_INTERVAL)
        news = True
        while news:
            try:
                self._events += self._executor.progress()
            except BaseException:
                self._events += map(StepFailed, self._executor.abandon())
                raise
            if self._events or not self._executor.busy or self._experts is None or self._wakeup is None:
                return
            news = self._experts.wait(limit, self._wakeup.fileno()) and not self._wakeup.rung

    def _settle(self) -> None:
        """Tell once nothing under way was routed by an older directory."""
        settled = -1 if self._experts is None else self._experts.settled
        if settled > self._settled:
            self._settled = settled
            self._connection.send(messages.Settled(settled))

    def _collect(self, timeout: float | None, linger: float) -> None:
        """Messages into events, each `linger` seconds behind the one before at most; a step's end stays
        behind what arrived while it ran."""
        if self._wakeup is not None:
            self._wakeup.clear()
        message = self._connection.receive(timeout)
        while message is not None:
            match message:
                case messages.Submit():
                    self._put(Arrived(list(message.requests), list(message.generated)))
                case messages.Cancel():
                    self._put(Cancelled(message.request_ids))
                case messages.Serving() if self._experts is not None:
                    self._experts.update(message.directory, message.secret)
                case messages.Shutdown():
                    self._stopping = True
                case _:
                    raise ConnectionLost(f"a worker was sent {type(message).__name__}")
            message = self._connection.receive(linger)

    def _put(self, event: Event) -> None:
        """Behind what waits, but before the step's end; arrivals become one event, hence one step."""
        ended = self._events and isinstance(self._events[-1], StepDone | StepFailed | SegmentDone)
        done = self._events.pop() if ended else None
        last = self._events[-1] if self._events else None
        if isinstance(event, Arrived) and isinstance(last, Arrived):
            last.extend(event)
        else:
            self._events.append(event)
        if done is not None:
            self._events.append(done)

    def _carry_out(self, actions: list[Action]) -> None:
        """One after another. After an error the worker can go on: the scheduler hears that the step failed,
        and the sampler knows whom the scheduler knows. Releases come first: who hears the last token may end
        this process at once, and what is recorded of a request has its end by then."""
        left = deque(sorted(actions, key=lambda action: not isinstance(action, Release)))
        try:
            while left:
                self._executor.execute(left[0])
                left.popleft()
            self._events += self._executor.progress()
        except BaseException:
            begun = [action.plan.step for action in actions if isinstance(action, RunStep | RunSegment)]
            self._events += map(StepFailed, {*begun, *self._executor.abandon()})
            for action in left:
                if isinstance(action, Admit | Release):
                    self._executor.execute(action)
            raise

    def _report(self, now: float) -> None:
        idle = not self._events and not self._executor.busy
        self._unreported = True
        if idle or now - self._last_stats >= STATS_INTERVAL:
            self._last_stats, self._unreported = now, False
            self._connection.send(messages.Stats(self.stats()))
