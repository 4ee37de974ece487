"""A worker's loop: an event arrives, the scheduler returns actions, the executor carries them out.

Question: Where is the main loop of an attention worker?
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.metrics import ExpertStats, WorkerStats
from moesaic.experts.client import ExpertServers, NoServers
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Admit,
    Event,
    Release,
    RequestsArrived,
    RequestsCancelled,
    RunSegment,
    RunStep,
    Scheduler,
    StepFailed,
)
from moesaic.policy.scheduling.schedulers.event_queue import put
from moesaic.runtime.arrivals import Arrivals
from moesaic.runtime.executor import Executor
from moesaic.runtime.observer import IGNORING_OBSERVER, WorkerObserver
from moesaic.runtime.prefix_cache.prefixes import StoredPrefixes
from moesaic.runtime.transfer.pieces import Transfers
from moesaic.transport.authentication import RefusedByCluster
from moesaic.transport.base import Connection
from moesaic.transport.wakeup import Wakeup

STATS_INTERVAL = 0.25
"""Seconds between two statistics sent to the engine by a busy worker. An idle one sends them at once."""

READING = 0.02
"""Seconds between two looks for messages while nothing but KV on the disk is waited for."""

COMPILING = 0.02
"""Seconds between two looks for messages and grammars while requests wait for a grammar."""

Journal = Callable[[Event, float, list[Action]], None]
"""Gets every event, its time and the actions that it led to, so that a run can be replayed."""


class Worker:
    """Connects the engine, a scheduler and an executor."""

    def __init__(
        self,
        connection: Connection,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        journal: Journal | None = None,
        servers: ExpertServers | None = None,
        expert_stats: Callable[[], ExpertStats] = ExpertStats,
        wakeup: Wakeup | None = None,
        linger: float = 0.0,
        observer: WorkerObserver = IGNORING_OBSERVER,
        transfers: Transfers | None = None,
        prefixes: StoredPrefixes | None = None,
    ) -> None:
        """clock: the engine's, seconds, monotonic. servers: None where this process computes all experts.

        expert_stats: takes a snapshot of what the experts counted. wakeup: rings at each message; needed with
        `servers`. linger: seconds that an idle worker waits for a further message after each one. It is for
        clients that send many requests and then wait: a stream without pauses would delay the first step.
        transfers: the executor's; None: no KV comes from other workers or goes to them. prefixes: the
        executor's; None: no KV comes from a disk or goes to it.
        """
        self._connection = connection
        self._scheduler = scheduler
        self._executor = executor
        self._servers = NoServers() if servers is None else servers
        self._expert_stats = expert_stats
        self._wakeup = wakeup
        self._linger = linger
        self._observer = observer
        self._transfers = transfers or Transfers()
        self._prefixes = prefixes or StoredPrefixes()
        self._clock = clock
        self._journal = journal
        self._events: deque[Event] = deque()
        self._arrivals = Arrivals(executor.find_grammar)
        self._stopping = False
        self._last_stats = -STATS_INTERVAL
        self._has_unreported_events = False
        """Something happened since the last statistics."""
        self._settled_version = -1

    def run(self) -> None:
        """Work until the engine sends Shutdown.

        Raises ConnectionLost when the engine or another rank of the group is gone.
        """
        self._events.append(RequestsArrived([]))  # so that a scheduler can act before the first request
        while not self._stopping:
            self.turn(timeout=None)
        self._transfers.close()
        self._prefixes.close()

    @property
    def job_id(self) -> bytes:
        """Name of a job of GPUs that this worker can begin. Empty: it can join none."""
        return self._servers.job_id

    def close(self) -> None:
        """End the connections to other processes, after `run` has raised."""
        self._transfers.close()
        self._prefixes.close()
        self._servers.close()

    def store_prefixes(self) -> None:
        """Write the prefixes that wait for the disk, from any thread, before this process ends."""
        self._prefixes.flush()

    def turn(self, timeout: float | None) -> bool:
        """Receive messages and handle one event.

        Waits up to `timeout` seconds (None: for ever), but only when there is nothing to do. Returns False
        when nothing was done.
        """
        computing = bool(self._events) or self._executor.is_busy or self._prefixes.is_reading
        busy = computing or self._arrivals.has_waiting
        self._receive(0.0 if busy else timeout, 0.0 if busy else self._linger)
        self._take(self._arrivals.take_ready(COMPILING if busy and not computing else 0.0))
        if not self._events and not self._stopping:
            self._progress(COMPILING if self._arrivals.has_waiting else timeout)
        self._report_faults()
        self._report_settled()
        if not self._events or self._stopping:
            if self._has_unreported_events:
                self._report(self._clock())
            return self._arrivals.has_waiting or self._prefixes.is_reading
        event = self._events.popleft()
        now = self._clock()
        actions = self._scheduler.handle(event, now)
        self._observer.on_event_handled(event, now)
        if self._journal is not None:
            self._journal(event, now, actions)
        self._carry_out(actions)
        if isinstance(event, RequestsCancelled):
            self._transfers.forget(event.request_ids)  # from now on the scheduler does not admit them
            self._prefixes.forget(event.request_ids)
        self._report(now)
        return True

    def stats(self) -> WorkerStats:
        """A snapshot of this worker."""
        experts, transfers = self._expert_stats(), self._transfers.stats()
        return replace(
            self._scheduler.stats(),
            experts=experts,
            transfers=transfers,
            stored_prefixes=self._prefixes.stats(),
        )

    def _progress(self, timeout: float | None) -> None:
        """Go on with the steps under way.

        Where they wait for experts, the worker sleeps until an answer or a message arrives.
        """
        limit = timeout
        if self._has_unreported_events:  # a worker that waits for others to begin is busy, perhaps for ever
            limit = STATS_INTERVAL if timeout is None else min(timeout, STATS_INTERVAL)
        news = True
        while news:
            try:
                self._events += self._executor.progress()
            except BaseException:
                self._events += map(StepFailed, self._executor.abandon())
                raise
            if not self._events and not self._executor.is_busy:
                self._events += self._prefixes.take_events(READING)
            self._report_faults()  # before it sleeps: rows may wait for the server that takes the place
            if self._events or not self._executor.is_busy or self._wakeup is None:
                return
            news = self._servers.wait(limit, self._wakeup.fileno()) and not self._wakeup.rung

    def _report_faults(self) -> None:
        """Report the servers that were given up for their answers."""
        for fault in self._servers.take_faulty_servers():
            self._connection.send(fault)

    def _report_settled(self) -> None:
        """Report once that no call under way was routed by an older directory."""
        version = self._servers.oldest_version_in_use
        if version > self._settled_version:
            self._settled_version = version
            self._connection.send(messages.DirectorySettled(version))

    def _receive(self, timeout: float | None, linger: float) -> None:
        """Turn messages into events. linger: seconds to wait for a further message after each one.

        The end of a step stays behind what arrived while the step ran.
        """
        if self._wakeup is not None:
            self._wakeup.clear()
        message = self._connection.receive(timeout)
        while message is not None:
            match message:
                case messages.Submit():
                    self._transfers.expect(message)
                    self._take(self._arrivals.add(message))
                case messages.Cancel():
                    self._arrivals.cancel(message.request_ids)
                    put(self._events, RequestsCancelled(message.request_ids))
                case messages.DropKV(transfers):
                    self._transfers.drop(transfers)
                    self._has_unreported_events = True
                case messages.Serving():
                    self._servers.update(message.directory, message.secret)
                case messages.JoinJob():
                    self._servers.meet(message)
                case messages.Shutdown():
                    self._stopping = True
                case messages.Refuse(reason):
                    raise RefusedByCluster(f"refused this worker: {reason}")
                case _:
                    raise ConnectionLost(f"a worker was sent {type(message).__name__}")
            message = self._connection.receive(linger)

    def _take(self, arrivals: RequestsArrived) -> None:
        if arrivals.requests:
            arrivals.received_tokens.update(self._transfers.count_received_tokens(arrivals.requests))
            arrivals.disk_tokens.update(self._prefixes.count_stored_tokens(arrivals.requests))
            put(self._events, arrivals)

    def _carry_out(self, actions: list[Action]) -> None:
        """Carry out the actions, releases first.

        A client that has its last token may end this process at once, and by then the records of its request
        are complete. After an error the worker can go on: the scheduler gets StepFailed, and the sampler
        keeps the same requests as the scheduler.
        """
        left = deque(sorted(actions, key=lambda action: not isinstance(action, Release)))
        try:
            while left:
                self._executor.execute(left[0])
                left.popleft()
            self._events += self._executor.progress()
        except BaseException:
            begun_steps = [action.plan.step for action in actions if isinstance(action, RunStep | RunSegment)]
            self._events += map(StepFailed, {*begun_steps, *self._executor.abandon()})
            for action in left:
                if isinstance(action, Admit | Release):
                    self._executor.execute(action)
            raise

    def _report(self, now: float) -> None:
        idle = not self._events and not self._executor.is_busy
        self._has_unreported_events = True
        if idle or now - self._last_stats >= STATS_INTERVAL:
            self._last_stats, self._has_unreported_events = now, False
            self._connection.send(messages.Stats(self.stats()))
