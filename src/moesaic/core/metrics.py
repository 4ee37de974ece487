"""Snapshots of counters that queues and workers return from `stats()`. Counters only grow."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BlockStats:
    """The KV block pool. total == free + cached + used always holds."""

    num_total: int = 0
    num_free: int = 0
    """Blocks whose contents are not needed."""
    num_cached: int = 0
    """Blocks that no request uses. They are kept for their prefix and evicted when blocks are needed."""
    num_used: int = 0
    """Blocks that at least one request uses."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache so far."""
    prefix_hits: int = 0
    """Prompt tokens found in the prefix cache so far."""


@dataclass(frozen=True)
class StateStats:
    """States of linear attention; all 0 for a model without."""

    seats: int = 0
    """Sequences that can run at once."""
    seats_used: int = 0
    pages: int = 0
    """Pages for states. Each sequence that runs has one."""
    pages_free: int = 0
    snapshots: int = 0
    """Pages that are kept of prefixes. pages == pages_free + seats_used + snapshots always holds."""


@dataclass(frozen=True)
class GroupStats:
    """The first rank of a worker that is a group of processes. Byte counters: what it sent to other ranks."""

    all_reduce_bytes: int = 0
    reduce_scatter_bytes: int = 0
    all_gather_bytes: int = 0
    all_to_all_bytes: int = 0
    """Activations, and the answers to them."""
    metadata_bytes: int = 0
    """Data that is sent with the activations, and small numbers about rows that ranks exchange."""
    pairs: int = 0
    """(row, expert) pairs of the rows whose gate ran on this rank."""
    local_pairs: int = 0
    """Pairs whose expert is on this rank too. Where ranks share experts, a fraction of them."""
    shuffled_rows: int = 0
    """Rows of the whole group that were sent to other ranks because of a forecast."""
    kept_rows: int = 0
    """Shuffled rows that went to their forecast rank. The others had to make room."""


@dataclass(frozen=True)
class PassStats:
    """Passes of one kind over a model that is larger than the fast memory."""

    prefill: bool
    """Whether the passes had prompts."""
    micro_batches: int
    sequences: int
    passes: int = 0
    cold: int = 0
    """Passes that began by waiting for the experts of their first layer."""
    rows: int = 0
    """Rows of all these passes. The fields below also cover all of them."""
    context: int = 0
    """Tokens that the sequences had in the cache at the end."""
    padding_rows: int = 0
    """Padding rows that were computed in addition to `rows`."""
    padding_context: int = 0
    """Padding tokens that attention read in addition to `context`."""
    loaded_bytes: int = 0
    """Bytes of experts that were loaded into the fast level."""
    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    """Busy seconds of each lane: fast, slow, down, up, staging."""


@dataclass(frozen=True)
class ResidencyStats:
    """Experts of a process that has only some of them in memory. Counters are those of all steps so far."""

    chosen: int = 0
    """Experts that steps chose, counted once for each step and layer, where experts are loaded by choice."""
    hits: int = 0
    """Experts of these that were in memory already."""
    exchanges: int = 0
    """Times that an expert took the place of one that was chosen less often."""
    loaded_bytes: int = 0
    """Bytes of experts that were read from the slow level, in all steps."""
    held_bytes: int = 0
    """Bytes of experts that were in memory already, of `hits`."""


@dataclass(frozen=True)
class PlanStats:
    """How a worker whose model is larger than its fast memory computes its decode steps."""

    on_demand_steps: int = 0
    """Decode steps so far that loaded only the experts that were chosen."""
    paged_steps: int = 0
    """Decode steps so far that loaded all experts of each layer, in pages."""
    micro_batch: int = 0
    """Requests of a micro-batch now. 0 where the whole model is in memory."""
    listed_experts: int = 0
    """Experts that were in memory at the start because an earlier run had chosen them most often."""
    revisions: int = 0
    """Times that the plan was revised because the load had changed."""
    resident_experts: int = 0
    """Experts of each layer that may stay in memory now. 0 where the whole model is in memory."""
    divisions: int = 0
    """Times that memory was divided anew between experts and KV cache because the load had changed."""


@dataclass(frozen=True)
class PaceStats:
    """The runs of a process that takes as long as a modelled device (`core.paced_devices`)."""

    runs: int = 0
    """Runs so far. 0 without --paced."""
    late: int = 0
    """Runs that took longer here than on the modelled device."""


@dataclass(frozen=True)
class ExpertStats:
    """An attention worker's use of expert servers."""

    calls: int = 0
    pairs: int = 0
    """(row, expert) pairs sent so far, including those sent again."""
    resent_pairs: int = 0
    failovers: int = 0
    """Servers that were lost or given up while pairs were outstanding."""
    silent_failovers: int = 0
    """Failovers because of a timeout. The others were broken connections."""
    false_failovers: int = 0
    """Servers that were given up because of a timeout and came back, so they had not died."""
    waiting_seconds: float = 0.0
    """Time in which the worker could only wait for experts."""
    layer_pairs: tuple[int, ...] = ()
    """`pairs` of each layer with routed experts, in order of the layers."""
    local_pairs: tuple[int, ...] = ()
    """Pairs of each layer sent to the server of the worker's own rank.

    Empty where workers have no such server.
    """
    remote_bytes: int = 0
    """Bytes of requests to servers other than the worker's own, and of their answers: rows, expert ids,
    headers.
    """
    far_bytes: int = 0
    """The part of `remote_bytes` that went to servers of other hosts, or came from there."""
    group: GroupStats = GroupStats()
    """Counters of a worker that is a group of processes."""
    passes: tuple[PassStats, ...] = ()
    """Counters of a worker whose model is larger than its fast memory."""
    residency: ResidencyStats = ResidencyStats()
    plan: PlanStats = PlanStats()
    pace: PaceStats = PaceStats()


@dataclass(frozen=True)
class ExpertServerStats:
    """The counters of an expert server."""

    clients: int = 0
    waiting_pairs: int = 0
    """(row, expert) pairs that arrived and were not computed yet."""
    pairs: int = 0
    """Pairs computed so far."""
    runs: int = 0
    expert_runs: int = 0
    """Experts whose weights were read so far, counted once for each run that used them."""
    busy_seconds: float = 0.0
    residency: ResidencyStats = ResidencyStats()
    pace: PaceStats = PaceStats()


@dataclass(frozen=True)
class SpeculationStats:
    """Drafted tokens; all 0 where none are drafted."""

    drafts: int = 0
    """Checks so far, of one request's drafted tokens each."""
    draft_tokens: int = 0
    """Drafted tokens that were checked so far."""
    accepted_tokens: int = 0
    """Drafted tokens that were right, as were all before them in their draft."""
    accepted_per_pos: tuple[int, ...] = ()
    """accepted_tokens by their place in the draft."""
    prices: tuple[float, ...] = ()
    """Prices of steps of 1, 2, .. rows, over that of one row. Of several workers it is the sum."""


@dataclass(frozen=True)
class TransferStats:
    """KV that prefill workers sent to other workers; all 0 without prefill workers."""

    sent_requests: int = 0
    """Requests whose KV was sent so far."""
    sent_bytes: int = 0
    sent_seconds: float = 0.0
    """Seconds from a piece of KV to the answer that it has arrived, added up over pieces that are not
    early."""
    early_bytes: int = 0
    """Bytes of `sent_bytes` that left before the end of the step that computed them. Their seconds say
    little, since they share the step's cores."""
    received_requests: int = 0
    """Requests that went on with KV that was received."""
    received_tokens: int = 0
    """Tokens of these requests whose KV was not computed again."""
    failed_transfers: int = 0
    """Transfers that ended with a broken connection."""
    held_bytes: int = 0
    """Bytes that were received for requests that were not admitted yet. Not a counter."""


@dataclass(frozen=True)
class StoredPrefixStats:
    """KV of prefixes on the disk; all 0 without --prefix-cache-dir."""

    read_tokens: int = 0
    """Prompt tokens whose KV was read from the disk so far."""
    read_bytes: int = 0
    written_bytes: int = 0
    dropped_blocks: int = 0
    """KV blocks that were not written: their memory was needed too soon, or the disk was full or failed."""
    damaged_entries: int = 0
    """Files that were not what their names say. They were removed, and the KV was computed."""


@dataclass(frozen=True)
class WorkerStats:
    """The counters of an attention worker."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    """Steps so far, or runs of a segment where rows may go on alone."""
    partial_runs: int = 0
    """Runs of them that computed only some of the rows in flight, while others were with experts."""
    preemptions: int = 0
    prefill_tokens: int = 0
    """Rows computed so far that were prompt tokens, or tokens computed again."""
    decode_tokens: int = 0
    """Rows computed so far that were a generated or a drafted token."""
    step_seconds: float = 0.0
    """Seconds spent in steps so far."""
    blocks: BlockStats = BlockStats()
    states: StateStats = StateStats()
    experts: ExpertStats = ExpertStats()
    speculation: SpeculationStats = SpeculationStats()
    transfers: TransferStats = TransferStats()
    stored_prefixes: StoredPrefixStats = StoredPrefixStats()
