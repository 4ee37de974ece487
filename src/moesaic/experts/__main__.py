"""`python -m moesaic.experts`: the process of one expert server, started by the supervisor."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from pathlib import Path

from moesaic.config import ExpertServerConfig
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.metrics import ExpertServerStats
from moesaic.experts.arithmetic import Arithmetic
from moesaic.experts.server import ExpertServer
from moesaic.policy.brain.service import Enough, Service
from moesaic.policy.microqueue import MostTokensFirst, policy_named
from moesaic.transport.bell import Bell
from moesaic.transport.listening import Listener
from moesaic.transport.stream import StreamConnection

REPORT_SECONDS = 0.2
EVERYBODY = 1 << 62
"""Pairs that are never there: a run starts when every client's rows are in."""
BARRIER_SECONDS = 1.0
"""A client that a run waited for in vain has died or gone elsewhere."""


def main() -> int:
    """Serve the supervisor at the other end of an inherited socket. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="moesaic.experts", description=__doc__)
    parser.add_argument("--connection-fd", type=int, required=True, help="inherited socket to the supervisor")
    parser.add_argument("--config", required=True, help="settings as JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the supervisor drains and ends what it started
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    bell = Bell()
    sock = socket.socket(fileno=arguments.connection_fd)
    # Without a supervisor nobody would ever tell it to stop.
    supervisor = StreamConnection(sock, on_lost=lambda: os._exit(0), on_message=bell.ring)
    try:
        return _serve(supervisor, ExpertServerConfig.from_json(arguments.config), bell)
    except ConnectionLost:
        return 0
    except MoesaicError as error:
        supervisor.send(messages.Failed(str(error), user_error=True))
        return 2
    except Exception as error:
        traceback.print_exc()
        line = str(error).partition("\n")[0]
        with contextlib.suppress(ConnectionLost):
            supervisor.send(messages.Failed(f"{type(error).__name__}: {line}", user_error=False))
        raise SystemExit(1) from error


def _serve(supervisor: StreamConnection, config: ExpertServerConfig, bell: Bell) -> int:
    first = supervisor.receive(None)
    if not isinstance(first, messages.Hold):
        raise ConnectionLost("the supervisor's first word was not Hold")
    arithmetic = _arithmetic(config)
    arithmetic.take(first.experts)
    listener = Listener(config.address, first.secret)
    rule = Enough(EVERYBODY, BARRIER_SECONDS) if config.schedule == "barrier" else Enough()
    policy = policy_named(config.queue_policy) if config.schedule == "async" else MostTokensFirst()
    service = Service(config.layout.layers, policy, rule)
    server = ExpertServer(config.layout, arithmetic, listener, service, time.monotonic, rule.wait)
    holding = _Holding(supervisor, arithmetic, listener.address)
    holding.tell(first)
    threading.Thread(target=_report, args=(supervisor, server), daemon=True).start()
    while True:
        bell.clear()
        while (message := supervisor.receive(0.0)) is not None:
            match message:
                case messages.Hold():
                    holding.change(message)
                case messages.Shutdown():
                    server.close()
                    return 0
        server.turn(None, (bell.fileno(),))


def _arithmetic(config: ExpertServerConfig) -> Arithmetic:
    native = config.device == "cpu" and config.kernels != "reference"
    if native:
        try:
            from moesaic.experts.native import Native

            return Native(
                Path(config.model), config.layout, config.kernels, config.threads, config.pin_threads
            )
        except ImportError:
            if config.kernels != "auto":
                raise
    from moesaic.experts.torched import Torched

    kernels = "reference" if native else config.kernels
    return Torched(
        Path(config.model), config.layout, config.device, kernels, config.threads, config.pin_threads
    )


class _Holding:
    """Takes experts in and drops them, in the background: reading weights must not keep clients waiting."""

    def __init__(self, supervisor: StreamConnection, arithmetic: Arithmetic, address: str) -> None:
        self._supervisor = supervisor
        self._arithmetic = arithmetic
        self._address = address
        self._turn = threading.Lock()

    def tell(self, hold: messages.Hold) -> None:
        """Say that the experts of `hold` are here."""
        self._supervisor.send(messages.Holds(hold.version, self._address, self._arithmetic.name))

    def change(self, hold: messages.Hold) -> None:
        threading.Thread(target=self._change, args=(hold,), daemon=True).start()

    def _change(self, hold: messages.Hold) -> None:
        with self._turn:
            try:
                self._arithmetic.take(hold.experts)
                self._arithmetic.keep(hold.experts)
                self.tell(hold)
            except MoesaicError as error:
                self._supervisor.send(messages.Failed(str(error), user_error=True))


def _report(supervisor: StreamConnection, server: ExpertServer) -> None:
    """Signs of life from a thread of its own: the loop may be in a long run."""
    reported = -1
    while True:
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
        supervisor.send(messages.ServerReport(stats, load))
        time.sleep(REPORT_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
