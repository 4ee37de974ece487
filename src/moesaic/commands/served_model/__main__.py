"""`python -m moesaic.commands.served_model NAME`: serves one model for the process that started it.

Its settings arrive at its standard input. That input ends with the other process, and then this one drains.
What it serves, or why it cannot, is a line of JSON on standard output.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading

from moesaic.commands import serve
from moesaic.commands.model_settings import ServedModel
from moesaic.core.errors import ConfigError, MoesaicError
from moesaic.trace import logs


def main() -> int:
    """Serve until SIGTERM. Returns the exit code: 0, 1 if it failed, 2 if a setting is wrong."""
    model: ServedModel = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    logs.set_up(f"server of {model.server.served_model_name[0]}", model.worker.log_level)
    try:
        return serve.run(
            model.worker,
            model.cluster,
            model.server,
            model.connections,
            model.record,
            as_json=True,
            cors=model.cors,
            offload=model.offload,
        )
    except MoesaicError as error:
        line = " ".join(str(error).split())
        print(json.dumps({"event": "failed", "error": line}), flush=True)
        return 2 if isinstance(error, ConfigError) else 1


def _end_with_parent() -> None:
    """Wait for the end of the standard input, and stop this process as a signal would."""
    # Without Python's buffer, whose lock would be held when the interpreter ends.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(main())
