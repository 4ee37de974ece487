"""Snapshots that queues and workers answer `stats()` with. Counters only grow."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """Of those, pairs whose expert is on this rank too; where ranks share experts, a part of it."""
    shuffled_rows: int = 0
    """Rows of the whole group that were scattered by forecast."""
    kept_rows: int = 0
    """Of those, rows that went where they were expected to be best off; the others had to make room."""


@dataclass(frozen=True)
class PassStats:
    """Passes of one kind over a model that is larger than the fast memory."""

    prefill: bool
    """They had prompts."""
    micro_batches: int
    sequences: int
    passes: int = 0
    cold: int = 0
    """Of them, those that first waited for the experts of their first layer."""
    rows: int = 0
    """Of all these passes, and so below."""
    context: int = 0
    """Tokens that the sequences had in the cache in the end."""
    padding_rows: int = 0
    """Computed beside `rows`."""
    padding_context: int = 0
    """Tokens that attention went over beside `context`."""
    loaded: int = 0
    """Bytes of experts that came to the fast level."""
    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    """Seconds of each lane: fast, slow, down, up, staging."""


@dataclass(frozen=True)
class ExpertStats:
    """An attention worker's dealings with expert servers."""

    calls: int = 0
    pairs: int = 0
    """(row, expert) pairs sent so far, those sent again included."""
    resent_pairs: int = 0
    failovers: int = 0
    """Servers that were lost or given up with rows outstanding."""
    silent_failovers: int = 0
    """Of those, servers given up for their silence; the others' connections broke."""
    false_failovers: int = 0
    """Of those, servers that came back: they had not died."""
    waiting_seconds: float = 0.0
    """Time with nothing to do but wait for experts."""
    layer_pairs: tuple[int, ...] = ()
    """`pairs` of each layer with routed experts, in their order."""
    local_pairs: tuple[int, ...] = ()
    """Of those, pairs sent to the server of the worker's own rank; none where workers have no such server."""
    remote_bytes: int = 0
    """Questions to servers other than the worker's own, and their answers: rows, expert ids, headers."""
    group: GroupStats = GroupStats()
    """Of a worker that is a group of processes."""
    passes: tuple[PassStats, ...] = ()
    """Of a worker whose model is larger than its fast memory."""


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
