"""Sends requests at their times and records the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from moesaic.core.errors import MoesaicError
from moesaic.jobs.bench.workload import Item
from moesaic.server.client import Chunk, Client

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]
Body = Callable[[Item], dict[str, object]]
"""Makes the body that is posted for an item."""


@dataclass
class Outcome:
    """The result of one request. Times are in seconds."""

    send_time: float = 0.0
    """Time at which it was sent, on the clock."""
    ttft: float = 0.0
    """Time to the first text."""
    latency: float = 0.0
    """Time to the last event that brought text or the end."""
    gaps: list[float] = field(default_factory=list)
    """Times between two events with text."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    """A line about the failure of the request, or None. After a failure only `send_time` is valid."""
    cached_tokens: int | None = None
    """Prompt tokens whose KV the server already had. None: it does not say."""
    content: str = ""
    """The answer without its reasoning."""

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 if there is no second token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


async def send(client: Client, path: str, body: dict[str, object], clock: Clock) -> Outcome:
    """Send one streamed request. Its errors are part of the outcome."""
    outcome = Outcome(send_time=clock())
    recorder = _LatencyRecorder(outcome)
    try:
        async for chunk in client.stream(path, body):
            recorder.take(chunk)
    except MoesaicError as error:
        outcome.error = str(error)
    else:
        recorder.finish()
    return outcome


class _LatencyRecorder:
    """Turns the chunks of an answer into an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._last: float | None = None
        """Time of the last text."""
        self._contents: list[str] = []
        self._usage = False
        self._has_ended = False

    def take(self, chunk: Chunk) -> None:
        outcome = self._outcome
        if chunk.text:
            self._contents.append(chunk.content)
            if self._last is None:
                outcome.ttft = chunk.arrival_time - outcome.send_time
            else:
                outcome.gaps.append(chunk.arrival_time - self._last)
            self._last = chunk.arrival_time
        if chunk.text or chunk.finish_reason:
            outcome.latency = chunk.arrival_time - outcome.send_time
        self._has_ended = self._has_ended or chunk.finish_reason is not None
        if chunk.usage is not None:
            self._usage = True
            outcome.prompt_tokens = chunk.usage.prompt_tokens
            outcome.output_tokens = chunk.usage.completion_tokens
            outcome.cached_tokens = chunk.usage.cached_tokens

    def finish(self) -> None:
        """The stream ended without an error. The answer may still be incomplete."""
        self._outcome.content = "".join(self._contents)
        if not self._has_ended and self._last is None:
            self._outcome.error = "the stream ended without an answer"
        # Without counts the number of tokens is not known: an event may bring several.
        elif not self._usage:
            self._outcome.error = "the server sends no token counts (stream_options.include_usage)"
        elif self._last is None:  # tokens without text, such as a lone end-of-sequence token
            self._outcome.ttft = self._outcome.latency


@dataclass
class Load:
    """Sends items and counts the requests in flight.

    on_outcome: called after each request with its outcome.
    """

    client: Client
    path: str
    body: Body
    clock: Clock
    sleep: Sleep
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    peak: int = 0
    """Maximum number of requests in flight at once."""
    _flying: int = 0

    async def run(self, items: Sequence[Item], max_concurrency: int | None = None) -> list[Outcome]:
        """Send all items. Returns their outcomes in the order of the items, which is that of arrival."""
        limit = asyncio.Semaphore(max_concurrency or max(1, len(items)))
        start = self.clock()
        tasks: list[asyncio.Task[Outcome]] = []
        async with asyncio.TaskGroup() as group:
            for item in items:
                wait = start + item.arrival - self.clock()
                if wait > 0:
                    await self.sleep(wait)
                tasks.append(group.create_task(self._send_item(item, limit)))
        return [task.result() for task in tasks]

    async def _send_item(self, item: Item, limit: asyncio.Semaphore) -> Outcome:
        async with limit:
            self._flying += 1
            self.peak = max(self.peak, self._flying)
            try:
                outcome = await send(self.client, self.path, self.body(item), self.clock)
            finally:
                self._flying -= 1
        self.on_outcome(outcome)
        return outcome
