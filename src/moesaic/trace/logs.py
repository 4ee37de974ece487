"""Log lines: time, level, process, the request that they belong to, message.

Example: "2026-11-25 20:32:31.123 WARNING attention worker 4711 [chat-17]: request 3 ended: ...".

Question: Where are log lines formatted?
"""

from __future__ import annotations

import logging
import os
import sys
from contextvars import ContextVar

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""Id of the HTTP request that this task answers, as in its header X-Request-Id. Empty outside of requests."""


def reserve_stdout() -> None:
    """Leave standard output to what this process writes to `sys.stdout`.

    Libraries such as UCX and NCCL write messages to descriptor 1. These go to stderr.
    """
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def set_up(process: str, level: str) -> None:
    """Write the log lines of this process to stderr, from `level` on. Handlers that exist are kept.

    process: what this process is, such as "attention worker". level: debug, info, warning or error. Other
    packages only write warnings and errors.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s.%(msecs)03d %(levelname)s {process} %(process)d%(place)s: %(message)s",
            "%Y-%m-%d %H:%M:%S",
        )
    )
    handler.addFilter(_place)
    logging.basicConfig(handlers=[handler], level=max(logging.WARNING, _number(level)))
    logging.getLogger("moesaic").setLevel(_number(level))


def of_request(name: str) -> dict[str, str]:
    """The `extra` of a log line about a request of this name."""
    return {"request": name}


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


def _place(record: logging.LogRecord) -> bool:
    """Give a log line the name of its request. Example: " [chat-17]"."""
    name = getattr(record, "request", "") or REQUEST.get()
    record.place = f" [{name}]" if name else ""
    return True
