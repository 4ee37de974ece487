"""The scheduler of an attention worker without barriers (Asynchronous Expert Parallelism, sections 3.2 to
3.4).

Rows wait in micro-queues, one for each segment of the model (see RunSegment). Segments lie before the first
gate, between the experts of two layers, and before the sampler, which is the last segment. Whenever the
worker is free, the queue policy picks a segment. All units that are ready there run as one batch, at whatever
step their requests are. Only the rows that were sent to a slow expert wait for it.

A *unit* is the rows that a request has in flight: one row of a decode, or a chunk of its prompt. A request
has at most one unit. It passes from segment to segment:

    queue 0 --run--> experts asked --all parts in--> queue 1 --run--> ... queue m --run--> token, queue 0

The paper leaves out prefill, cancellation, preemption and back-pressure. Here they work as follows. A chunk
is ready when the parts of all its rows have arrived. The unit of a cancelled request is dropped wherever it
is, and the token pool receives its late parts. Only requests without a unit are preempted. The units in
flight together have at most as many rows as one step of the other schedules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moesaic.core.metrics import WorkerStats
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.batching import BatchLimits, ContinuousBatching
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.microqueue import QueuePolicy
from moesaic.policy.scheduling.minimum_batch import Load
from moesaic.policy.scheduling.prompt_rows import PromptRows
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Event,
    PartsArrived,
    PrefixRead,
    Release,
    RequestsArrived,
    RequestsCancelled,
    SegmentDone,
    StepDone,
    StepFailed,
    StepPlan,
)
from moesaic.policy.scheduling.schedulers.landing import land
from moesaic.policy.scheduling.schedulers.ready_queues import (
    GatherRule,
    ReadyQueues,
    RunThreshold,
)
from moesaic.policy.scheduling.schedulers.runs import Runs
from moesaic.policy.scheduling.schedulers.step_plan import admit, keep_prefixes, plan_reads
from moesaic.policy.scheduling.schedulers.unit import Unit, UnitTable
from moesaic.policy.scheduling.sequence import Stage
from moesaic.policy.scheduling.speculation import Speculation

SMOOTHING = 0.1
"""Weight of the newest value in an exponential moving average."""


@dataclass(frozen=True)
class _Flight:
    """The run that is being computed."""

    plan: StepPlan
    slots: IntArray
    """[u] the slots of the run's units, in the order of its rows."""
    start_time: float
    cancelled_units: list[Unit] = field(default_factory=list)
    """Units of this run whose requests were cancelled since it began."""


@dataclass
class _PendingParts:
    """Parts that arrived and are not recorded yet. All of them are of one run."""

    run: int = 0
    lacking: int = 0
    """Parts of the run that neither were recorded nor are kept, if none came twice."""
    parts: list[tuple[float, IntArray]] = field(default_factory=list)
    """(when they came, pairs)"""


class AsyncScheduler:
    """A Scheduler that computes one run at a time.

    It waits when no unit is ready, or when too few are (see GatherRule).
    """

    def __init__(
        self,
        limits: BatchLimits,
        blocks: KVBlocks,
        policy: QueuePolicy,
        routed_layers: int,
        top_k: int,
        gather: GatherRule | None = None,
        speculation: Speculation | None = None,
        prompt_rows: PromptRows | None = None,
    ) -> None:
        """routed_layers: layers with routed experts. There is one segment more.

        gather: when a run may begin while rows are with the experts. The default lets every run begin.
        speculation, prompt_rows: see ContinuousBatching.
        """
        self._limits = limits
        self._batching = ContinuousBatching(limits, blocks, speculation, prompt_rows)
        self._blocks = blocks
        self._policy = policy
        self._segments = routed_layers + 1
        self._gather: GatherRule = gather or RunThreshold()
        self._table = UnitTable(blocks)
        self._ready = ReadyQueues(self._segments, self._table)
        self._units: dict[int, Unit] = {}
        """The unit of each request that has one, by request id."""
        self._rows = 0
        """Rows of all units."""
        self._decodes = 0
        """Number of units that are not chunks of prompts."""
        self._flight: _Flight | None = None
        self._runs = Runs(self._table, top_k)
        self._prefill_tokens = self._decode_tokens = 0
        self._run_seconds = 0.0
        self._partial_runs = 0
        self._pending_parts = _PendingParts()
        self._last_run_end: float | None = None
        """When the last run ended. None before the first one, and once nothing was in flight."""
        self._idle = 0.0
        """Moving average of the seconds between two runs while rows were in flight."""

    def handle(self, event: Event, now: float) -> list[Action]:
        parts: list[tuple[int, IntArray]] = []
        if isinstance(event, PartsArrived):
            parts = self._keep(event.parts, now)
            if not parts:
                return []
        elif self._pending_parts.parts:
            self._record_pending()
        match event:
            case RequestsArrived():
                self._batching.add_all(event, now)
                actions: list[Action] = []
            case RequestsCancelled(request_ids):
                actions = self._cancel(request_ids)
            case PartsArrived():
                actions = self._record_parts(parts, now)
            case SegmentDone(run):
                actions = self._segment_done(run, now)
            case StepDone():
                actions = self._step_done(event, now)
            case StepFailed(run):
                actions = self._restart_units(run, now)
            case PrefixRead(request_id, num_blocks):
                self._batching.record_prefix(request_id, num_blocks)
                actions = []
            case _:
                raise ValueError(f"{event} is not an event of this scheduler")
        if self._flight is None:
            run_ended = isinstance(event, StepDone | StepFailed)
            actions += self._fill(now) if run_ended or self._begins else []
            actions += self._next_run(now)
        return keep_prefixes(self._blocks) + actions

    def stats(self) -> WorkerStats:
        return WorkerStats(
            running=len(self._batching.running),
            waiting=len(self._batching.waiting),
            steps=self._runs.count,
            partial_runs=self._partial_runs,
            preemptions=self._batching.preemptions,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            step_seconds=self._run_seconds,
            blocks=self._blocks.stats(),
            states=self._blocks.state_stats(),
            speculation=self._batching.speculation.stats(),
        )

    # ---- events

    def _cancel(self, request_ids: list[int]) -> list[Action]:
        """Remove requests. A unit in the current run keeps its blocks until the run ends."""
        flight = self._flight
        running = set() if flight is None else set(flight.plan.request_ids.tolist())
        released_ids, actions = [], []
        for request_id in request_ids:
            was_running = request_id in self._batching.running
            sequence = self._batching.remove(request_id)
            if flight is not None and sequence is not None and request_id in running:
                flight.cancelled_units.append(self._units[request_id])
            elif sequence is not None and was_running:
                self._batching.free(sequence)
                released_ids.append(request_id)
                actions += self._drop(request_id)
        return actions + ([Release(released_ids)] if released_ids else [])

    def _drop(self, request_id: int) -> list[Action]:
        """Drop the request's unit, wherever it waits."""
        if request_id not in self._units:
            return []
        unit = self._end(request_id)
        self._ready.discard(unit.slot)
        actions = self._runs.drop(unit)
        self._table.remove(unit)
        return actions

    def _end(self, request_id: int) -> Unit:
        """Forget the request's unit, which may still wait and still has its slot. Returns it."""
        unit = self._units.pop(request_id)
        self._rows -= unit.rows
        self._decodes -= unit.decode
        return unit

    def _record_parts(self, parts: list[tuple[int, IntArray]], now: float) -> list[Action]:
        """Move units whose last part arrived into the queue of their next segment."""
        for run, pairs in parts:
            self._ready.add(*self._runs.record_parts(run, pairs), now)
        return self._runs.forget([run for run, _ in parts])

    def _keep(self, parts: list[tuple[int, IntArray]], now: float) -> list[tuple[int, IntArray]]:
        """Keep parts that cannot start a run, or record what was kept. Returns the parts to record now.

        Parts are kept while all rows in flight are those of one run, and no part of them would run alone.
        """
        pending = self._pending_parts
        if not pending.parts:
            run = self._runs.find_only_run(len(self._units)) if self._all_wait else None
            if run is None or self._gather.any_part_runs_alone(self._load):
                return parts
            pending.run, pending.lacking = run, self._runs.lacking(run)
        if any(run != pending.run for run, _ in parts):
            self._record_pending()
            return parts
        pending.lacking -= sum(len(pairs) for _, pairs in parts)
        if pending.lacking > 0:
            pending.parts += [(now, pairs) for _, pairs in parts]
            return []
        if not pending.parts:
            return parts
        all_pairs = np.concatenate([pairs for _, pairs in (*pending.parts, *parts)])
        if not self._runs.completes(pending.run, all_pairs):
            self._record_pending()  # some came twice
            return parts
        pending.parts.clear()
        self._ready.add(*self._runs.finish(pending.run), now, self._rows)
        return [(pending.run, all_pairs[:0])]

    @property
    def _all_wait(self) -> bool:
        """Whether all requests have a decode with the experts, and nothing else can happen before parts
        come.
        """
        idle = self._flight is None and not self._ready and self._rows == self._decodes > 0
        has_all_units = len(self._units) == len(self._batching.running) and not self._batching.may_admit
        return idle and has_all_units and not self._policy.remembers

    def _record_pending(self) -> None:
        """Record the parts that were kept, as of the times at which they came."""
        for arrival_time, pairs in self._pending_parts.parts:
            self._ready.add(*self._runs.record_parts(self._pending_parts.run, pairs), arrival_time)
        self._pending_parts.parts.clear()

    def _segment_done(self, run: int, now: float) -> list[Action]:
        """End a run before the last segment. Its units wait for experts, except those cancelled since it
        began.
        """
        flight = self._land(run, now)
        self._run_seconds += now - flight.start_time
        actions: list[Action] = []
        for unit in flight.cancelled_units:
            self._batching.free(unit.sequence)
            actions += self._drop(unit.sequence.request_id)
        released_ids = [unit.sequence.request_id for unit in flight.cancelled_units]
        return actions + ([Release(released_ids)] if released_ids else [])

    def _step_done(self, step_done: StepDone, now: float) -> list[Action]:
        """End a run at the last segment.

        Its units passed all layers: commit their KV and emit the sampled tokens.
        """
        flight = self._land(step_done.step, now)
        self._run_seconds += now - flight.start_time
        units = self._table.get_units(flight.slots)
        for unit in units:
            self._count(unit, now)
            self._end(unit.sequence.request_id)
            self._table.remove(unit)
        chunks = [(unit.sequence, unit.rows) for unit in units]
        emit = land(flight.plan, chunks, step_done, self._batching)
        ended_sequences = [sequence for sequence, _ in chunks if sequence.stage is Stage.FINISHED]
        for sequence in ended_sequences:
            self._batching.free(sequence)
        actions: list[Action] = [emit] if emit.request_ids else []
        return actions + (
            [Release([sequence.request_id for sequence in ended_sequences])] if ended_sequences else []
        )

    def _restart_units(self, run: int, now: float) -> list[Action]:
        """Start every unit of the run again, also if all its parts arrived before the run was stopped."""
        flight = self._land(run, now)
        ended_ids, units = [], self._table.get_units(flight.slots)
        for unit in units:
            request_id = unit.sequence.request_id
            self._end(request_id)
            self._ready.discard(unit.slot)
            self._table.remove(unit)
            self._batching.record_failure(unit.sequence)
            if unit.sequence.stage is Stage.FINISHED:
                self._batching.free(unit.sequence)
                ended_ids.append(request_id)
        return [self._runs.abort_run(run, units), *([Release(ended_ids)] if ended_ids else [])]

    def _land(self, run: int, now: float) -> _Flight:
        """End the current run and return it. Raises ValueError when another run was named."""
        flight = self._flight
        if flight is None or flight.plan.step != run:
            raise ValueError(f"run {run} is not in flight")
        self._flight, self._last_run_end = None, now
        return flight

    def _count(self, unit: Unit, now: float) -> None:
        if unit.sequence.num_pending == 1 and unit.sequence.num_generated > 0:
            self._decode_tokens += unit.rows
        else:
            self._prefill_tokens += unit.rows
            self._batching.prompt_rows.record_step(unit.rows + unit.rows_beside, now - unit.begin_time)

    # ---- the next run

    @property
    def _load(self) -> Load:
        return Load(self._rows, self._decodes, self._idle)

    @property
    def _begins(self) -> bool:
        """Whether requests without a unit begin now, although others are under way."""
        batching = self._batching
        requests = len(batching.running) - len(self._units) + len(batching.waiting)
        if not self._units or not requests:
            return True
        return self._gather.begins(min(requests, self._limits.max_num_seqs), self._load)

    def _fill(self, now: float) -> list[Action]:
        """Create units for requests that have none: the row of the next token, or a chunk of the prompt."""
        room = self._limits.max_num_batched_tokens - self._rows
        all_have_units = len(self._units) == len(self._batching.running)
        if room <= 0 or (all_have_units and not self._batching.may_admit):
            return []
        schedule = self._batching.schedule(now, self._units.keys(), room)
        rows_in_step = self._rows + sum(rows for _, rows in schedule.chunks)
        units = [
            self._table.add(sequence, rows, rows == 1 + len(sequence.draft_tokens), now, rows_in_step - rows)
            for sequence, rows in schedule.chunks
        ]
        self._units.update((unit.sequence.request_id, unit) for unit in units)
        self._rows += sum(unit.rows for unit in units)
        self._decodes += sum(unit.decode for unit in units)
        self._ready.add(0, np.array([unit.slot for unit in units], dtype=np.int64), now)
        actions: list[Action] = []
        if schedule.preempted_sequences:
            actions.append(
                Release(
                    [sequence.request_id for sequence in schedule.preempted_sequences], is_preemption=True
                )
            )
        if schedule.admitted_sequences:
            actions += admit(schedule.admitted_sequences, now, self._blocks)
        return actions + plan_reads(schedule.reading_sequences, self._blocks)

    def _next_run(self, now: float) -> list[Action]:
        """Run all units that are ready at one segment.

        The policy picks among the segments with enough of them.
        """
        waiting = self._ready.rows
        if not waiting:
            if not self._units:
                self._last_run_end = None
            return []
        if sum(rows for _, rows in waiting) < self._rows:  # experts still compute for other units
            runs_alone, load = self._gather.runs_alone, self._load
            waiting = [(segment, rows) for segment, rows in waiting if runs_alone(rows, load)]
        segment = self._choice(waiting, now)
        if segment is None:
            return []
        if self._last_run_end is not None:
            self._idle += SMOOTHING * (now - self._last_run_end - self._idle)
        slots = self._ready.take(segment)
        self._partial_runs += int(self._table.rows[slots].sum()) < self._rows
        action, forget_actions = self._runs.begin(segment, slots, last=segment == self._segments - 1)
        self._flight = _Flight(action.plan, slots, now)
        return [action, *forget_actions]

    def _choice(self, waiting: list[tuple[int, int]], now: float) -> int | None:
        """The segment that runs next. waiting: (segment, rows) of those that may."""
        if len(waiting) == 1 and not self._policy.remembers:  # the usual case, and scores are slow to compute
            return waiting[0][0]
        if not waiting:
            return None
        tokens = np.zeros((self._segments, 1), dtype=np.int64)
        for segment, rows in waiting:
            tokens[segment, 0] = rows
        queue = self._policy.choose(tokens, self._ready.wait_seconds(now))
        return None if queue is None else queue[0]
