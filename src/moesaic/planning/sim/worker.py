"""An attention worker in virtual time: the loop of `runtime.worker.Worker` over the same schedulers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from moesaic.core.messages import Cancel, Submit
from moesaic.planning.sim.executor import SimulatedExecutor
from moesaic.planning.sim.timeline import Idle, Process, Sleep, Timeline, Waits
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Event,
    Release,
    RequestsArrived,
    RequestsCancelled,
    Scheduler,
)
from moesaic.policy.scheduling.schedulers.event_queue import put

Journal = Callable[[Event, float, list[Action]], None]
"""Gets every event, its time and the actions that it led to."""


class Handling(Protocol):
    """How long the process of a worker needs for an event, beside what its device computes."""

    def __call__(self, event: Event) -> float:
        """Seconds."""
        ...


class SimulatedWorker:
    """Connects arriving requests, a scheduler and an executor."""

    def __init__(
        self,
        timeline: Timeline,
        scheduler: Scheduler,
        executor: SimulatedExecutor,
        journal: Journal | None = None,
        handling: Handling | None = None,
    ) -> None:
        """handling: None where handling an event takes no time."""
        self.scheduler = scheduler
        self.executor = executor
        self.idle = Idle(timeline)
        self._timeline = timeline
        self._journal = journal
        self._handling = handling
        self._inbox: deque[Submit | Cancel] = deque()
        self._events: deque[Event] = deque([RequestsArrived([])])
        self._process = Process(timeline, self._run())
        executor.experts.wake = self._process.wake

    def send(self, message: Submit | Cancel) -> None:
        """A message of the engine."""
        self._inbox.append(message)
        self._process.wake()

    def die(self) -> None:
        """End. Servers see the connections close."""
        self._process.stop()
        self.idle.end()
        self.executor.experts.leave()

    def _run(self) -> Waits:
        while True:
            self._receive()
            if not self._events:
                events: list[Event] = []
                yield from self.executor.progress(events)
                self._events += events
            if not self._events:
                if not self._inbox:
                    yield from self._sleep()
                continue
            event, now = self._events.popleft(), self._timeline.now
            actions = self.scheduler.handle(event, now)
            if self._journal is not None:
                self._journal(event, now, actions)
            if self._handling is not None:
                yield self._handling(event)
            yield from self._carry_out(actions)

    def _sleep(self) -> Waits:
        experts = self.executor.experts
        self.idle.begin(experts.cause)
        yield Sleep(experts.deadline())
        self.idle.end()

    def _receive(self) -> None:
        """Turn messages into events. The end of a run stays behind what arrived while it was computed."""
        while self._inbox:
            match self._inbox.popleft():
                case Submit(requests, generated):
                    put(self._events, RequestsArrived(list(requests), list(generated)))
                case Cancel(request_ids):
                    put(self._events, RequestsCancelled(request_ids))

    def _carry_out(self, actions: list[Action]) -> Waits:
        """Carry out the actions, releases first."""
        for action in sorted(actions, key=lambda action: not isinstance(action, Release)):
            yield from self.executor.execute(action)
        events: list[Event] = []
        yield from self.executor.progress(events)
        self._events += events
