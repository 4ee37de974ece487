"""The events that a scheduler handles, and the actions that it returns to an executor.

A worker's loop: an event arrives, `scheduler.handle(event, now)` returns actions, and the executor carries
them out in order. Each `RunStep` is answered with the event `StepDone`, or with `StepFailed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moesaic.core.metrics import WorkerStats
from moesaic.core.offload import Division, ExpertReads
from moesaic.core.request import FinishReason, Request
from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.policy.scheduling.stored_prefixes import PrefixChanges

# ---- events: what happened


@dataclass(frozen=True)
class RequestsArrived:
    """Requests arrived, in this order."""

    requests: list[Request]
    generated_ids: list[list[int]] = field(default_factory=list)
    """Tokens that each request already got from another worker. May be shorter than `requests`."""
    received_tokens: dict[int, int] = field(default_factory=dict)
    """Request -> how many of its tokens have KV that another worker sent here. Not listed: none."""
    disk_tokens: dict[int, int] = field(default_factory=dict)
    """Request -> how many of its first tokens seem to have KV on the disk. Not listed: none."""

    def extend(self, arrivals: RequestsArrived) -> None:
        """Append requests that arrived right after these."""
        if arrivals.generated_ids:
            self.generated_ids.extend([] for _ in range(len(self.requests) - len(self.generated_ids)))
            self.generated_ids.extend(arrivals.generated_ids)
        self.requests.extend(arrivals.requests)
        self.received_tokens.update(arrivals.received_tokens)
        self.disk_tokens.update(arrivals.disk_tokens)


@dataclass(frozen=True)
class RequestsCancelled:
    """The clients of these requests do not wait any more. Unknown ids are ignored."""

    request_ids: list[int]


@dataclass(frozen=True)
class StepDone:
    """The step ran: its rows are in the KV cache of every layer."""

    step: int
    tokens: IntArray
    """[t] the new tokens of each entry of StepPlan.sampled, entry after entry; NO_TOKEN ends its request."""
    counts: IntArray | None = None
    """[p] how many of the tokens each entry has: its drafted tokens up to the first wrong one, and one more.
    None: one each."""
    proposed_tokens: IntArray | None = None
    """[p] the token that may follow the new ones of each entry. None: the model proposes none."""
    expert_reads: ExpertReads | None = None
    """What reading experts costs now. None: it was not measured anew."""


@dataclass(frozen=True)
class StepFailed:
    """The step was stopped by an error or an interrupt. What it wrote is void."""

    step: int


@dataclass(frozen=True)
class SegmentDone:
    """The rows of the run are in the KV cache of its layers, and their experts were requested."""

    run: int


@dataclass(frozen=True)
class PartsArrived:
    """Experts answered for these (row, slot) pairs of runs."""

    parts: list[tuple[int, IntArray]]
    """[(run, its pairs), ...]."""


@dataclass(frozen=True)
class BarrierPassed:
    """Every attention worker has arrived at the barrier, and at least one has work. All begin a step now."""


@dataclass(frozen=True)
class PrefixRead:
    """Stored KV was read into the blocks of a request, as far as it was there and whole."""

    request_id: int
    num_blocks: int
    """How many blocks were read, from `ReadPrefix.first_block` on."""


Event = (
    RequestsArrived
    | RequestsCancelled
    | StepDone
    | StepFailed
    | SegmentDone
    | PartsArrived
    | BarrierPassed
    | PrefixRead
)

# ---- actions: what the executor does


@dataclass(frozen=True)
class StepPlan:
    """A step: the rows to compute, their requests, and the rows whose logits are wanted."""

    step: int
    """Number of the step, counted up from 0."""
    batch: TokenBatch
    request_ids: IntArray
    """[s] request of each sequence of the batch."""
    epochs: IntArray
    """[s] how often each request was preempted. Rows of an older epoch are void."""
    sampled_sequences: IntArray
    """[p] sequences (indices into s) whose last row is their newest token. They get a next token."""
    scored_sequences: IntArray
    """[q] sequences whose rows in this step are prompt tokens with wanted log-probabilities.

    The row at position p scores prompt token p + 1, so the last row of a prompt scores nothing. All rows of
    these sequences are in batch.logit_rows. Over the life of a request each row is scored once. So rows that
    are computed again after a preemption are not listed again, but rows of a failed step are.
    """
    num_draft_tokens: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[p] how many of the last rows of each entry of `sampled` are drafted tokens. The row before them is
    that of its newest token. Empty if no entry has any."""
    following: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[s] the token after the last row of each sequence; NO_TOKEN where it is to be sampled."""

    @property
    def sample_rows(self) -> IntArray:
        """[p + drafts] the rows from which tokens may be sampled, entry after entry."""
        return sample_rows(self.batch.query_starts, self.sampled_sequences, self.num_draft_tokens)


def sample_rows(query_starts: IntArray, sampled_sequences: IntArray, num_draft_tokens: IntArray) -> IntArray:
    """The last 1 + drafted[i] rows of each sequence sampled[i]. num_draft_tokens: [p], or empty for zeros.

    >>> sample_rows(np.array([0, 3, 4]), np.array([0, 1]), np.array([1, 0])).tolist()
    [1, 2, 3]
    """
    last = query_starts[sampled_sequences + 1] - 1
    if not len(num_draft_tokens):
        return last
    lengths = num_draft_tokens + 1
    offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths), lengths)  # from -length to -1
    rows: IntArray = np.repeat(last, lengths) + 1 + offsets
    return rows


@dataclass(frozen=True)
class Admit:
    """These requests join the batch, for the first time or after a preemption.

    The executor keeps what sampling needs for them until `Release`.
    """

    requests: list[Request]
    generated_ids: list[list[int]]
    """Tokens that each request has generated. Empty at the first admission."""
    queue_seconds: list[float]
    cached_tokens: list[int]
    """Tokens of each request whose KV comes from the prefix cache."""
    epochs: list[int]
    """How often each request was preempted, 0 at the first admission."""


@dataclass(frozen=True)
class Restore:
    """Write the KV that another worker sent into the blocks of a request that was just admitted.

    It comes after the request's Admit and before the first of its rows.
    """

    request_id: int
    tokens: range
    """Positions that are written. Those before them came from the prefix cache."""
    blocks: IntArray
    """[b] the request's blocks, from position 0 on."""
    states: tuple[int, ...]
    """The request's line of TokenBatch.states. Its page to write and its seat are written. () without
    states."""


@dataclass(frozen=True)
class ReadPrefix:
    """Read stored KV into the blocks of a request. Answered with PrefixRead.

    The request's Admit comes after the answer, and so do its first rows.
    """

    request_id: int
    first_block: int
    """The first block that is read, counted from the request's first one."""
    blocks: IntArray
    """[b] the blocks that are written."""
    states: tuple[int, ...] = ()
    """The request's line of TokenBatch.states. Its page to write gets the state at the end of the blocks. ()
    without states."""


@dataclass(frozen=True)
class KeepPrefixes:
    """Store these blocks, if they are not stored yet. Nothing answers.

    It comes before every action that writes to one of the evicted blocks.
    """

    changes: PrefixChanges


@dataclass(frozen=True)
class Divide:
    """Divide the memory anew between experts and KV blocks. Nothing answers.

    No step runs, and no request uses a block that leaves. It comes before every action that writes to a block
    that is new.
    """

    division: Division


@dataclass(frozen=True)
class RunStep:
    """Compute this step. Answered with StepDone or StepFailed."""

    plan: StepPlan


@dataclass(frozen=True)
class RunSegment:
    """Compute one segment of the model for rows that wait at it.

    A model with m layers of routed experts has segments 0 to m. Segment i < m begins after the experts of the
    routed layer before it. It ends with the gate of routed layer i and requests that layer's experts. Segment
    m begins after the last experts and ends with the sampler. Answered with SegmentDone, at segment m with
    StepDone, and with StepFailed when it was stopped.
    """

    plan: StepPlan
    """The rows. Its step number is the number of the run."""
    segment: int
    sources: list[RowSource]
    """Where the rows come from, in their order. Empty at segment 0, where rows begin as token ids."""


@dataclass(frozen=True)
class RowSource:
    """Rows start : stop of an earlier run, whose experts have answered for them."""

    run: int
    start: int
    stop: int


@dataclass(frozen=True)
class EnterBarrier:
    """Report that this worker is at the beginning of a step. Answered once, with BarrierPassed."""

    work: bool
    """Whether the worker has rows to compute. The action is repeated when this becomes true."""


@dataclass(frozen=True)
class Forget:
    """Release the memory of these runs. Their rows and answers are not needed any more."""

    runs: list[int]


@dataclass(frozen=True)
class Emit:
    """Report new tokens of the finished step to the engine. Parallel lists.

    A request may have several tokens, which are in their order.
    """

    request_ids: list[int]
    tokens: list[int]
    samples: list[int]
    """Index of each token into the step's StepDone.tokens, which also gives its log-probabilities."""
    finish: list[FinishReason | None]
    step: int = field(default=0, compare=False)
    """The step that sampled the tokens."""

    def add(self, request_id: int, token: int, sample: int, finish: FinishReason | None) -> None:
        """Append one token."""
        self.request_ids.append(request_id)
        self.tokens.append(token)
        self.samples.append(sample)
        self.finish.append(finish)


@dataclass(frozen=True)
class Release:
    """Drop the state of these requests. They ended, were cancelled or were preempted.

    Each Release follows an Admit, so requests that are cancelled while they wait are not listed. It comes
    after the Emit of a request's last token. It never names a request whose rows are being computed.
    """

    request_ids: list[int]
    is_preemption: bool = field(default=False, compare=False)
    """Whether the requests are admitted again later, unless they are cancelled before."""


Action = (
    Admit
    | Restore
    | ReadPrefix
    | KeepPrefixes
    | Divide
    | RunStep
    | RunSegment
    | EnterBarrier
    | Forget
    | Emit
    | Release
)


class Scheduler(Protocol):
    """Decides what a worker runs. It is deterministic: equal events at equal times give equal actions."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle an event and return the actions to carry out. `now` is in seconds and never decreases."""
        ...

    def stats(self) -> WorkerStats: ...
