"""The host of `moesaic serve` dies, and another host takes over with the processes that joined."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.hosts import Host, Hosts, missing, soon

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(missing()), reason=missing())]
PATIENCE = 60.0
PORT, DOOR = 8000, 7000
PROMPTS = ["def main(argv):", "import os\n", "class A:\n    def", "for i in range("]


class Programs:
    """Programs of moesaic on several hosts, and what they print."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running: list[subprocess.Popen[Any]] = []

    def start(self, host: Host, *words: str) -> Path:
        """Starts `moesaic` with these words. Returns the file that gets its output."""
        log = self._folder / f"log-{len(self.running)}"
        with log.open("w") as file:
            command = [sys.executable, "-m", "moesaic", *words]
            self.running.append(host.popen(command, stdout=file, stderr=file))
        return log

    def logs(self) -> str:
        return "".join(f"{path.name}: {path.read_text()}\n" for path in sorted(self._folder.glob("log-*")))


@pytest.fixture
def programs(shared: Path) -> Iterator[Programs]:
    for old in shared.glob("log-*"):
        old.unlink()
    made = Programs(shared)
    yield made
    for one in made.running:
        one.poll()
        if one.returncode is None:
            one.kill()
            one.wait(PATIENCE)


@pytest.fixture
def three(shared: Path) -> Iterator[Hosts]:
    """Three hosts, of which this thread is in none: each of them can die."""
    with Hosts(4, [shared]) as made:
        yield made


def serve(host: Host, secret: Path, *more: str) -> tuple[str, ...]:
    shape = ("--kv-cache-memory", "32MiB", "--threads", "1", "--rebalance-interval", "0")
    listening = ("--host", host.address, "--port", str(PORT), "--api-key", "k")
    door = ("--cluster-address", f"tcp:{host.address}:{DOOR}", "--cluster-secret-file", str(secret))
    return ("serve", "demo", *shape, *listening, *door, *more)


def answers(host: Host, seconds: float = PATIENCE) -> list[list[int]]:
    """The tokens of PROMPTS, asked of this host by a thread that is on it. Raises httpx.HTTPError."""
    found = []
    with httpx.Client(trust_env=False, timeout=seconds) as client:
        for prompt in PROMPTS:
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
            url, key = f"http://{host.address}:{PORT}/v1/completions", {"Authorization": "Bearer k"}
            answer = client.post(url, json=body, headers=key).raise_for_status().json()
            found.append(answer["choices"][0]["token_ids"])
    return found


def until(condition: Callable[[], object], programs: Programs, seconds: float = PATIENCE) -> None:
    try:
        soon(condition, seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{programs.logs()}") from error


def answering(host: Host) -> list[list[int]] | None:
    try:
        return answers(host, 10.0)
    except httpx.HTTPError:
        return None


def status(host: Host) -> Any:
    url, key = f"http://{host.address}:{PORT}/v1/fault_tolerance/status", {"Authorization": "Bearer k"}
    return httpx.get(url, headers=key, trust_env=False, timeout=10.0).json()


@pytest.mark.parametrize("fault", ["host", "process", "cut"])
def test_another_host_takes_over(fault: str, three: Hosts, shared: Path, programs: Programs) -> None:
    first, second, third, client = three
    secret = shared / "secret"
    secret.unlink(missing_ok=True)
    shape = ("--attention-workers", "1", "--expert-servers", "2", "--min-replicas", "2")
    programs.start(first, *serve(first, secret, *shape))
    until(secret.exists, programs)
    with client.entered():
        until(lambda: answering(first), programs)
        expected = answers(first)
        both = f"{first.address}:{DOOR},{second.address}:{DOOR}"
        join = ("join", both, "--secret-file", str(secret), "--threads", "1")
        joined = [
            programs.start(third, *join),
            programs.start(second, *join),
            programs.start(second, *join, "--role", "attention-worker"),
        ]
        standby = programs.start(
            second, *serve(second, secret, "--standby-for", f"tcp:{first.address}:{DOOR}", *shape)
        )
        until(lambda: "watching" in standby.read_text(), programs)
        until(lambda: [one["stage"] for one in status(first)["processes"]] == ["serving"] * 6, programs)
        until(lambda: status(first)["change"] is None, programs)
        assert status(first)["standbys"] == [second.address]
        assert answers(first) == expected
        with pytest.raises(httpx.ConnectError):
            answers(second)
        at = time.monotonic()
        if fault == "host":
            first.kill()
        elif fault == "process":
            programs.running[0].kill()
        else:
            first.cut()
        found: list[list[list[int]]] = []
        until(lambda: found.extend(filter(None, [answering(second)])) or found, programs)
        seconds = time.monotonic() - at
        sys.stdout.write(f"\n{fault}: from the fault to the end of the first answers {seconds:.2f} s\n")
        assert found[0] == expected
        report = status(second)
        assert sorted(one["role"] for one in report["processes"]) == [
            "attention worker",
            *["expert server"] * 2,
        ]
        assert sum("still there" in log.read_text() for log in joined) == 2, programs.logs()
        programs.running[-1].send_signal(signal.SIGTERM)
        assert programs.running[-1].wait(PATIENCE) == 0
        for one in programs.running[1:4]:
            assert one.wait(PATIENCE) == 0, programs.logs()
