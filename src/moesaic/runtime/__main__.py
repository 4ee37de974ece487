"""`python -m moesaic.runtime`: the process of one attention worker, started by the supervisor.

Question: What does SIGTERM do to an attention worker?
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import traceback
from collections.abc import Callable

from moesaic.config import WorkerConfig
from moesaic.core import messages
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.runtime.process import serve
from moesaic.trace import logs
from moesaic.transport.stream import StreamConnection
from moesaic.transport.wakeup import Wakeup


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
    last_acts: list[Callable[[], None]] = []

    def end() -> None:
        """When the engine is gone, its worker ends, even in the middle of a step."""
        for act in last_acts:
            act()
        os._exit(0)

    connection = StreamConnection(sock, on_lost=end, on_message=wakeup.ring)
    try:
        config = WorkerConfig.from_json(arguments.config)
        logs.set_up("prefill worker" if config.kv_role == "prefill" else "attention worker", config.log_level)
        return serve(connection, config, wakeup, last_acts=last_acts)
    except ConnectionLost:
        return 0
    except ConfigError as error:
        with contextlib.suppress(ConnectionLost):
            connection.send(messages.WorkerFailed(str(error), user_error=True))
        return 2
    except Exception as error:
        # Log first: the engine may close the connection after the message, and that ends this process.
        traceback.print_exc()
        line = str(error).partition("\n")[0]
        with contextlib.suppress(ConnectionLost):
            connection.send(messages.WorkerFailed(f"{type(error).__name__}: {line}", user_error=False))
        raise SystemExit(1) from error


if __name__ == "__main__":
    raise SystemExit(main())
