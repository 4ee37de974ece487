"""`python -m moesaic.joining`: joins a cluster once and serves, as the child of a process that starts it.

The first line of its standard input is the secret in hexadecimal. It ends with its standard input, so with
its parent. Each line of its standard output is an event of `joining.child`, as JSON.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading

from moesaic import logs
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.joining import child, server
from moesaic.joining.options import JoinOptions


def main() -> int:
    """Join and serve once. Returns the exit code: 0 after Shutdown, 2 for settings that cannot work."""
    parser = argparse.ArgumentParser(prog="moesaic.joining", description=__doc__)
    parser.add_argument("--options", required=True, help="options as JSON")
    joining = JoinOptions.from_json(parser.parse_args().options)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.set_up(joining.role.replace("-", " "), joining.log_level)
    secret = bytes.fromhex(_line())
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()

    def joined(model: str) -> None:
        child.tell("joined", model)

    def lost(why: str) -> None:
        child.tell("lost", why)

    try:
        if joining.role == "expert-server":
            return server.serve_once(joining, secret, joined)
        from moesaic.joining import ranks, worker

        serve_once = ranks.serve_once if joining.role == "ranks" else worker.serve_once
        return serve_once(joining, secret, joined, lost)
    except ConfigError as error:
        child.tell("wrong", str(error))
        return 2
    except ConnectionLost as error:
        child.tell(child.kind_of(error), str(error))
        return 1


def _line() -> str:
    """The first line of standard input. Nothing after it is read."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(1)
        line += byte
    return line.decode()


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
