"""`python -m moesaic.cluster.joining`: joins a cluster and serves, as the child of a process that starts it.

The first line of its standard input is the secret in hexadecimal. It ends with its standard input, so with
its parent. Each line of its standard output is an event of `joining.child`, as JSON.

It joins once. With --keep a worker that has lost its connection joins again at each further line.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Callable
from functools import partial

from moesaic.cluster.joining import child, server
from moesaic.cluster.joining.options import JoinOptions
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.trace import logs


def main() -> int:
    """Join and serve. Returns the exit code: 0 after Shutdown, 2 for settings that cannot work."""
    parser = argparse.ArgumentParser(prog="moesaic.cluster.joining", description=__doc__)
    parser.add_argument("--options", required=True, help="options as JSON")
    parser.add_argument("--keep", action="store_true", help="stay when the connection ends")
    arguments = parser.parse_args()
    joining = JoinOptions.from_json(arguments.options)
    logs.reserve_stdout()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.set_up(joining.role.replace("-", " "), joining.log_level)
    secret = bytes.fromhex(_read_line())
    rejoin = threading.Semaphore(0)
    threading.Thread(target=_follow_parent, args=(rejoin.release,), name="parent", daemon=True).start()
    keep = arguments.keep and joining.role in ("attention-worker", "prefill-worker")
    join_once = _make_join(joining, secret)
    while True:
        try:
            return join_once()
        except ConfigError as error:
            child.print_event("wrong", str(error))
            return 2
        except ConnectionLost as error:
            child.print_event(child.event_name(error), str(error), stays=keep)
            if not keep:
                return 1
        rejoin.acquire()


def _make_join(joining: JoinOptions, secret: bytes) -> Callable[[], int]:
    """Joins once and serves, each time that it is called. A worker finds the weights of the last time."""

    def print_joined(model: str) -> None:
        child.print_event("joined", model)

    def print_lost(reason: str) -> None:
        child.print_event("lost", reason)

    if joining.role == "expert-server":
        return partial(server.serve_once, joining, secret, print_joined)
    if joining.role == "ranks":
        from moesaic.cluster.joining import ranks

        return partial(ranks.serve_once, joining, secret, print_joined, print_lost)
    from moesaic.cluster.joining import worker
    from moesaic.runtime.keeping import KeptModel

    return partial(worker.serve_once, joining, secret, print_joined, print_lost, KeptModel())


def _read_line() -> str:
    """The next line of standard input. Nothing after it is read."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(1)
        line += byte
    return line.decode()


def _follow_parent(on_line: Callable[[], None]) -> None:
    """Calls `on_line` at each line, and ends this process with its standard input."""
    while read := os.read(0, 1):
        if read == b"\n":
            on_line()
    os._exit(1)  # other threads may be in the middle of a step, for which nobody waits any more


if __name__ == "__main__":
    raise SystemExit(main())
