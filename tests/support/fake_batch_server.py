"""A server that answers at once, late or not at all, as an ASGI application."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.jobs.batch.local import ModelService
from moesaic.server.client import Client

Answer = tuple[int, dict[str, Any], dict[str, str]]


def completion(body: dict[str, Any]) -> Answer:
    """A success whose text repeats the request."""
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    text = f"<{body.get('prompt')}>" + "x" * int(body.get("size", 0))
    return 200, {"model": "fake", "choices": [{"index": 0, "text": text}], "usage": usage}, {}


def refusal(status: int, code: str, **headers: str) -> Answer:
    message = f"refused with {code}"
    return status, {"error": {"message": message, "type": "x", "param": None, "code": code}}, headers


@dataclass
class FakeServer:
    """answer: body -> (status, JSON, headers). delay: seconds. most: so many requests are answered, and the
    others wait for ever. A body may name a number of other requests that come before it."""

    answer: Callable[[dict[str, Any]], Answer] = completion
    delay: float = 0.0
    most: float = math.inf
    seen: Counter[str] = field(default_factory=Counter)
    """Prompts that were asked for -> how often."""
    let: int = 0
    """Requests that are or were about to be answered."""
    answered: int = 0
    turn: asyncio.Condition = field(default_factory=asyncio.Condition)
    """The condition on which requests wait until others are answered."""
    flying: int = 0
    peak: int = 0
    started: int = 0
    """How often the service was started."""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        self.seen[str(body.get("prompt"))] += 1
        self.flying += 1
        self.peak = max(self.peak, self.flying)
        try:
            await asyncio.sleep(self.delay)
            async with self.turn:
                await self.turn.wait_for(
                    lambda: self.answered >= body.get("after", 0) and self.let < self.most
                )
                self.let += 1
        finally:
            self.flying -= 1
        async with self.turn:
            self.answered += 1
            self.turn.notify_all()
        status, answer, headers = self.answer(body)
        pairs = [(name.lower().replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        pairs.append((b"x-request-id", b"req-1"))
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ModelService]:
        self.started += 1
        yield ModelService(Client(app=self))


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    asked = {"model": "fake", "prompt": f"p-{custom_id}"} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": asked})


def write_input(path: Path, count: int, **body: Any) -> list[str]:
    """Writes `count` good lines. Returns their ids."""
    ids = [f"id-{number}" for number in range(count)]
    path.write_text("".join(line(custom_id, **body) + "\n" for custom_id in ids))
    return ids


def results(path: Path) -> list[dict[str, Any]]:
    """Every line of the output. Each must be a whole line."""
    raw = path.read_bytes()
    assert raw == b"" or raw.endswith(b"\n")
    return [json.loads(part) for part in raw.split(b"\n")[:-1]]
