"""The life of an expert server's process: first Hold, loading, serving, Shutdown."""

from __future__ import annotations

import os
import queue
import threading
import time
from pathlib import Path

from moesaic.config import ExpertServerConfig
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.metrics import ExpertServerStats
from moesaic.experts.backend import ExpertBackend
from moesaic.experts.server import ExpertServer
from moesaic.experts.tracing import TracedBackend, TracedExpertScheduler
from moesaic.models.headers import STORED
from moesaic.policy.scheduling import minimum_batch
from moesaic.policy.scheduling.microqueue import QueuePolicy, policy_named
from moesaic.policy.scheduling.schedulers.expert_server import (
    Enough,
    ExpertServerScheduler,
    StartRule,
    WhileSmall,
)
from moesaic.trace.track import Track
from moesaic.transport.listening import Listener
from moesaic.transport.stream import StreamConnection
from moesaic.transport.wakeup import Wakeup

REPORT_SECONDS = 0.2
EVERYBODY = 1 << 62
"""Pairs that are never there: a run starts when every client's rows are in."""
BARRIER_SECONDS = 1.0
"""A client that a run waited for in vain has died or gone elsewhere."""
LONGEST_WAIT, WAITED_RUNS = 0.1, 3.0
"""Seconds, and runs, that a server waits for clients that have not asked yet, at most: whoever is a layer
behind has caught up by then."""
IN_STEP = "flfs"
"""What runs next; with async that is set. Clients that are out of step would stay so if the fuller queue ran
first, and two servers could each wait for the one that the other serves later: who is behind goes first, and
meets the others at their layer."""


def serve(
    supervisor: StreamConnection, config: ExpertServerConfig, wakeup: Wakeup, secret: bytes = b""
) -> int:
    """Serve until the supervisor says Shutdown; returns the exit code.

    bell: rung at each of its messages. secret: what clients must know; empty: the first Hold says it. Raises
    ConnectionLost when the supervisor is gone.
    """
    first = supervisor.receive(None)
    if isinstance(first, messages.Shutdown):
        return 0
    if not isinstance(first, messages.Hold):
        raise ConnectionLost("the supervisor's first word was not Hold")
    if config.cpus:
        os.sched_setaffinity(0, config.cpus)
    arithmetic = _arithmetic(config)
    arithmetic.take(first.experts)
    listener = Listener(config.address, secret or first.secret)
    rule, policy = _start_rule(config, max(map(len, first.experts.values()), default=0)), _policy(config)
    service = ExpertServerScheduler(config.layout.layers, policy, rule)
    if config.trace is not None:
        track = Track(Path(config.trace), time.monotonic)
        service = traced = TracedExpertScheduler(track, config.layout.layers, policy, rule)
        arithmetic = TracedBackend(arithmetic, traced, track)
    server = ExpertServer(config.layout, arithmetic, listener, service, time.monotonic)
    holding = _Holding(supervisor, arithmetic, listener.address, config.threads)
    holding.tell(first)
    stopped = threading.Event()
    threading.Thread(target=_report, args=(supervisor, server, stopped), daemon=True).start()
    try:
        while True:
            wakeup.clear()
            while (message := supervisor.receive(0.0)) is not None:
                match message:
                    case messages.Hold():
                        holding.change(message)
                    case messages.Shutdown():
                        return 0
            server.turn(None, (wakeup.fileno(),))
    finally:
        stopped.set()
        holding.close()
        server.close()


def _start_rule(config: ExpertServerConfig, experts: int) -> StartRule:
    """experts: of a layer that this server begins with, the most."""
    if config.schedule == "barrier":
        return Enough(EVERYBODY, BARRIER_SECONDS)
    pairs, wait = config.queues.expert_batch_pairs, config.queues.expert_batch_wait
    if pairs is None:
        return WhileSmall(minimum_batch.pairs(experts), LONGEST_WAIT, WAITED_RUNS)
    return Enough(pairs, wait / 1000)


def _policy(config: ExpertServerConfig) -> QueuePolicy:
    if config.schedule != "async":
        return policy_named(IN_STEP)
    queues = config.queues
    return policy_named(config.queue_policy, queues.urgency(None), history=queues.queue_history)


def _arithmetic(config: ExpertServerConfig) -> ExpertBackend:
    on_cpu = config.device == "cpu"
    native = on_cpu and config.kernels != "reference" and config.layout.dtype in STORED
    if native:
        try:
            from moesaic.experts.native_backend import NativeBackend

            return NativeBackend(
                Path(config.model), config.layout, config.kernels, config.threads, config.mmap
            )
        except ImportError:
            if config.kernels != "auto":
                raise
    from moesaic.experts.torch_backend import TorchBackend

    kernels = "reference" if on_cpu and config.kernels == "auto" else config.kernels
    return TorchBackend(
        Path(config.model), config.layout, config.device, kernels, config.threads, config.mmap
    )


class _Holding:
    """Takes experts in and drops them, one Hold after the other, in the background: reading weights must not
    keep clients waiting."""

    def __init__(
        self, supervisor: StreamConnection, arithmetic: ExpertBackend, address: str, threads: int
    ) -> None:
        self._supervisor = supervisor
        self._arithmetic = arithmetic
        self._address = address
        self._threads = threads
        self._wanted: queue.SimpleQueue[messages.Hold | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="holding", daemon=True).start()

    def tell(self, hold: messages.Hold) -> None:
        """Say that the experts of `hold` are here."""
        name = self._arithmetic.name
        self._supervisor.send(messages.Holds(hold.version, self._address, name, self._threads))

    def change(self, hold: messages.Hold) -> None:
        self._wanted.put(hold)

    def close(self) -> None:
        """Let go of the weights, once what was begun is done."""
        self._wanted.put(None)

    def _run(self) -> None:
        while (hold := self._wanted.get()) is not None:
            try:
                self._arithmetic.take(hold.experts)
                self._arithmetic.keep(hold.experts)
                self.tell(hold)
            except ConnectionLost:
                return
            except MoesaicError as error:
                self._supervisor.send(messages.Failed(str(error), user_error=True))


def _report(supervisor: StreamConnection, server: ExpertServer, stopped: threading.Event) -> None:
    """Signs of life from a thread of its own: the loop may be in a long run."""
    reported = -1
    while not stopped.is_set():
        served = server.served
        stats = ExpertServerStats(
            clients=server.clients,
            waiting_pairs=server.waiting_pairs,
            pairs=served.pairs,
            runs=served.runs,
            expert_runs=served.expert_runs,
            busy_seconds=served.busy_seconds,
        )
        load = served.load.tolist() if served.pairs != reported else []
        reported = served.pairs
        try:
            supervisor.send(messages.ServerReport(stats, load))
        except ConnectionLost:
            return
        stopped.wait(REPORT_SECONDS)
