"""`python -m moesaic.experts`: the process of one expert server, which the supervisor starts.

Question: What does SIGTERM do to an expert server?
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import traceback

from moesaic.config import ExpertServerConfig
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.experts.process import serve
from moesaic.trace import logs
from moesaic.transport.stream import StreamConnection
from moesaic.transport.wakeup import Wakeup


def main() -> int:
    """Serve the supervisor at the other end of an inherited socket. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="moesaic.experts", description=__doc__)
    parser.add_argument("--connection-fd", type=int, required=True, help="inherited socket to the supervisor")
    parser.add_argument("--config", required=True, help="settings as JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the supervisor ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wakeup = Wakeup()
    sock = socket.socket(fileno=arguments.connection_fd)
    # Exit when the supervisor is gone, because no other process would stop this one.
    supervisor = StreamConnection(sock, on_lost=lambda: os._exit(0), on_message=wakeup.ring)
    try:
        config = ExpertServerConfig.from_json(arguments.config)
        logs.set_up("expert server", config.log_level)
        return serve(supervisor, config, wakeup)
    except ConnectionLost:
        return 0
    except MoesaicError as error:
        supervisor.send(messages.WorkerFailed(str(error), user_error=True))
        return 2
    except Exception as error:
        traceback.print_exc()
        line = str(error).partition("\n")[0]
        with contextlib.suppress(ConnectionLost):
            supervisor.send(messages.WorkerFailed(f"{type(error).__name__}: {line}", user_error=False))
        raise SystemExit(1) from error


if __name__ == "__main__":
    raise SystemExit(main())
