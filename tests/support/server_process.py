"""A server process: `python -m tests.support.server_process TOKENIZER_DIR PACE [LIMITS]`.

Prints its port. The worker answers like in every other test; with PACE "fail" it fails to load.
With PACE "held" the process prints "seen" once a request is at the worker, and makes no token before a line
has come by its standard input.
LIMITS: fields of ConnectionConfig as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from moesaic.config import ConnectionConfig
from moesaic.core import messages
from moesaic.core.errors import MoesaicError
from moesaic.server.app import create_app
from moesaic.server.listener import bind
from moesaic.server.run import serve
from moesaic.server.service import Service
from tests.support.fake_worker import FakeWorker, engine_and_worker, make_tokenizer


def main(path: str, pace: str, fields: str = "{}") -> int:
    limits = ConnectionConfig(**json.loads(fields))
    failing, held = pace == "fail", pace == "held"
    front, worker = engine_and_worker(
        make_tokenizer(Path(path)), pace=0.0 if failing or held else float(pace)
    )
    listener = bind("127.0.0.1", 0)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    if held:
        worker.open.clear()
        threading.Thread(target=_release, args=[worker], daemon=True).start()
    worker.start()
    if failing:
        worker.connection.send(messages.WorkerFailed("--dtype: got 'float1'", user_error=True))
    else:
        worker.ready()
    try:
        app = create_app(Service(front, "m"), body_seconds=limits.timeout_body)
        return serve(app, front, listener, limits=limits)
    except MoesaicError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2


def _release(worker: FakeWorker) -> None:
    while not worker.seen:
        time.sleep(0.001)
    sys.stdout.write("seen\n")
    sys.stdout.flush()
    sys.stdin.readline()
    worker.open.set()


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
