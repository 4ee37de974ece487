"""Snapshots that queues and workers answer `stats()` with. Counters only grow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockStats:
    """The KV block pool. total == free + cached + used, always."""

    total: int = 0
    free: int = 0
    """Blocks that hold nothing."""
    cached: int = 0
    """Blocks no request uses, kept for their prefix, evicted when blocks are needed."""
    used: int = 0
    """Blocks that at least one request uses."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache so far."""
    prefix_hits: int = 0
    """Prompt tokens found there so far."""


@dataclass(frozen=True)
class WorkerStats:
    """One attention worker."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    """Rows computed that were prompt (or re-computed) tokens, so far."""
    decode_tokens: int = 0
    """Rows computed that were a generated token, so far."""
    step_seconds: float = 0.0
    """Time spent in steps so far."""
    blocks: BlockStats = BlockStats()
