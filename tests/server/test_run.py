"""The process: its socket and its signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from moesaic.core.errors import ConfigError
from moesaic.server.listener import bind

from .conftest import NO_TLS, PATIENCE

ROOT = Path(__file__).parents[2]


class Served:
    """tests.support.server_process, as a child."""

    def __init__(self, path: Path, pace: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-m", "tests.support.server_process", str(path), pace]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{int(self.line())}"
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, verify=NO_TLS)

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def release(self) -> None:
        """Let the worker make tokens, where its pace is "held"."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def wait_health(self, status: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.client.get("/health").status_code != status:
            assert time.monotonic() < deadline, f"/health never answered {status}"
            time.sleep(0.01)

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    served = Served(tmp_path, request.param)
    yield served
    served.close()


def test_a_taken_port_is_one_clear_line() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"^--port: cannot listen on 127.0.0.1:{port}: Address already"
        ):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1", "a" * 300])
def test_an_unknown_host_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        bind(host, 0)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--host: .*192\.0\.2\.1"):
        bind("192.0.2.1", 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ipv6() -> None:
    try:
        listener = bind("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 loopback")
    with listener:
        assert listener.family == socket.AF_INET6


@pytest.mark.slow
@pytest.mark.parametrize("served", ["held"], indirect=True)
def test_sigterm_finishes_what_is_in_flight_and_refuses_the_rest(served: Served) -> None:
    served.wait_health(200)
    body = {"prompt": "x", "max_tokens": 100}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            httpx.post,
            f"{served.url}/v1/completions",
            json=body,
            timeout=PATIENCE,
            trust_env=False,
            verify=NO_TLS,
        )
        assert served.line() == "seen\n"
        served.process.send_signal(signal.SIGTERM)
        served.wait_health(503)
        refused = served.client.post("/v1/completions", json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        served.release()
        assert running.result(PATIENCE).json()["usage"]["completion_tokens"] == 100
    assert served.process.wait(PATIENCE) == 0


@pytest.mark.slow
@pytest.mark.parametrize("served", ["0.2"], indirect=True)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(served: Served, second: signal.Signals) -> None:
    served.wait_health(200)
    body = {"prompt": "x", "max_tokens": 200, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_bytes()  # kept: collecting it would hang up
        next(pieces)
        served.process.send_signal(signal.SIGTERM)
        served.wait_health(503)  # else both signals may be one
        assert served.process.poll() is None
        served.process.send_signal(second)
        assert served.process.wait(30) == 128 + second, "the answer alone takes 40 seconds"
    assert served.process.stderr is not None
    assert "Traceback" not in served.process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("served", ["0"], indirect=True)
def test_a_client_that_stalls_does_not_keep_a_drained_server(served: Served) -> None:
    served.wait_health(200)
    port = int(served.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as stalled:
        stalled.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        stalled.sendall(b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.2)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE) == 0
    assert served.process.stderr is not None
    assert "Traceback" not in served.process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("served", ["0"], indirect=True)
def test_an_idle_server_stops_with_zero(served: Served) -> None:
    served.wait_health(200)
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(PATIENCE) == 0


@pytest.mark.slow
@pytest.mark.parametrize("served", ["fail"], indirect=True)
def test_a_worker_that_cannot_load_ends_the_server(served: Served) -> None:
    assert served.process.wait(PATIENCE) == 2
    assert served.process.stderr is not None
    assert "ConfigError: --dtype: got 'float1'" in served.process.stderr.read()
