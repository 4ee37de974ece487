"""Clients that are silent, slow, wrong or too many, against a real process with a small descriptor limit."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from moesaic.config import ConnectionConfig
from moesaic.core.errors import ConfigError
from moesaic.server.room import MAX_REQUESTS, SPARE, Room
from tests.server.conftest import MODEL, Launch
from tests.support import pairs
from tests.support.raw_http import ask, connect, get, head, post, read, silent

ROOT = Path(__file__).parents[2]
BODY = {"prompt": "x", "max_tokens": 4}
QUICK = '{"timeout_header": 1, "timeout_body": 1, "timeout_keep_alive": 1}'


class Process:
    """tests.support.server_process under a descriptor limit."""

    def __init__(self, path: Path, pace: float, limits: str, descriptors: int) -> None:
        run = f'ulimit -n {descriptors}; exec "$0" -m tests.support.server_process "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", run, sys.executable, str(path), str(pace), limits],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        while get(self.port, "/health") != 200:
            time.sleep(0.02)

    def end(self) -> str:
        """End the server and return what it logged."""
        self.process.terminate()
        said = self.process.communicate(timeout=60)[1]
        assert self.process.returncode == 0
        assert "Traceback" not in said, said
        return said


@contextmanager
def process(path: Path, *, pace: float = 0.0, limits: str = "{}", descriptors: int = 64) -> Iterator[Process]:
    server = Process(path, pace, limits, descriptors)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()
        server.process.communicate()


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server with time limits of a second."""
    with process(tmp_path_factory.mktemp("quick"), pace=0.04, limits=QUICK, descriptors=256) as server:
        yield server
        server.end()


def test_the_room_leaves_descriptors_for_everything_else() -> None:
    assert Room.from_descriptor_limit(1024, 24, None) == Room(max_requests=1000 - 128, spare_connections=64)
    assert Room.from_descriptor_limit(64, 20, None) == Room(max_requests=44 - 22, spare_connections=11)
    assert Room.from_descriptor_limit(1 << 20, 20, None) == Room(
        max_requests=MAX_REQUESTS, spare_connections=64
    )
    assert Room.from_descriptor_limit(1 << 20, 20, 1 << 17) == Room(
        max_requests=1 << 17, spare_connections=64
    )
    assert Room.from_descriptor_limit(64, 20, 3) == Room(max_requests=3, spare_connections=11)


def test_a_limit_without_room_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"ulimit -n\): got 20; allowed: at least 24"):
        Room.from_descriptor_limit(20, 20, None)
    with pytest.raises(ConfigError, match=r"^--max-connections: got 23; allowed: at most 22 .* ulimit -n"):
        Room.from_descriptor_limit(64, 20, 23)


@pytest.mark.slow
def test_silent_connections_keep_nobody_out(tmp_path: Path) -> None:
    """More of them than the process may have descriptors, again and again."""
    with process(tmp_path) as server:
        with silent(server.port, 150), silent(server.port, 150):
            for _ in range(3):
                assert get(server.port, "/health") == get(server.port, "/metrics") == 200
                answer = ask(server.port, post("/v1/completions", BODY, "Connection: close"))
                assert answer is not None and answer.status == 200
                time.sleep(0.3)
        said = server.end()
    assert re.fullmatch(r"\d+ requests or \d+ connections are open, the maximum; .*ulimit -n\)\n", said), said


@pytest.mark.slow
def test_honest_clients_beyond_the_maximum_are_told_to_come_back(tmp_path: Path) -> None:
    """None of a hundred is cut off, and /health is answered meanwhile."""
    request = post("/v1/completions", BODY | {"max_tokens": 40}, "Connection: close")
    with process(tmp_path, pace=0.02) as server, ThreadPoolExecutor(101) as pool:
        health = pool.submit(lambda: [get(server.port, "/health") for _ in range(20)])
        calls = [pool.submit(ask, server.port, request) for _ in range(100)]
        answers = [call.result() for call in calls]
        assert health.result() == [200] * 20
        said = server.end()
    good = [answer for answer in answers if answer is not None and answer.status == 200]
    refused = [answer for answer in answers if answer is not None and answer.status != 200]
    assert all(b'"finish_reason":"length"' in answer.body for answer in good)
    assert len(good) + len(refused) == 100 and good and refused
    for answer in refused:
        if answer.status == 503:
            assert (answer.code, answer.headers["retry-after"]) == ("too_many_connections", "1")
            assert answer.headers["connection"] == "close"
        else:
            assert answer.status == 429, "the engine's queue is full"
    full = any(answer.status == 503 for answer in refused)  # else the engine's queue was full before
    assert said.count("\n") == int(full), "one line, and not one for each connection"


@pytest.mark.slow
def test_refusals_of_messages_have_anthropics_form(launch: Launch, until: Callable[..., None]) -> None:
    """Beyond the requests at the same time, and where half a request gives way to further connections."""
    live = launch(limits=ConnectionConfig(max_connections=1))
    port = int(live.url.rpartition(":")[2])
    live.worker.open.clear()
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    with ExitStack() as stack:
        halves = [stack.enter_context(connect(port)) for _ in range(SPARE)]
        for half in halves:
            half.sendall(head("/v1/messages", 100) + b"{")
        first = stack.enter_context(connect(port))
        first.sendall(post("/v1/messages", body))
        until(lambda: len(live.worker.seen) == 1)
        second = ask(port, post("/v1/messages", body, "Connection: close"))
        stack.enter_context(silent(port, 1))
        for answer in (second, read(halves[0])):
            assert answer is not None and answer.status == 503 and answer.headers["retry-after"] == "1"
            assert json.loads(answer.body) == {
                "type": "error",
                "error": {"type": "overloaded_error", "message": "the server has too many connections"},
            }
        live.worker.open.set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "begun", [b"POST /v1/compl", head("/v1/completions", 2000) + b'{"prompt": '], ids=["heads", "bodies"]
)
def test_half_requests_keep_nobody_out(tmp_path: Path, begun: bytes) -> None:
    """Those that drip as little as those that stop."""
    with process(tmp_path) as server, ExitStack() as stack:
        socks = [stack.enter_context(connect(server.port)) for _ in range(60)]
        for sock in socks:
            sock.sendall(begun)
        for _ in range(30):
            time.sleep(0.1)
            for sock in socks[::2]:
                with suppress(OSError):  # it was closed
                    sock.sendall(b"x")
        assert get(server.port, "/health") == 200
        answer = ask(server.port, post("/v1/completions", BODY, "Connection: close"))
        assert answer is not None and answer.status == 200
        ended = read(socks[0])
        assert ended is None or ended.status == 503
        server.end()


@pytest.mark.slow
def test_idle_connections_give_way(tmp_path: Path) -> None:
    with process(tmp_path, limits='{"timeout_keep_alive": 600}') as server, ExitStack() as stack:
        idle = []
        for _ in range(80):
            sock = stack.enter_context(connect(server.port))
            sock.sendall(head("/version"))
            answer = b""
            while not answer.endswith(b"}"):
                answer += sock.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")
            idle.append(sock)
        assert get(server.port, "/health") == 200
        assert idle[0].recv(1) == b"", "an idle connection is closed without an answer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", 408),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localh", 408),
        (head("/v1/completions", 100) + b'{"prompt": ', 408),
    ],
    ids=["silent", "half a head", "half a body"],
)
def test_what_never_arrives_is_not_waited_for(quick: Process, sent: bytes, status: int) -> None:
    with connect(quick.port) as sock:
        sock.sendall(sent)
        answer = read(sock)
    assert answer is not None
    assert (answer.status, answer.code, answer.headers["connection"]) == (status, "request_timeout", "close")
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.slow
def test_a_head_that_drips_is_cut(quick: Process) -> None:
    with connect(quick.port) as sock:
        drip(sock, b"GET /health HTTP/1.1\r\nX: " + b"x" * 1000)
        answer = read(sock)
    assert answer is None or answer.status == 408


@pytest.mark.slow
def test_a_body_that_drips_is_cut(quick: Process) -> None:
    with connect(quick.port) as sock:
        sock.sendall(head("/v1/completions", 5000))
        drip(sock, b'{"prompt": "' + b"x" * 4000)
        answer = read(sock)
    assert answer is None or answer.status == 408


@pytest.mark.slow
def test_a_body_that_stops_is_cut_however_fast_it_began(quick: Process) -> None:
    """2 MB are good for an hour, but a pause is not."""
    with connect(quick.port) as sock:
        sock.sendall(head("/tokenize", 3 << 20) + b'{"prompt": "' + b"x" * (2 << 20))
        answer = read(sock)
    assert answer is not None and answer.status == 408


@pytest.mark.slow
def test_a_slow_but_steady_upload_is_answered(quick: Process) -> None:
    """Four times as long as --timeout-body."""
    request = post("/tokenize", {"prompt": "x" * 8000}, "Connection: close")
    with connect(quick.port) as sock:
        for start in range(0, len(request), 400):
            sock.sendall(request[start : start + 400])
            time.sleep(0.2)
        answer = read(sock)
    assert answer is not None and answer.status == 200


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_take_its_time(quick: Process, stream: bool) -> None:
    """Four times as long as every limit."""
    body = {"prompt": "x", "max_tokens": 100, "stream": stream}
    answer = ask(quick.port, post("/v1/completions", body, "Connection: close"))
    assert answer is not None and answer.status == 200
    assert b'"finish_reason":"length"' in answer.body


@pytest.mark.slow
def test_a_kept_connection_is_closed_when_it_is_idle(quick: Process) -> None:
    with connect(quick.port) as sock:
        sock.sendall(head("/health") + head("/health"))  # two at once: a pipeline
        answer = read(sock)
        assert answer is not None and answer.body.count(b"HTTP/1.1 200 OK") == 1
    with connect(quick.port) as sock:
        sock.sendall(head("/health"))
        time.sleep(0.6)
        sock.sendall(b"GET /hea")  # half a head on a kept connection
        answer = read(sock)
        assert answer is not None and answer.status == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/9.9\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http_is_a_400_in_the_usual_shape(quick: Process, sent: bytes) -> None:
    answer = ask(quick.port, sent)
    assert answer is not None and (answer.status, answer.code) == (400, "invalid_http")


@pytest.mark.slow
def test_invalid_http_during_an_answer_ends_only_its_connection(quick: Process) -> None:
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    with connect(quick.port) as sock:
        sock.sendall(request.replace(b"/v1/completions", b"/nothing"))
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 404")
        sock.sendall(b"zz\r\n")
        while sock.recv(1 << 16):
            pass
    assert get(quick.port, "/health") == 200


@pytest.mark.parametrize("path", pairs.some(["/metrics", "/openapi.json"], ["/metrics"]))
def test_clients_that_read_nothing_keep_nobody_out(tmp_path: Path, path: str) -> None:
    """Their answers wait in the server, up to the point where it stops writing."""
    with process(tmp_path) as server, ExitStack() as stack:
        for _ in range(60):
            sock = stack.enter_context(connect(server.port))
            sock.sendall(head(path) * 1000)
        assert get(server.port, "/health") == 200


def drip(sock: socket.socket, data: bytes) -> None:
    """Send a byte at a time until the server has had enough."""
    for byte in data:
        try:
            sock.sendall(bytes([byte]))
        except OSError:
            return
        time.sleep(0.05)
