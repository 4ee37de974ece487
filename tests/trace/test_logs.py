"""Log lines: time, level, process, request."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moesaic.trace import logs


@contextmanager
def bare_logging() -> Iterator[None]:
    """Logging without handlers, as at the start of a program."""
    root, own = logging.getLogger(), logging.getLogger("moesaic")
    before = root.level, own.level, root.handlers
    root.handlers = []
    yield
    root.handlers = before[2]
    root.setLevel(before[0])
    own.setLevel(before[1])


def test_a_line_names_time_level_process_and_request(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("moesaic.x")
    with bare_logging():
        logs.set_up("attention worker", "info")
        log.info("loaded")
        log.warning("request %d ended", 3, extra=logs.of_request("chat-17"))
        token = logs.REQUEST.set("chat-18")
        log.error("within a request")
        logs.REQUEST.reset(token)
        log.debug("not from info on")
        logging.getLogger("other").info("of another package")
    first, second, third = capsys.readouterr().err.splitlines()
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
    assert re.fullmatch(time + r" INFO attention worker \d+: loaded", first)
    assert re.fullmatch(time + r" WARNING attention worker \d+ \[chat-17\]: request 3 ended", second)
    assert re.fullmatch(time + r" ERROR attention worker \d+ \[chat-18\]: within a request", third)


@pytest.mark.parametrize(("level", "shown"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels(level: str, shown: int, capsys: pytest.CaptureFixture[str]) -> None:
    with bare_logging():
        logs.set_up("server", level)
        for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger("moesaic.x").log(number, "x")
    assert len(capsys.readouterr().err.splitlines()) == shown


def test_handlers_of_a_program_are_kept() -> None:
    before = list(logging.getLogger().handlers)
    assert before, "pytest has some"
    level = logging.getLogger("moesaic").level
    logs.set_up("server", "info")
    logging.getLogger("moesaic").setLevel(level)
    assert logging.getLogger().handlers == before
