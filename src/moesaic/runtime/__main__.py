"""`python -m moesaic.runtime`: the process of one attention worker, started by the supervisor."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import threading
import time
import traceback

import torch

from moesaic import logs
from moesaic.config import WorkerConfig
from moesaic.core import messages
from moesaic.core.errors import CheckpointError, ConnectionLost, MoesaicError
from moesaic.runtime import out_of_memory
from moesaic.runtime.build import build_worker
from moesaic.runtime.context import WorkerContext
from moesaic.transport.stream import StreamConnection
from moesaic.transport.wakeup import Wakeup

ALIVE_SECONDS = 0.2
"""Seconds between two Alive messages."""


def main() -> int:
    """Serve the engine at the other end of an inherited socket. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="moesaic.runtime", description=__doc__)
    parser.add_argument("--connection-fd", type=int, required=True, help="inherited socket to the engine")
    parser.add_argument("--config", required=True, help="settings as JSON")
    arguments = parser.parse_args()
    # A service manager may signal every process that it started. The engine ends this one after its requests.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wakeup = Wakeup()
    sock = socket.socket(fileno=arguments.connection_fd)
    # When the engine dies, its worker ends at once, even in the middle of a step.
    connection = StreamConnection(sock, on_lost=lambda: os._exit(0), on_message=wakeup.ring)
    try:
        config = WorkerConfig.from_json(arguments.config)
        logs.set_up("prefill worker" if config.kv_role == "prefill" else "attention worker", config.log_level)
        if config.cpus:
            os.sched_setaffinity(0, config.cpus)
        return _serve(connection, config, wakeup)
    except ConnectionLost:
        return 0
    except Exception as error:
        # Log first: the engine may close the connection after the message, and that ends this process.
        traceback.print_exc()
        line = str(error).partition("\n")[0]
        with contextlib.suppress(ConnectionLost):
            connection.send(messages.Failed(f"{type(error).__name__}: {line}", user_error=False))
        raise SystemExit(1) from error


def _serve(connection: StreamConnection, config: WorkerConfig, wakeup: Wakeup) -> int:
    sent = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal sent
        now = time.monotonic()
        if now - sent > 0.2 or done == total:
            sent = now
            connection.send(messages.Loading(done, total))

    def lost(reason: str) -> None:
        """End this process because another rank of its group ended. An idle group would not notice."""
        logging.warning("%s; this worker ends too", reason)
        with contextlib.suppress(ConnectionLost):
            if not config.supervised:
                connection.send(messages.Failed(reason, user_error=False))
        os._exit(1)

    try:
        worker, info = build_worker(
            WorkerContext(config, connection, time.monotonic, progress, wakeup=wakeup, lost=lost)
        )
    except MoesaicError as error:
        connection.send(messages.Failed(str(error), user_error=True))
        return 2
    connection.send(messages.Ready(info))
    if config.supervised:
        threading.Thread(target=_send_alive, args=(connection,), name="alive", daemon=True).start()
    try:
        worker.run()
    except ConnectionLost as error:
        if not config.supervised:  # a supervisor starts another worker; otherwise the user needs the reason
            connection.send(messages.Failed(str(error), user_error=False))
        raise
    except torch.OutOfMemoryError as error:
        connection.send(messages.Failed(out_of_memory.of_step(error), user_error=True))
        return 2
    except CheckpointError as error:  # of an expert that a pass has read
        connection.send(messages.Failed(str(error), user_error=True))
        return 2
    return 0


def _send_alive(connection: StreamConnection) -> None:
    """Report that this process is alive, from a thread of its own since a step may take long."""
    with contextlib.suppress(ConnectionLost):  # the thread that reads the connection ends this process
        while True:
            connection.send(messages.Alive())
            time.sleep(ALIVE_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
