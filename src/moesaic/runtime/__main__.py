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

from moesaic.config import WorkerConfig
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.runtime import out_of_memory
from moesaic.runtime.build import build_worker
from moesaic.runtime.context import WorkerContext
from moesaic.transport.stream import StreamConnection
from moesaic.transport.wakeup import Wakeup

ALIVE_SECONDS = 0.2


def main() -> int:
    """Serve the engine at the other end of an inherited socket. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="moesaic.runtime", description=__doc__)
    parser.add_argument("--connection-fd", type=int, required=True, help="inherited socket to the engine")
    parser.add_argument("--config", required=True, help="settings as JSON")
    arguments = parser.parse_args()
    logging.basicConfig(format="attention worker %(process)d: %(message)s", level=logging.WARNING)
    # A service manager may signal every process it started; the engine drains and then ends this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wakeup = Wakeup()
    sock = socket.socket(fileno=arguments.connection_fd)
    # When the engine dies, so does its worker, at once, also in the middle of a step.
    connection = StreamConnection(sock, on_lost=lambda: os._exit(0), on_message=wakeup.ring)
    try:
        config = WorkerConfig.from_json(arguments.config)
        if config.cpus:
            os.sched_setaffinity(0, config.cpus)
        return _serve(connection, config, wakeup)
    except ConnectionLost:
        return 0
    except Exception as error:
        # The log comes first: once the engine knows, it may close the connection, which ends this process.
        traceback.print_exc()
        line = str(error).partition("\n")[0]
        with contextlib.suppress(ConnectionLost):
            connection.send(messages.Failed(f"{type(error).__name__}: {line}", user_error=False))
        raise SystemExit(1) from error


def _serve(connection: StreamConnection, config: WorkerConfig, wakeup: Wakeup) -> int:
    last = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.2 or done == total:
            last = now
            connection.send(messages.Loading(done, total))

    def lost(how: str) -> None:
        """A group is no group without one of its ranks; with nothing under way no round would tell."""
        logging.warning("%s, and this worker with it", how)
        with contextlib.suppress(ConnectionLost):
            if not config.supervised:
                connection.send(messages.Failed(how, user_error=False))
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
        threading.Thread(target=_live, args=(connection,), name="alive", daemon=True).start()
    try:
        worker.run()
    except ConnectionLost as error:
        if not config.supervised:  # who watches it starts another one; else its end is to be explained
            connection.send(messages.Failed(str(error), user_error=False))
        raise
    except torch.OutOfMemoryError as error:
        connection.send(messages.Failed(out_of_memory.of_step(error), user_error=True))
        return 2
    return 0


def _live(connection: StreamConnection) -> None:
    """Signs of life from a thread of its own: a step may take long."""
    with contextlib.suppress(ConnectionLost):  # the reading thread ends this process
        while True:
            connection.send(messages.Alive())
            time.sleep(ALIVE_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
