"""The words between a scheduler and the executor that carries its decisions out.

A worker's loop is: an event arrives, `scheduler.handle(event, now)` returns actions, the executor
carries them out in order. Carrying out `RunStep` ends in a `StepDone` event, or in `StepFailed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from moesaic.core.metrics import WorkerStats
from moesaic.core.request import FinishReason, Request
from moesaic.core.tokens import IntArray, TokenBatch

# ---- events: what happened


@dataclass(frozen=True)
class Arrived:
    """Requests came in, in order of arrival."""

    requests: list[Request]
    generated: list[list[int]] = field(default_factory=list)
    """Tokens that each got from a worker that died; shorter than `requests` where the rest got none."""

    def extend(self, later: Arrived) -> None:
        """These came right after."""
        if later.generated:
            self.generated.extend([] for _ in range(len(self.requests) - len(self.generated)))
            self.generated.extend(later.generated)
        self.requests.extend(later.requests)


@dataclass(frozen=True)
class Cancelled:
    """Nobody waits for these requests any more. Unknown ids are ignored."""

    request_ids: list[int]


@dataclass(frozen=True)
class StepDone:
    """The step ran: its rows are in the KV cache of every layer."""

    step: int
    tokens: IntArray
    """[p] the sampled token of each entry of StepPlan.sampled."""


@dataclass(frozen=True)
class StepFailed:
    """The step broke off, by an error or an interrupt: what it wrote counts for nothing."""

    step: int


@dataclass(frozen=True)
class SegmentDone:
    """The layer run's rows are in the KV cache of its layers; its experts are asked."""

    run: int


@dataclass(frozen=True)
class PartsArrived:
    """Experts answered: these (row, rank) pairs of layer runs are there."""

    parts: list[tuple[int, IntArray]]
    """(run, its pairs)"""


@dataclass(frozen=True)
class BarrierPassed:
    """Every attention worker is at the beginning of a step, and some have work: all begin now."""


Event = Arrived | Cancelled | StepDone | StepFailed | SegmentDone | PartsArrived | BarrierPassed

# ---- actions: what is to be done


@dataclass(frozen=True)
class StepPlan:
    """One step: which rows are computed, for whom, and whose logits are wanted."""

    step: int
    """Counts up from 0."""
    batch: TokenBatch
    request_ids: IntArray
    """[s] request of each sequence of the batch."""
    epochs: IntArray
    """[s] how often each was preempted: rows of an older epoch are void."""
    sampled: IntArray
    """[p] sequences (indices into s) whose last row is the newest token: they get a next token."""
    scored: IntArray
    """[q] sequences whose rows in this step are prompt tokens with wanted log-probabilities.

    The row at position p scores prompt token p + 1, so the prompt's last row, if it is among them,
    scores none. All their rows are in batch.logit_rows. Over a request's life each row is scored once:
    rows computed again after a preemption are not in here a second time (those of a failed step are).
    """


@dataclass(frozen=True)
class Admit:
    """These requests enter the batch, for the first time or after a preemption.

    The executor keeps what sampling needs of them until `Release`.
    """

    requests: list[Request]
    generated: list[list[int]]
    """Tokens each has generated already (empty at first, not so after a preemption)."""
    queue_seconds: list[float]
    cached_tokens: list[int]
    """Tokens whose KV is reused from the prefix cache."""
    epochs: list[int]
    """0 at the first admission."""


@dataclass(frozen=True)
class RunStep:
    """Compute this and answer with StepDone."""

    plan: StepPlan


@dataclass(frozen=True)
class RunSegment:
    """Compute part of the model for rows that wait at one segment of it.

    Place i < m, of m layers with routed experts, goes from the experts before to the gate of the i-th such
    layer and asks its experts; segment m goes from the last experts to the sampler. Answered with
    SegmentDone, or, at segment m, with StepDone; with StepFailed when it broke off.
    """

    plan: StepPlan
    """Its number is the run's."""
    segment: int
    sources: list[RowSource]
    """Where the rows are, in their order; empty at segment 0, where they begin as tokens."""


@dataclass(frozen=True)
class RowSource:
    """Rows start : stop of an earlier run, whose experts have answered for them."""

    run: int
    start: int
    stop: int


@dataclass(frozen=True)
class EnterBarrier:
    """Say that this worker is at the beginning of a step. Answered with Entered, once."""

    work: bool
    """Whether it has rows to compute. Said again when that becomes true."""


@dataclass(frozen=True)
class Forget:
    """Nothing of these runs is needed any more."""

    runs: list[int]


@dataclass(frozen=True)
class Emit:
    """Tell the engine about new tokens of the step just done. Parallel lists."""

    request_ids: list[int]
    tokens: list[int]
    samples: list[int]
    """Index of each into the step's StepPlan.sampled (where its log-probabilities lie)."""
    finish: list[FinishReason | None]
    step: int = field(default=0, compare=False)
    """The one they were sampled in."""

    def add(self, request_id: int, token: int, sample: int, finish: FinishReason | None) -> None:
        """One more."""
        self.request_ids.append(request_id)
        self.tokens.append(token)
        self.samples.append(sample)
        self.finish.append(finish)


@dataclass(frozen=True)
class Release:
    """Drop what is kept for these requests: they ended, were cancelled or preempted.

    It pairs with Admit: requests cancelled while they wait are not in here. It follows the Emit of a
    request's last token, and never names a request whose rows are in a step under way.
    """

    request_ids: list[int]
    preempted: bool = field(default=False, compare=False)
    """They come again, unless they are cancelled meanwhile."""


Action = Admit | RunStep | RunSegment | EnterBarrier | Forget | Emit | Release


class Scheduler(Protocol):
    """A pure object: the same events at the same times give the same actions."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """`now` is in seconds and never decreases."""
        ...

    def stats(self) -> WorkerStats: ...
