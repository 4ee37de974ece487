"""`moesaic serve` with several processes, watched and scaled over HTTP as a person does it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from moesaic import LLM, SamplingParams
from tests.support.processes import gone
from tests.test_serve import Server, start

pytestmark = pytest.mark.slow
KEY = "s3cret"
PROMPT = "def main(argv):"
PARAMS: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 5, "top_p": 1.0}
MORE: dict[str, Any] = {"ignore_eos": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""What OpenAI's client does not know."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start(
        *("--attention-workers", "2", "--expert-servers", "2", "--min-replicas", "2", "--api-key", KEY)
    )
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(30) == 0
    assert running.process.stdout is not None
    running.process.stdout.close()


def status(server: Server) -> Any:
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.get(f"{server.url}/v1/fault_tolerance/status", headers=headers, trust_env=False)
    return answer.raise_for_status().json()


def scale(server: Server, *flags: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moesaic", "scale", "--base-url", server.url, "--api-key", key]
    return subprocess.run([*command, *flags], capture_output=True, text=True, check=False, timeout=100)


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


class Traffic(threading.Thread):
    """The same request over and over, until it is told to stop."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.client = client(server)
        self.stopped = threading.Event()
        self.texts: list[str] = []
        self.errors: list[Exception] = []

    def run(self) -> None:
        with self.client:
            while not self.stopped.is_set():
                try:
                    answer = self.client.completions.create(
                        model="demo", prompt=PROMPT, extra_body=MORE, **PARAMS
                    )
                    self.texts.append(answer.choices[0].text)
                except openai.APIError as error:
                    self.errors.append(error)


def test_what_serves_is_told_at_the_start(server: Server) -> None:
    told = server.info["cluster"]
    assert [process["name"] for process in told["processes"]] == [
        *("attention worker 0", "attention worker 1", "expert server 0", "expert server 1")
    ]
    assert (told["transport"], told["watched"]) == ("shm", True)
    servers = told["processes"][2:]
    assert all(process["experts"] == 24 * process["layers"] > 0 for process in servers)
    assert all(process["threads"] == 1 and process["kernels"] for process in servers)
    assert {(layer["least"], layer["most"]) for layer in told["replicas"]} == {(2, 2)}


def test_scaling_and_a_kill_during_traffic(server: Server) -> None:
    traffic = [Traffic(server) for _ in range(3)]
    for thread in traffic:
        thread.start()
    up = scale(server, "--expert-servers", "3", "--attention-workers", "3", "--json")
    assert up.returncode == 0, up.stderr
    assert len(json.loads(up.stdout)["processes"]) == 6
    before = status(server)
    os.kill(before["processes"][3]["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 120
    while (after := status(server))["processes"][3]["incarnation"] == 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    down = scale(server, "--expert-servers", "2", "--attention-workers", "1")
    assert down.returncode == 0, down.stderr
    assert "expert server 1" in down.stdout and "expert server 2" not in down.stdout
    for thread in traffic:
        thread.stopped.set()
    for thread in traffic:
        thread.join(60)
        assert thread.errors == []
    alone = LLM("demo", threads=1).generate([PROMPT], SamplingParams(**PARAMS, **MORE))
    assert {text for thread in traffic for text in thread.texts} == {alone[0].text}
    assert after["counters"]["process_deaths"] == 1
    assert "killed by signal 9" in after["failures"][-1]["what"]
    found = server.metrics()
    assert found['moesaic:processes_up{,role="attention worker"}'] == 1
    assert found['moesaic:processes_up{,role="expert server"}'] == 2
    assert sum(value for name, value in found.items() if name.startswith("moesaic:expert_pairs_total")) > 0
    assert found["moesaic:placement_version{}"] == status(server)["placement_version"] > 0


def test_refusals_are_one_line(server: Server) -> None:
    for flags, key, code, message in (
        (("--expert-servers", "1"), KEY, 1, "HTTP 409: expert_servers: got 1; --min-replicas"),
        (("--expert-servers", "3"), "wrong", 1, "HTTP 401: wrong or missing admin key"),
        (("--expert-servers", "0"), KEY, 2, "--expert-servers: got 0"),
        ((), KEY, 2, "--expert-servers, --attention-workers, --prefill-workers or --cancel: give"),
    ):
        done = scale(server, *flags, key=key)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
        assert message in done.stderr


def test_a_server_that_is_killed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither processes nor files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    running = start("--attention-workers", "2", "--expert-servers", "2")
    started = [process["pid"] for process in running.info["cluster"]["processes"]]
    running.process.kill()
    running.process.communicate()
    deadline = time.monotonic() + 60
    while not all(map(gone, started)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list(tmp_path.glob("*moesaic*"))
