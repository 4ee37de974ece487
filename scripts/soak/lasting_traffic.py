"""Clients of a server whose states last: requests that are compared, and looks at /health."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx
from tests.support.troubled_server import TroubledServer

SLACK_SECONDS = 15.0
"""Seconds that a probe request may take beside those of an outage, on a busy machine."""
CLIENTS = 3
PROMPTS = tuple(f"Story number {number} begins" for number in range(6))
TOKENS = 24
REQUEST_SECONDS = 150.0
LOOK_SECONDS = 0.5
"""Seconds between two looks at /health."""


@dataclass
class Record:
    """What happened in a round."""

    number: int
    fault: str
    requests: int = 0
    refused: int = 0
    """Requests that got a 503 or an error event."""
    probes: int = 0
    """Looks at /health."""
    probes_unavailable: int = 0
    """Those that got 503."""
    lost: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    wrong_health: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Why the round broke off."""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.different or self.leaks or self.wrong_health or self.broken)

    def numbers(self) -> tuple[int, ...]:
        """The columns of the summary."""
        bad = len(self.lost), len(self.different), len(self.leaks)
        return self.requests, self.refused, *bad, self.probes, len(self.wrong_health)

    def describe(self) -> str:
        """The round in a line, and what was wrong in it in further ones."""
        line = (
            f"{self.number} {self.fault}: {self.seconds:.0f} s, {self.requests} requests, {self.refused} "
            f"refused, {self.probes} probes, {self.probes_unavailable} of them 503"
        )
        wrong = self.lost + self.different + self.leaks + self.wrong_health + self.broken
        return "\n  ".join([line, *wrong])


def ask(client: httpx.Client, url: str, prompt: str, stream: bool, tokens: int = TOKENS) -> tuple[int, str]:
    """The status of a request, and its text or error. 503 also for an error event; 0: it was lost."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": stream}
    try:
        if not stream:
            answer = client.post(f"{url}/v1/completions", json=body)
            return answer.status_code, _text(answer.text) if answer.status_code == 200 else answer.text
        with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return answer.status_code, answer.read().decode()
            text, ended = "", False
            for line in answer.iter_lines():
                if '"error"' in line:
                    return 503, line
                ended = ended or line == "data: [DONE]"
                text += _text(line[6:]) if line.startswith("data: {") else ""
            return (200, text) if ended else (0, f"the stream ended after {text!r}")
    except httpx.HTTPError as error:
        return 0, f"{type(error).__name__}: {error}"


def _text(answer: str) -> str:
    choices = json.loads(answer)["choices"]
    return str(choices[0]["text"]) if choices else ""


class Traffic:
    """Sends requests from threads, until the context ends. Their answers are compared."""

    expected: ClassVar[dict[str, str]] = {}
    """Prompt -> the text of before the first fault, of any server: all have the same checkpoint."""

    def __init__(self, server: TroubledServer, record: Record) -> None:
        self._server, self._record = server, record
        self._is_over = threading.Event()
        self._may_send = threading.Event()
        self._may_send.set()
        self._lock = threading.Lock()
        self._open = 0
        self._threads = [threading.Thread(target=self._send_all, args=[n]) for n in range(CLIENTS)]

    def __enter__(self) -> Traffic:
        with httpx.Client(trust_env=False, timeout=REQUEST_SECONDS) as client:
            for prompt in PROMPTS:
                if prompt not in self.expected:
                    status, text = ask(client, self._server.url, prompt, False)
                    assert status == 200, text
                    self.expected[prompt] = text
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._may_send.set()
        for thread in self._threads:
            thread.join()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no request is open."""
        self._may_send.clear()
        while self._open:
            time.sleep(0.01)
        yield
        self._may_send.set()

    def _send_all(self, number: int) -> None:
        """One client, with a connection of its own."""
        with httpx.Client(trust_env=False, timeout=REQUEST_SECONDS) as client:
            turn = number
            while not self._is_over.is_set():
                with self._lock:
                    is_open = self._may_send.is_set()
                    self._open += is_open
                if not is_open:
                    time.sleep(0.01)
                    continue
                prompt, turn = PROMPTS[turn % len(PROMPTS)], turn + 1
                status, text = ask(client, self._server.url, prompt, stream=bool(turn % 2))
                with self._lock:
                    self._open -= 1
                    self._count(prompt, status, text)
                if status != 200:
                    time.sleep(0.5)

    def _count(self, prompt: str, status: int, text: str) -> None:
        self._record.requests += 1
        if status == 503:
            self._record.refused += 1
        elif status != 200:
            self._record.lost.append(f"lost: {prompt!r}: {status} {text[:300]}")
        elif text != self.expected[prompt]:
            expected = self.expected[prompt]
            self._record.different.append(f"different: {prompt!r}: {text!r} in place of {expected!r}")


class Prober:
    """Looks at /health, and asks whether it is right, until the context ends."""

    def __init__(self, server: TroubledServer, record: Record, outage: float) -> None:
        """outage: the --unavailable-timeout of the server, in seconds."""
        self._server, self._record, self._outage = server, record, outage
        self._is_over = threading.Event()
        self._last_fault = time.monotonic()
        self._threads = [threading.Thread(target=self._look), threading.Thread(target=self._probe)]

    def __enter__(self) -> Prober:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def note_fault(self) -> None:
        """Something happens to the server now."""
        self._last_fault = time.monotonic()

    def _look(self) -> None:
        """Looks at /health. A 503 is right if the request after it is refused."""
        with httpx.Client(trust_env=False, timeout=REQUEST_SECONDS) as client:
            while not self._is_over.wait(LOOK_SECONDS):
                health = self._health(client)
                self._record.probes += 1
                if health == 200:
                    continue
                if health != 503:
                    self._record.wrong_health.append(f"/health: {health}")
                    continue
                self._record.probes_unavailable += 1
                status, text = ask(client, self._server.url, "hi", False, 4)
                if status == 200 and self._health(client) == 503:
                    self._record.wrong_health.append(f"/health: 503, and a request was answered: {text!r}")

    def _probe(self) -> None:
        """Sends a request where /health says 200, and looks how long it takes."""
        with httpx.Client(trust_env=False, timeout=REQUEST_SECONDS) as client:
            while not self._is_over.wait(LOOK_SECONDS):
                begin = time.monotonic()
                if self._health(client) != 200:
                    continue
                status, text = ask(client, self._server.url, "hi", False, 4)
                seconds = time.monotonic() - max(begin, self._last_fault)
                if status not in (200, 503) or seconds > self._outage + SLACK_SECONDS:
                    why = f"a request took {seconds:.1f} s and got {status} {text[:200]}"
                    self._record.wrong_health.append(f"/health: 200, but {why}")

    def _health(self, client: httpx.Client) -> int:
        try:
            return client.get(f"{self._server.url}/health").status_code
        except httpx.HTTPError:
            return 0
