"""The fuzzer of the API: what counts as a failure, that it finds one, and a short run."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from scripts.fuzz_api import __main__ as program
from scripts.fuzz_api.requests import GOOD, HALF, WAIT, Call, Maker

ROOT = Path(__file__).parent.parent


class Broken(BaseHTTPRequestHandler):
    """Fails at the number 3."""

    protocol_version = "HTTP/1.1"
    timeout = 0.2  # seconds for the rest of a request

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(500 if b"[1, 2, 3]" in body else 200)

    def do_GET(self) -> None:
        self.answer(200)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  of the base class
        """Stay quiet."""


@pytest.fixture
def broken() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "text", "ending", "bad"),
    [
        ("200", "", "", False),
        ("400", "", "", False),
        ("500", "", "", True),
        ("500", "", HALF, True),
        ("501", "", "", True),
        ("503", '{"error": {"code": "too_many_connections"}}', "", False),
        ("503", '{"error": {"code": "engine_dead"}}', "", True),
        (program.UNANSWERED, "reset", "", True),
        (program.UNANSWERED, "reset", HALF, False),
        (program.UNANSWERED, "reset", WAIT, False),
    ],
)
def test_what_counts_as_a_failure(status: str, text: str, ending: str, bad: bool) -> None:
    assert program.failed(Call("/x", "schema", "GET", b"", ending), status, text) == bad


def test_the_same_seed_makes_the_same_requests() -> None:
    def made(number: int) -> list[Call]:
        maker = Maker(GOOD, "demo", (None, "key"), random.Random(number))
        return [maker.make() for _ in range(100)]

    assert made(1) == made(1) != made(2)
    assert len({call.kind for call in made(1)}) == 11
    assert all(Call.from_json(json.loads(json.dumps(call.as_json()))) == call for call in made(1))


@pytest.mark.slow
def test_a_failure_is_found_and_can_be_sent_again(
    broken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = argparse.Namespace(calls=150, seed=0, connections=2, minutes=None)
    tally = program.fuzz(broken, list(GOOD), arguments)
    assert tally.calls == 150 and set(tally.health) <= {"200"}
    file = tmp_path / "failure.json"
    assert program.summed_up(tally, 0, "", file) == 1
    assert "failed: /" in capsys.readouterr().out
    call = Call.from_json(json.loads(file.read_text())["call"])
    with program.Client(broken) as client:
        status, text = client.send(call)
    assert program.failed(call, status, text)


def test_a_traceback_of_the_server_is_a_failure(tmp_path: Path) -> None:
    assert program.summed_up(program.Tally(), 0, "", tmp_path / "f") == 0
    assert program.summed_up(program.Tally(), 0, "Traceback (most recent call last):", tmp_path / "f") == 1
    assert program.summed_up(program.Tally(), 1, "", tmp_path / "f") == 1


@pytest.mark.slow
def test_the_api_withstands_a_short_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.fuzz_api", "--calls", "600", "--each", "20"]
    done = subprocess.run(
        [*command, "--failure", str(tmp_path / "failure.json")],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "/v1/chat/completions" in done.stdout
