"""The line about the throughput."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moesaic.core.metrics import BlockStats, WorkerStats
from moesaic.server.async_engine import AsyncEngine
from moesaic.server.throughput import ThroughputLog, log_throughput


def worker(prefill: int, running: int = 0, waiting: int = 0, **blocks: int) -> WorkerStats:
    return WorkerStats(running, waiting, prefill_tokens=prefill, blocks=BlockStats(**blocks))


def test_a_line_has_what_happened_since_the_last_one() -> None:
    log = ThroughputLog()
    assert log.line(100.0, 0, WorkerStats()) is None
    stats = worker(50, 2, 3, num_total=8, num_used=2, num_free=6, prefix_queries=60, prefix_hits=15)
    assert log.line(110.0, 20, stats) == (
        "prompt throughput: 5.0 tokens/s, generation throughput: 2.0 tokens/s, running: 2 requests, "
        "waiting: 3 requests, KV cache usage: 25.0%, prefix cache hit rate: 25.0%"
    )
    stats = worker(50, num_total=8, num_free=8, prefix_queries=60, prefix_hits=15)
    line = log.line(120.0, 21, stats)
    assert line is not None
    assert (
        line.startswith("prompt throughput: 0.0 tokens/s, generation throughput: 0.1") and "hit" not in line
    )
    assert log.line(130.0, 21, stats) is None, "nothing ran in these seconds"


def test_requests_that_wait_are_reported_too() -> None:
    log = ThroughputLog()
    line = log.line(10.0, 0, worker(0, 0, 1))
    assert line is not None and "waiting: 1 requests" in line


def test_counters_of_a_dead_worker_do_not_make_it_negative() -> None:
    log = ThroughputLog()
    log.line(0.0, 10, worker(100, prefix_queries=5, prefix_hits=5))
    line = log.line(10.0, 12, worker(3, 1))
    assert line is not None and line.startswith("prompt throughput: 0.0 tokens/s") and "hit" not in line


def test_it_logs_until_it_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moesaic")
    engine = SimpleNamespace(
        meter=SimpleNamespace(generation_tokens=4), engine=SimpleNamespace(stats=lambda: stats)
    )
    stats: Any = SimpleNamespace(worker=worker(7, 1))
    logging_forever = log_throughput(cast(AsyncEngine, engine), lambda: 1.0, 0.001)
    with contextlib.suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(logging_forever, 0.2))
    assert "running: 1 requests" in caplog.messages[0]
