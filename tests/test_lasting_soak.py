"""The clients of the soak of states that last find each way to break its law, on servers that lie."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from scripts.soak import lasting_traffic
from scripts.soak.lasting_traffic import Prober, Record, Traffic

from tests.support.troubled_server import TroubledServer

ANSWER = json.dumps({"choices": [{"text": "right"}]})
STREAM = f"data: {ANSWER}\n\ndata: [DONE]\n"
Reply = Callable[[bool], tuple[int, str]]
"""Whether a request is a stream -> status and body."""


def answer_well(is_stream: bool) -> tuple[int, str]:
    return 200, STREAM if is_stream else ANSWER


@contextmanager
def server(health: int, reply: Reply) -> Iterator[TroubledServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(health, "{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*reply(body["stream"]))

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    troubled = TroubledServer(
        cast("Any", None), Path("log"), Path("model"), f"http://127.0.0.1:{http.server_port}"
    )
    try:
        yield troubled
    finally:
        troubled.http.close()
        http.shutdown()
        thread.join()
        http.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting_traffic, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(lasting_traffic, "SLACK_SECONDS", 0.0)
    expected = dict.fromkeys(lasting_traffic.PROMPTS, "right")
    monkeypatch.setattr(Traffic, "expected", expected)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("health", "reply", "wrong"),
    [
        (200, answer_well, ""),
        (503, lambda _: (503, "{}"), ""),
        (503, answer_well, "/health: 503, and a request was answered"),
        (200, lambda _: (500, "{}"), "/health: 200, but a request took"),
        (500, answer_well, "/health: 500"),
    ],
)
def test_health_that_is_wrong_is_found(health: int, reply: Reply, wrong: str) -> None:
    record = Record(0, "none")
    with server(health, reply) as liar, Prober(liar, record, 20.0):
        until(lambda: record.wrong_health if wrong else record.probes > 5)
    assert [wrong in line for line in record.wrong_health[:1]] == [True] * bool(wrong)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (answer_well, "requests"),
        (lambda _: (503, "{}"), "refused"),
        (lambda is_stream: (200, 'data: {"error": {}}\n\n') if is_stream else (503, "{}"), "refused"),
        (lambda _: (500, "{}"), "lost"),
        (lambda is_stream: (200, STREAM[:-7] if is_stream else ANSWER), "lost"),
        (lambda is_stream: (200, answer_well(is_stream)[1].replace("right", "wrong")), "different"),
    ],
)
def test_what_becomes_of_requests_is_told_apart(reply: Reply, kind: str) -> None:
    record = Record(0, "none")
    with server(200, reply) as liar, Traffic(liar, record):
        until(lambda: getattr(record, kind))
    others = {"refused", "lost", "different"} - {kind}
    assert getattr(record, kind) and not any(getattr(record, other) for other in others)
