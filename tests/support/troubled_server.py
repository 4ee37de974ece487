"""`moesaic serve` over a copy of the demo, for tests that bring it into a state that lasts and look at it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from moesaic.models.files import resolve

PATIENCE = 180.0
"""Seconds after which a test counts as hanging, also on a busy machine."""
ADMIN_KEY = "admin"
OUTAGE_SECONDS = 12.0
"""Seconds of an outage after which the server refuses requests."""
PROCESSES = ("--attention-workers", "1", "--expert-servers", "2")


@dataclass(frozen=True)
class Reply:
    """What became of a request. status 0: the connection failed, or nothing came in time."""

    status: int
    text: str = ""
    retry_after: str | None = None
    tokens: int = 0


@dataclass
class WaitingRequest:
    """A stream of tokens that another thread reads."""

    tokens: int = 0
    error: str = ""
    thread: threading.Thread = field(default_factory=threading.Thread)

    def end(self, seconds: float = PATIENCE) -> str:
        """The error with which it ended. Empty: it was complete."""
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the request still waits"
        return self.error


@dataclass
class TroubledServer:
    """A running server, and how to look at it."""

    process: subprocess.Popen[str]
    log_file: Path
    model: Path
    url: str = ""
    http: httpx.Client = field(default_factory=lambda: httpx.Client(trust_env=False, timeout=PATIENCE))

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.is_file() else ""

    @property
    def weights(self) -> Path:
        return self.model / "model.safetensors"

    def get(self, path: str) -> httpx.Response:
        return self.http.get(self.url + path, headers={"Authorization": f"Bearer {ADMIN_KEY}"})

    def health(self) -> Reply:
        try:
            answer = self.get("/health")
        except httpx.HTTPError as error:
            return Reply(0, str(error))
        return Reply(answer.status_code, answer.text, answer.headers.get("retry-after"))

    def status(self) -> Any:
        return self.get("/v1/fault_tolerance/status").json()

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"moesaic:{name}{{"))

    def pid(self, name: str) -> int:
        [pid] = [process["pid"] for process in self.status()["processes"] if process["name"] == name]
        assert isinstance(pid, int), f"{name} has no process"
        return pid

    def kill(self, *names: str) -> None:
        for pid in [self.pid(name) for name in names]:
            os.kill(pid, signal.SIGKILL)

    def ask(self, chat: bool = False, seconds: float = PATIENCE) -> Reply:
        """A new request, for a few tokens."""
        body: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        try:
            answer = self.http.post(self.url + path, json=body, timeout=seconds)
        except httpx.HTTPError as error:
            return Reply(0, f"{type(error).__name__}: {error}")
        usage = answer.json().get("usage", {}).get("completion_tokens", 0)
        return Reply(answer.status_code, answer.text, answer.headers.get("retry-after"), usage)

    def begin(self, max_tokens: int = 1900) -> WaitingRequest:
        """A stream that has begun, and that would last long."""
        request = WaitingRequest()
        request.thread = threading.Thread(target=self._stream, args=[request, max_tokens], daemon=True)
        request.thread.start()
        self.until(lambda: request.tokens > 3 or bool(request.error))
        assert not request.error, request.error
        return request

    def until(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Waits until `condition` holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it did not happen; the log:\n{self.log[-3000:]}"
            time.sleep(0.1)

    def stop(self) -> int:
        """Sends SIGTERM. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        """Kills the server."""
        self.http.close()
        self.process.kill()
        self.process.wait(PATIENCE)

    def limit(self, which: int, value: int) -> None:
        """Lowers a limit of the server's process, which its further children inherit."""
        resource.prlimit(self.process.pid, which, (value, resource.prlimit(self.process.pid, which)[1]))

    def _stream(self, request: WaitingRequest, max_tokens: int) -> None:
        body = {"prompt": "hi", "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        try:
            with self.http.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if '"error"' in line:
                        request.error = line
                    request.tokens += line.startswith("data: {")
        except httpx.HTTPError as error:
            request.error = f"{type(error).__name__}: {error}"


def find_free_port() -> int:
    """A port of this host on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    assert isinstance(port, int)
    return port


@contextmanager
def serve(
    folder: Path, *flags: str, outage_seconds: float = OUTAGE_SECONDS, **environment: str
) -> Iterator[TroubledServer]:
    """A server that serves, and is killed at the end."""
    model = Path(shutil.copytree(resolve("demo"), folder / "model", dirs_exist_ok=True))
    server = start(folder, model, *flags, outage_seconds=outage_seconds, **environment)
    try:
        server.until(lambda: server.process.poll() is not None or '"event": "serving"' in server.log)
        assert server.process.poll() is None, server.log
        line = next(line for line in server.log.splitlines() if '"event": "serving"' in line)
        server.url = json.loads(line)["url"]
        yield server
    finally:
        server.close()


def start(
    folder: Path,
    model: Path,
    *flags: str,
    prefix: Sequence[str] = (),
    output: Path | None = None,
    port: int = 0,
    outage_seconds: float = OUTAGE_SECONDS,
    **environment: str,
) -> TroubledServer:
    """A server that has just been started. output: gets what it prints, in place of the log."""
    log_file = folder / "log" if output is None else output
    command = [*prefix, sys.executable, "-m", "moesaic", "serve", str(model), "--port", str(port), "--json"]
    command += ["--threads", "1", "--kv-cache-memory", "32MiB", "--served-model-name", "demo"]
    command += ["--admin-key", ADMIN_KEY, "--unavailable-timeout", str(outage_seconds)]
    command += ["--shutdown-timeout", "5", *flags]
    with log_file.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, text=True, env=os.environ | environment
        )
    return TroubledServer(process, log_file, model)
