"""Logs a line every ten seconds while requests run: throughput, requests, KV cache, prefix hits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from moesaic.core.metrics import WorkerStats
from moesaic.server.async_engine import AsyncEngine

LOG = logging.getLogger(__name__)
SECONDS = 10.0
"""Seconds between two lines."""


@dataclass(frozen=True)
class _Counts:
    """Counters at one moment."""

    now: float
    prompt_tokens: int
    generation_tokens: int
    queries: int
    hits: int

    @classmethod
    def from_stats(cls, now: float, generation_tokens: int, worker: WorkerStats) -> _Counts:
        blocks = worker.blocks
        return cls(now, worker.prefill_tokens, generation_tokens, blocks.prefix_queries, blocks.prefix_hits)


class ThroughputLog:
    """Makes the lines from counters that only grow. They also fall, when a worker ends."""

    def __init__(self) -> None:
        self._last = _Counts(0.0, 0, 0, 0, 0)

    def line(self, now: float, generation_tokens: int, worker: WorkerStats) -> str | None:
        """The line for the time since the last call. None if nothing was computed and nothing waits.

        now: seconds on any clock. generation_tokens: tokens generated so far.
        """
        last, self._last = self._last, _Counts.from_stats(now, generation_tokens, worker)
        # Counters fall when a worker ends, and no throughput is negative.
        seconds = max(now - last.now, 1e-9)
        prompt = max(0, self._last.prompt_tokens - last.prompt_tokens)
        tokens = max(0, generation_tokens - last.generation_tokens)
        queries, hits = self._last.queries - last.queries, self._last.hits - last.hits
        if not (prompt or tokens or worker.running or worker.waiting):
            return None
        parts = [
            f"prompt throughput: {prompt / seconds:.1f} tokens/s",
            f"generation throughput: {tokens / seconds:.1f} tokens/s",
            f"running: {worker.running} requests",
            f"waiting: {worker.waiting} requests",
            f"KV cache usage: {100 * worker.blocks.num_used / max(1, worker.blocks.num_total):.1f}%",
        ]
        if queries > 0 <= hits:
            parts.append(f"prefix cache hit rate: {100 * hits / queries:.1f}%")
        return ", ".join(parts)


async def log_throughput(engine: AsyncEngine, clock: Callable[[], float], seconds: float = SECONDS) -> None:
    """Log a line every `seconds` while requests run, until this task is cancelled."""
    log = ThroughputLog()
    log.line(clock(), 0, WorkerStats())  # the first line is then about the time from now on
    while True:
        await asyncio.sleep(seconds)
        line = log.line(clock(), engine.meter.generation_tokens, engine.engine.stats().worker)
        if line is not None:
            LOG.info("%s", line)
