"""The scheduler of a worker that runs the whole model step by step, layer after layer.

Actions come in an order in which they can be carried out:

    Emit      the tokens of the finished step
    Release   requests that ended, were cancelled, or were preempted to make room
    Divide    the memory, where experts are in it too
    Admit     requests that join the next step
    RunStep   the next step

While a step runs, arrivals wait and cancelled requests keep their blocks. Memory that a running step reads or
writes is never allocated to another request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moesaic.core.metrics import WorkerStats
from moesaic.core.offload import BlockNeeds, Division, ExpertReads
from moesaic.policy.scheduling.batching import BatchLimits, Chunk, ContinuousBatching
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.prompt_rows import PromptRows
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Divide,
    Event,
    PrefixRead,
    Release,
    RequestsArrived,
    RequestsCancelled,
    RunStep,
    StepDone,
    StepFailed,
    StepPlan,
)
from moesaic.policy.scheduling.schedulers.landing import land
from moesaic.policy.scheduling.schedulers.step_plan import (
    admit,
    keep_prefixes,
    plan_reads,
    plan_step,
)
from moesaic.policy.scheduling.sequence import Stage
from moesaic.policy.scheduling.speculation import Speculation

TOKENS_AHEAD = 128
"""Further tokens for which running requests have room where memory is divided anew between steps."""


class Divider(Protocol):
    """Divides memory between KV blocks and experts; `policy.offloading.dividing` has one."""

    @property
    def division(self) -> Division: ...

    def learn(self, reads: ExpertReads) -> None: ...

    def choose(self, now: float, needs: BlockNeeds) -> Division: ...


@dataclass(frozen=True)
class _Flight:
    """A step that is being computed."""

    plan: StepPlan
    chunks: list[Chunk]
    start_time: float


class LockstepScheduler:
    """A Scheduler that gives each step all rows of the worker's batch. When no step runs, no request waits.

    With remote experts this is the lockstep schedule: the worker's whole batch goes through layer after
    layer. With two steps in flight, each has half of the rows. One computes while the other waits for its
    experts (double batching in Expert-as-a-Service).
    """

    def __init__(
        self,
        limits: BatchLimits,
        blocks: KVBlocks,
        inflight: int = 1,
        speculation: Speculation | None = None,
        prompt_rows: PromptRows | None = None,
        divider: Divider | None = None,
    ) -> None:
        """inflight: number of steps that run at once. speculation, prompt_rows: see ContinuousBatching.

        divider: divides memory anew whenever no step runs. None: the blocks stay as many as they are.
        """
        self._batching = ContinuousBatching(limits, blocks, speculation, prompt_rows)
        self._blocks = blocks
        self._inflight = inflight
        self._divider = divider
        self._flights: dict[int, _Flight] = {}
        self._next_number = 0
        self._steps = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0
        self._step_seconds = 0.0

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case RequestsArrived():
                self._batching.add_all(event, now)
                actions: list[Action] = []
            case RequestsCancelled(request_ids):
                actions = self._cancel(request_ids)
            case StepDone():
                actions = self._step_done(event, now)
            case StepFailed(step):
                actions = self._step_failed(step)
            case PrefixRead(request_id, num_blocks):
                self._batching.record_prefix(request_id, num_blocks)
                actions = []
            case _:
                raise ValueError(f"{event} is not an event of this scheduler")
        actions += self._next_steps(now)
        return keep_prefixes(self._blocks) + actions

    def stats(self) -> WorkerStats:
        return WorkerStats(
            running=len(self._batching.running),
            waiting=len(self._batching.waiting),
            steps=self._steps,
            preemptions=self._batching.preemptions,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            step_seconds=self._step_seconds,
            blocks=self._blocks.stats(),
            states=self._blocks.state_stats(),
            speculation=self._batching.speculation.stats(),
        )

    # ---- events

    def _cancel(self, request_ids: list[int]) -> list[Action]:
        """Remove requests. The blocks of a request in a running step are freed by `_step_done`."""
        busy = self._busy
        released_ids: list[int] = []
        for request_id in request_ids:
            was_running = request_id in self._batching.running
            sequence = self._batching.remove(request_id)
            if sequence is not None and was_running and request_id not in busy:
                self._batching.free(sequence)
                released_ids.append(request_id)
        return [Release(released_ids)] if released_ids else []

    def _step_done(self, step_done: StepDone, now: float) -> list[Action]:
        flight = self._land(step_done.step)
        self._count(flight, now)
        if self._divider is not None and step_done.expert_reads is not None:
            self._divider.learn(step_done.expert_reads)
        emit = land(flight.plan, flight.chunks, step_done, self._batching)
        actions: list[Action] = [emit] if emit.request_ids else []
        return actions + self._free_finished(flight)

    def _step_failed(self, step: int) -> list[Action]:
        flight = self._land(step)
        for sequence, _ in flight.chunks:
            self._batching.record_failure(sequence)
        return self._free_finished(flight)

    def _land(self, step: int) -> _Flight:
        """End a running step and return it. The rows of a failed step are still pending."""
        flight = self._flights.pop(step, None)
        if flight is None:
            raise ValueError(f"step {step} is not in flight")
        return flight

    def _free_finished(self, flight: _Flight) -> list[Action]:
        """Free the requests that ended with this step or were cancelled during it."""
        ended_sequences = [sequence for sequence, _ in flight.chunks if sequence.stage is Stage.FINISHED]
        for sequence in ended_sequences:
            self._batching.free(sequence)
        return [Release([sequence.request_id for sequence in ended_sequences])] if ended_sequences else []

    def _count(self, flight: _Flight, now: float) -> None:
        rows, seconds = flight.plan.batch.num_rows, now - flight.start_time
        decodes = sum(n for s, n in flight.chunks if s.num_pending == 1 and s.num_generated > 0)
        if rows and decodes == rows:
            self._batching.speculation.record_step(rows, seconds)
        elif rows:
            self._batching.prompt_rows.record_step(rows, seconds)
        self._steps += 1
        self._decode_tokens += decodes
        self._prefill_tokens += rows - decodes
        self._step_seconds += seconds

    # ---- the next step

    @property
    def _busy(self) -> set[int]:
        """Requests whose rows are in a running step."""
        return {s.request_id for flight in self._flights.values() for s, _ in flight.chunks}

    def _divide(self, now: float) -> list[Action]:
        """Divide memory for the requests that are there, if no step runs."""
        if self._divider is None or self._flights:
            return []
        old_division = self._divider.division
        division = self._divider.choose(now, self._batching.count_needs(TOKENS_AHEAD))
        self._blocks.resize(division.num_blocks)
        return [Divide(division)] if division != old_division else []

    def _next_steps(self, now: float) -> list[Action]:
        actions = self._divide(now)
        while len(self._flights) < self._inflight:
            num_flights = len(self._flights)
            actions += self._next_step(now)
            if len(self._flights) == num_flights:
                break
        return actions

    def _share(self) -> int:
        """Maximum rows of a step. Steps in flight share the pending rows equally."""
        max_rows = self._batching.limits.max_num_batched_tokens
        if self._inflight == 1:
            return max_rows
        rows = sum(
            s.num_pending for s in (*self._batching.running.values(), *self._batching.waiting.values())
        )
        return max(1, -(-min(rows, max_rows) // self._inflight))

    def _next_step(self, now: float) -> list[Action]:
        max_rows_with_drafts = self._batching.limits.max_num_batched_tokens // self._inflight
        schedule = self._batching.schedule(now, self._busy, self._share(), max_rows_with_drafts)
        actions: list[Action] = []
        if schedule.preempted_sequences:
            actions.append(
                Release(
                    [sequence.request_id for sequence in schedule.preempted_sequences], is_preemption=True
                )
            )
        if schedule.admitted_sequences:
            actions += admit(schedule.admitted_sequences, now, self._blocks)
        actions += plan_reads(schedule.reading_sequences, self._blocks)
        if schedule.chunks:
            actions.append(self._begin(schedule.chunks, now))
        return actions

    def _begin(self, chunks: list[Chunk], now: float) -> RunStep:
        plan = plan_step(self._next_number, chunks, self._blocks)
        self._flights[self._next_number] = _Flight(plan, chunks, now)
        self._next_number += 1
        return RunStep(plan)
