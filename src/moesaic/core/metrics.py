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
class GroupStats:
    """The first rank of a worker that is a group of processes. Bytes: what it sent to other ranks."""

    all_reduce_bytes: int = 0
    reduce_scatter_bytes: int = 0
    all_gather_bytes: int = 0
    all_to_all_bytes: int = 0
    """Activations there, and answers back."""
    metadata_bytes: int = 0
    """What goes with the activations, and what ranks tell each other about rows."""
    pairs: int = 0
    """(row, expert) pairs of the rows that were gated on this rank."""
    local_pairs: int = 0
    """Of those, pairs whose expert is on this rank too."""
    shuffled_rows: int = 0
    """Rows of the whole group that were scattered by forecast."""
    kept_rows: int = 0
    """Of those, rows that went where they were expected to be best off; the others had to make room."""


@dataclass(frozen=True)
class ExpertStats:
    """An attention worker's dealings with expert servers."""

    calls: int = 0
    pairs: int = 0
    """(row, expert) pairs sent so far, those sent again included."""
    resent_pairs: int = 0
    failovers: int = 0
    """Servers that were lost or given up with rows outstanding."""
    false_failovers: int = 0
    """Of those, servers that had not died."""
    waiting_seconds: float = 0.0
    """Time with nothing to do but wait for experts."""
    layer_pairs: tuple[int, ...] = ()
    """`pairs` of each layer with routed experts, in their order."""
    local_pairs: tuple[int, ...] = ()
    """Of those, pairs sent to the server of the worker's own rank; none where workers have no such server."""
    group: GroupStats = GroupStats()
    """Of a worker that is a group of processes."""


@dataclass(frozen=True)
class ExpertServerStats:
    """One expert server."""

    clients: int = 0
    waiting_pairs: int = 0
    """(row, expert) pairs that came in and were not computed yet."""
    pairs: int = 0
    """Pairs computed so far."""
    runs: int = 0
    expert_runs: int = 0
    """Experts whose weights were read so far, once for each run they were in."""
    busy_seconds: float = 0.0


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
    experts: ExpertStats = ExpertStats()
