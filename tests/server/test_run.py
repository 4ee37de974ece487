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

from .conftest import NO_TLS

ROOT = Path(__file__).parents[2]


class Served:
    """tests.support.server_process, as a child."""

    def __init__(self, path: Path, pace: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-m", "tests.support.server_process", str(path), pace]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        self.client = httpx.Client(base_url=self.url, timeout=20, trust_env=False, verify=NO_TLS)

    def wait_ready(self) -> None:
        for _ in range(500):
            if self.client.get("/health").status_code == 200:
                return
            time.sleep(0.01)
        raise AssertionError("never ready")

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
@pytest.mark.parametrize("served", ["0.03"], indirect=True)
def test_sigterm_finishes_what_is_in_flight_and_refuses_the_rest(served: Served) -> None:
    served.wait_ready()
    body = {"prompt": "x", "max_tokens": 100}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            httpx.post, f"{served.url}/v1/completions", json=body, timeout=20, trust_env=False, verify=NO_TLS
        )
        time.sleep(0.4)
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = served.client.post("/v1/completions", json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert served.client.get("/health").status_code == 503
        assert running.result(20).json()["usage"]["completion_tokens"] == 100
    assert served.process.wait(5) == 0


@pytest.mark.slow
@pytest.mark.parametrize("served", ["0.05"], indirect=True)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(served: Served, second: signal.Signals) -> None:
    served.wait_ready()
    body = {"prompt": "x", "max_tokens": 200, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_bytes()  # kept: collecting it would hang up
        next(pieces)
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert served.process.poll() is None
        served.process.send_signal(second)
        assert served.process.wait(3) == 128 + second
    assert served.process.stderr is not None
    assert "Traceback" not in served.process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("served", ["0"], indirect=True)
def test_a_client_that_stalls_does_not_keep_a_drained_server(served: Served) -> None:
    served.wait_ready()
    port = int(served.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as stalled:
        stalled.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        stalled.sendall(b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.2)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
    assert served.process.stderr is not None
    assert "Traceback" not in served.process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("served", ["0"], indirect=True)
def test_an_idle_server_stops_with_zero(served: Served) -> None:
    served.wait_ready()
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(5) == 0


@pytest.mark.slow
@pytest.mark.parametrize("served", ["fail"], indirect=True)
def test_a_worker_that_cannot_load_ends_the_server(served: Served) -> None:
    assert served.process.wait(10) == 2
    assert served.process.stderr is not None
    assert "ConfigError: --dtype: got 'float1'" in served.process.stderr.read()
