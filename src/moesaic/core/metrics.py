"""Statistics of queues and workers: the snapshots that `stats()` returns. Counters never decrease."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BlockStats:
    """The pool of KV blocks. total == free + cached + used at every moment."""

    total: int = 0
    free: int = 0
    """Blocks without content."""
    cached: int = 0
    """Blocks that no request uses, kept for their prefix. They are evicted when blocks are needed."""
    used: int = 0
    """Blocks that at least one request uses."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache so far."""
    prefix_hits: int = 0
    """Prompt tokens found there so far."""


@dataclass(frozen=True)
class GroupStats:
    """The collectives of a group of processes, as its first rank counts them: bytes sent to other ranks."""

    all_reduce_bytes: int = 0
    reduce_scatter_bytes: int = 0
    all_gather_bytes: int = 0
    all_to_all_bytes: int = 0
    """Activations sent to experts, and their answers."""
    metadata_bytes: int = 0
    """Bytes that describe activations, and that ranks exchange about rows."""
    pairs: int = 0
    """(row, expert) pairs of the rows that this rank routed."""
    local_pairs: int = 0
    """Those of the pairs whose expert is on this rank too; if ranks share experts, a part of it."""
    shuffled_rows: int = 0
    """Rows of the whole group that were sent to a predicted rank."""
    kept_rows: int = 0
    """Those of them that stayed on the predicted rank. The others moved to keep shards equal."""


@dataclass(frozen=True)
class PassStats:
    """Passes of one kind over a model that is larger than the fast memory."""

    prefill: bool
    """True: passes with prompts."""
    micro_batches: int
    sequences: int
    passes: int = 0
    cold: int = 0
    """Passes that first waited for the experts of their first layer."""
    rows: int = 0
    """Rows computed in all these passes."""
    context: int = 0
    """Tokens in the cache of the sequences at the end of the passes."""
    padding_rows: int = 0
    """Padding rows computed besides `rows`."""
    padding_context: int = 0
    """Padding tokens that attention read besides `context`."""
    loaded: int = 0
    """Bytes of experts loaded to the fast level."""
    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    """Busy seconds of each lane: fast, slow, down, up, staging."""


@dataclass(frozen=True)
class ExpertStats:
    """An attention worker's calls to expert servers."""

    calls: int = 0
    pairs: int = 0
    """(row, expert) pairs sent so far, including pairs that were sent again."""
    resent_pairs: int = 0
    failovers: int = 0
    """Servers that were lost or given up while rows were outstanding."""
    silent_failovers: int = 0
    """Those of them that did not answer in time; the connections of the others broke."""
    false_failovers: int = 0
    """Those of them that had not died: they answered later."""
    waiting_seconds: float = 0.0
    """Seconds in which the worker only waited for experts."""
    layer_pairs: tuple[int, ...] = ()
    """`pairs` of each layer with routed experts, in the order of the layers."""
    local_pairs: tuple[int, ...] = ()
    """Pairs of each layer that went to the server of the worker's own rank; empty without such a server."""
    remote_bytes: int = 0
    """Bytes exchanged with servers other than the worker's own: rows, expert ids, headers."""
    group: GroupStats = GroupStats()
    """Collectives, if the worker is a group of processes."""
    passes: tuple[PassStats, ...] = ()
    """Passes, if the model is larger than the fast memory."""


@dataclass(frozen=True)
class ExpertServerStats:
    """Statistics of one expert server."""

    clients: int = 0
    waiting_pairs: int = 0
    """(row, expert) pairs that have arrived and are not computed yet."""
    pairs: int = 0
    """Pairs computed so far."""
    runs: int = 0
    expert_runs: int = 0
    """Number of times that an expert's weights were read: once for each batch with the expert."""
    busy_seconds: float = 0.0


@dataclass(frozen=True)
class WorkerStats:
    """Statistics of one attention worker."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    """Rows of prompt tokens computed so far, including those computed again."""
    decode_tokens: int = 0
    """Rows of generated tokens computed so far."""
    step_seconds: float = 0.0
    """Time spent in steps so far."""
    blocks: BlockStats = BlockStats()
    experts: ExpertStats = ExpertStats()
