"""Batch lines: parsing requests and writing results. Pure functions, except for reading the input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.core.errors import ConfigError
from moesaic.server.client import Reply

URLS = ("/v1/chat/completions", "/v1/completions")

ID_PREFIX = "batch_req_"

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is reported and skipped. It is never held in memory completely."""

Key = str | int
"""Identifies the line of a result: its custom_id, or its number if it has no unique custom_id."""


@dataclass(frozen=True)
class Job:
    """A line with a valid request."""

    line: int
    """Line number, from 1."""
    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def key(self) -> Key:
        return self.custom_id


@dataclass(frozen=True)
class BadLine:
    """A line without a valid request."""

    line: int
    code: str
    reason: str
    custom_id: str | None = None
    """None if the line has no custom_id, or another line has the same."""

    @property
    def key(self) -> Key:
        return self.line if self.custom_id is None else self.custom_id


def read(path: Path) -> Iterator[Job | BadLine]:
    """Every line of the input, one at a time. Blank lines are left out.

    The ids seen so far stay in memory, to find duplicates.
    """
    line_by_id: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, raw in _raw_lines(file):
                item = parse(number, raw)
                if item.custom_id is None:
                    yield item
                elif item.custom_id in line_by_id:
                    reason = (
                        f"custom_id: got {item.custom_id!r}; line {line_by_id[item.custom_id]} has it already"
                    )
                    yield BadLine(number, "duplicate_custom_id", reason)
                else:
                    line_by_id[item.custom_id] = number
                    yield item
    except OSError as error:
        raise ConfigError(f"--input-file: {path}: {error.strerror}") from error


def parse(number: int, raw: bytes | None) -> Job | BadLine:
    """Parse one line. None stands for a line that is too long.

    Example: b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}' at line 3 ->
    Job(3, "a", "/v1/completions", {})
    """
    if raw is None:
        return BadLine(number, "line_too_long", f"longer than {MAX_LINE_BYTES} bytes")
    try:
        # Some editors begin a file with a byte order mark.
        value = json.loads(raw.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        return BadLine(number, "invalid_json", f"not JSON: {error}")
    if not isinstance(value, dict):
        return BadLine(number, "invalid_line", f"got {_shorten(value)}; allowed: a JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not _is_id(custom_id):
        return BadLine(number, "invalid_custom_id", _field("custom_id", value, "a text, unique in the file"))
    return _job(number, custom_id, value)


def _job(number: int, custom_id: str, value: dict[str, Any]) -> Job | BadLine:
    """Parse a line whose id is known."""

    def bad(code: str, reason: str) -> BadLine:
        return BadLine(number, code, reason, custom_id)

    if value.get("method") != "POST":
        return bad("invalid_method", _field("method", value, "'POST'"))
    url, body = value.get("url"), value.get("body")
    if url not in URLS:
        return bad("invalid_url", _field("url", value, " or ".join(repr(path) for path in URLS)))
    if not isinstance(body, dict):
        return bad("invalid_body", _field("body", value, "a JSON object"))
    if body.get("stream"):
        return bad("invalid_body", f"body.stream: got {_shorten(body['stream'])}; allowed: false in a batch")
    return Job(number, custom_id, url, body)


def make_result(job: Job, reply: Reply, result_id: str) -> dict[str, Any]:
    """The output line of an answered job; the answer may be an error."""
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
    error = None if reply.status == 200 else _error(job.line, *_error_of(reply))
    return {"id": result_id, "custom_id": job.custom_id, "response": response, "error": error}


def make_bad_line_result(bad: BadLine, result_id: str) -> dict[str, Any]:
    """The output line of a line without a valid request."""
    error = _error(bad.line, bad.code, bad.reason)
    return {"id": result_id, "custom_id": bad.custom_id, "response": None, "error": error}


def error_code(reply: Reply) -> str | None:
    """`error.code` of an answer in OpenAI's format."""
    error = reply.body.get("error") if isinstance(reply.body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else None


def encode(result: dict[str, Any]) -> bytes:
    """Encode a result as a line of the output file."""
    return json.dumps(result, ensure_ascii=False).encode() + b"\n"


def _raw_lines(file: Any) -> Iterator[tuple[int, bytes | None]]:
    """(number, line) of each line; None for a line that is too long."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        is_complete = len(raw) <= MAX_LINE_BYTES or raw.endswith(b"\n")
        while not raw.endswith(b"\n") and len(raw) > MAX_LINE_BYTES:
            raw = file.readline(MAX_LINE_BYTES + 1)
        if not is_complete:
            yield number, None
        elif raw.strip():
            yield number, raw


def _error_of(reply: Reply) -> tuple[str, str]:
    """(error code, message) of an unsuccessful answer."""
    error = reply.body.get("error") if isinstance(reply.body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return error_code(reply) or f"http_{reply.status}", str(message or f"HTTP {reply.status}")


def _error(line: int, code: str, reason: str) -> dict[str, Any]:
    return {"code": code, "message": f"line {line}: {reason}", "line": line}


def _field(name: str, value: dict[str, Any], allowed_values: str) -> str:
    got = _shorten(value[name]) if name in value else "nothing"
    return f"{name}: got {got}; allowed: {allowed_values}"


def _is_id(value: str) -> bool:
    """True for a text that can be written as UTF-8."""
    return value != "" and not any("\ud800" <= c <= "\udfff" for c in value)


def _shorten(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
