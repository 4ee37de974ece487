"""The asynchronous scheduler written plainly: lists of units, and a loop over them wherever one is needed.

It is slow. `policy.scheduling.schedulers.asynchronous` has to take the same actions at every event.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from moesaic.core.metrics import WorkerStats
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.batching import BatchLimits, ContinuousBatching
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.microqueue import FloatArray, QueuePolicy
from moesaic.policy.scheduling.minimum_batch import Load
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Event,
    Forget,
    PartsArrived,
    Release,
    RequestsArrived,
    RequestsCancelled,
    RowSource,
    RunSegment,
    SegmentDone,
    StepDone,
    StepFailed,
    StepPlan,
)
from moesaic.policy.scheduling.schedulers.landing import land
from moesaic.policy.scheduling.schedulers.ready_queues import GatherRule, RunThreshold
from moesaic.policy.scheduling.schedulers.step_plan import admit, plan_step
from moesaic.policy.scheduling.sequence import Sequence, Stage
from moesaic.policy.scheduling.speculation import Speculation
from moesaic.policy.scheduling.tokenpool import TokenPool, Units


@dataclass(eq=False)
class Unit:
    """The row of a next token, with those of its drafted tokens, or a chunk of a prompt."""

    sequence: Sequence
    rows: int
    run: Run | None = None
    """The run that computed its rows last. None before segment 0."""
    start: int = 0
    """Index of its first row in that run."""
    decode: bool = False
    """Whether it is not a chunk of a prompt."""

    @property
    def segment(self) -> int:
        """The segment at which the unit waits, or runs next."""
        return 0 if self.run is None else self.run.segment + 1


@dataclass(eq=False)
class Run:
    """Rows that were sent to experts together.

    While the same units run together, the object stays the same and only gets another number at each segment.
    So such a run costs the same for any number of units.
    """

    number: int
    segment: int
    plan: StepPlan
    units: list[Unit]
    """Its units, in the order of the rows."""
    waiting: Units
    """The units as the token pool stores them."""
    left: int = 0
    """Units that no later run took and that were not dropped."""


def sources(units: list[Unit]) -> list[RowSource]:
    """Where the rows of these units come from. Neighbouring rows form one source, to copy less often."""
    found: list[RowSource] = []
    for unit in units:
        if unit.run is None:
            continue
        stop = unit.start + unit.rows
        if found and found[-1].run == unit.run.number and found[-1].stop == unit.start:
            found[-1] = RowSource(unit.run.number, found[-1].start, stop)
        else:
            found.append(RowSource(unit.run.number, unit.start, stop))
    return found


@dataclass(eq=False)
class _Group:
    """Units that became ready at the same time, at the same segment."""

    units: list[Unit]
    since: float


class ReadyQueues:
    """A queue for each segment. Row counts are maintained, not computed again for each choice."""

    def __init__(self, segments: int) -> None:
        self._rows = [0] * segments
        self._queues: list[list[_Group]] = [[] for _ in range(segments)]

    def __bool__(self) -> bool:
        """Whether any unit waits."""
        return any(self._rows)

    @property
    def tokens(self) -> IntArray:
        """[segments, 1] rows that wait at each segment."""
        return np.array(self._rows)[:, None]

    def add(self, units: list[Unit], now: float) -> None:
        """Queue units of one segment, in the order of their run."""
        if units:
            segment = units[0].segment
            self._queues[segment].append(_Group(units, now))
            self._rows[segment] += sum(unit.rows for unit in units)

    def discard(self, unit: Unit) -> None:
        """Remove the unit if it waits in a queue."""
        queue = self._queues[unit.segment]
        for group in [one for one in queue if unit in one.units]:
            group.units = [one for one in group.units if one is not unit]
            self._rows[unit.segment] -= unit.rows
            if not group.units:
                queue.remove(group)

    def take(self, segment: int) -> list[Unit]:
        """Remove and return all units of a segment.

        They come in the order of the runs that computed their rows. At segment 0, where units begin, the
        oldest comes first.
        """
        groups, self._queues[segment] = self._queues[segment], []
        self._rows[segment] = 0
        if len(groups) == 1:
            return groups[0].units
        units = [unit for group in groups for unit in group.units]
        return sorted(units, key=_row_position) if segment else units

    def waited(self, now: float) -> FloatArray:
        """[segments, 1] seconds that the oldest unit of each segment has waited, 0 for an empty queue."""
        return np.array([[now - queue[0].since if queue else 0.0] for queue in self._queues])


def _row_position(unit: Unit) -> tuple[int, int]:
    assert unit.run is not None
    return unit.run.number, unit.start


class Runs:
    """Numbers the runs. A run is forgotten when its rows were taken and all its parts have arrived."""

    def __init__(self, blocks: KVBlocks, top_k: int) -> None:
        self.count = 0
        self._blocks = blocks
        self._top_k = top_k
        self._pool = TokenPool()
        """The parts that experts still have to send back."""
        self._runs: dict[int, Run] = {}
        """Runs whose rows were sent to experts, by number."""

    def __len__(self) -> int:
        """Runs that the executor still keeps, or calls that are not done, whichever are more."""
        return max(len(self._runs), len(self._pool))

    def begin(self, segment: int, units: list[Unit], last: bool) -> tuple[RunSegment, list[Action]]:
        """Begin a run of these units at `segment`. Returns it, and the actions that forget earlier runs.

        Unless `last`, the units then wait for the answers of this segment's experts. When the units are
        exactly the rows of one earlier run, in order, the new run has the same batch object. So data that was
        derived from that batch can be used again.
        """
        number, self.count = self.count, self.count + 1
        before = _common_run(units)
        if before is not None:
            everything = RowSource(before.number, 0, before.plan.batch.num_rows)
            action = RunSegment(replace(before.plan, step=number), segment, [everything])
            before.left = 0
            left = self.forget([before.number])
            if not last:
                self._send(before, action)
            return action, left
        plan = plan_step(number, [(unit.sequence, unit.rows) for unit in units], self._blocks)
        action = RunSegment(plan, segment, sources(units))
        left = self.taken(units)
        if not last:
            run = Run(number, segment, plan, units, _waiting(plan))
            for unit, start in zip(units, plan.batch.query_starts[:-1].tolist(), strict=True):
                unit.run, unit.start = run, start
            self._send(run, action)
        return action, left

    def taken(self, units: list[Unit]) -> list[Action]:
        """Record that a later run took these units' rows, or that they were dropped.

        Returns the runs to forget.
        """
        runs = [unit.run for unit in units if unit.run is not None]
        for run in runs:
            run.left -= 1
        return self.forget([run.number for run in runs])

    def drop(self, unit: Unit) -> list[Action]:
        """Drop the unit of a cancelled request. Its parts do not make it ready any more."""
        self._pool.drop(unit.sequence.request_id)
        return self.taken([unit])

    def arrived(self, number: int, pairs: IntArray) -> list[Unit]:
        """Record parts. Returns the units that they complete, in the order of the run."""
        complete = self._pool.receive_units(number, pairs)
        if complete is None:
            return []
        units = self._runs[number].units
        if len(complete) == len(units):
            return units
        ids = set(complete.request_ids.tolist())
        return [unit for unit in units if unit.sequence.request_id in ids]

    def forget(self, numbers: list[int]) -> list[Action]:
        """Forget those of these runs that are over.

        A run whose units were all taken may still receive late parts into its memory. It is not over then.
        """
        over = [number for number in dict.fromkeys(numbers) if self._over(number)]
        for number in over:
            del self._runs[number]
        return [Forget(over)] if over else []

    def failed(self, number: int, units: list[Unit]) -> Action:
        """End a run that was stopped, perhaps after it asked its experts. Their answers are ignored."""
        if self._runs.pop(number, None) is not None:
            for unit in units:
                self._pool.drop(unit.sequence.request_id)
            self._pool.receive_units(number, self._pool.missing(number))
        return Forget([number])

    def _send(self, run: Run, action: RunSegment) -> None:
        """Let the units of this run wait for parts from now on."""
        number, segment = action.plan.step, action.segment
        run.plan, run.number, run.segment, run.left = action.plan, number, segment, len(run.units)
        run.waiting = replace(run.waiting, call=number, layer=segment)
        self._pool.open(run.waiting, self._top_k)
        self._runs[number] = run

    def _over(self, number: int) -> bool:
        run = self._runs.get(number)
        return run is not None and not run.left and self._pool.is_complete(number)


def _waiting(plan: StepPlan) -> Units:
    """The run's units for the token pool. `_send` sets their layer."""
    starts = plan.batch.query_starts[:-1]
    rows, positions = np.diff(plan.batch.query_starts), plan.batch.positions[starts]
    return Units(plan.step, 0, plan.request_ids, plan.epochs, positions, rows, starts)


def _common_run(units: list[Unit]) -> Run | None:
    """The run whose rows these units are, all of them and in its order. None if there is no such run."""
    run = units[0].run
    whole = run is not None and len(units) == len(run.units) and all(unit.run is run for unit in units)
    return run if whole else None


SMOOTHING = 0.1
"""Weight of the newest value in an exponential moving average."""


@dataclass(frozen=True)
class _Flight:
    """The run that is being computed."""

    plan: StepPlan
    units: list[Unit]
    started: float
    cancelled: list[Unit] = field(default_factory=list)
    """Units of this run whose requests were cancelled since it began."""


class PlainAsyncScheduler:
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
    ) -> None:
        """routed_layers: layers with routed experts. There is one segment more.

        gather: when a run may begin while rows are with the experts. The default lets every run begin.
        speculation: drafts tokens. None: none are drafted.
        """
        self._limits = limits
        self._batching = ContinuousBatching(limits, blocks, speculation)
        self._blocks = blocks
        self._policy = policy
        self._segments = routed_layers + 1
        self._gather: GatherRule = gather or RunThreshold()
        self._ready = ReadyQueues(self._segments)
        self._units: dict[int, Unit] = {}
        """The unit of each request that has one, by request id."""
        self._rows = 0
        """Rows of all units."""
        self._decodes = 0
        """Number of units that are not chunks of prompts."""
        self._flight: _Flight | None = None
        self._runs = Runs(blocks, top_k)
        self._prefill_tokens = self._decode_tokens = 0
        self._run_seconds = 0.0
        self._partial_runs = 0
        self._ended: float | None = None
        """When the last run ended. None before the first one, and once nothing was in flight."""
        self._idle = 0.0
        """Moving average of the seconds between two runs while rows were in flight."""

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case RequestsArrived():
                self._batching.add_all(event, now)
                actions: list[Action] = []
            case RequestsCancelled(request_ids):
                actions = self._cancelled(request_ids)
            case PartsArrived(parts):
                actions = self._arrived(parts, now)
            case SegmentDone(run):
                actions = self._segment_done(run, now)
            case StepDone():
                actions = self._step_done(event, now)
            case StepFailed(run):
                actions = self._failed(run, now)
            case _:
                raise ValueError(f"{event} is not an event of this scheduler")
        if self._flight is None:
            ended = isinstance(event, StepDone | StepFailed)
            actions += self._fill(now) if ended or self._begins else []
            actions += self._next_run(now)
        return actions

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

    def _cancelled(self, request_ids: list[int]) -> list[Action]:
        """Remove requests. A unit in the current run keeps its blocks until the run ends."""
        flight = self._flight
        running = set() if flight is None else {unit.sequence.request_id for unit in flight.units}
        released, actions = [], []
        for request_id in request_ids:
            was_running = request_id in self._batching.running
            sequence = self._batching.remove(request_id)
            if flight is not None and sequence is not None and request_id in running:
                flight.cancelled.append(self._units[request_id])
            elif sequence is not None and was_running:
                self._batching.free(sequence)
                released.append(request_id)
                actions += self._drop(request_id)
        return actions + ([Release(released)] if released else [])

    def _drop(self, request_id: int) -> list[Action]:
        """Drop the request's unit, wherever it waits."""
        if request_id not in self._units:
            return []
        unit = self._end(request_id)
        return self._runs.drop(unit)

    def _end(self, request_id: int) -> Unit:
        """Remove the request's unit and return it."""
        unit = self._units.pop(request_id)
        self._rows -= unit.rows
        self._decodes -= unit.decode
        self._ready.discard(unit)
        return unit

    def _arrived(self, parts: list[tuple[int, IntArray]], now: float) -> list[Action]:
        """Move units whose last part arrived into the queue of their next segment."""
        for run, pairs in parts:
            self._ready.add(self._runs.arrived(run, pairs), now)
        return self._runs.forget([run for run, _ in parts])

    def _segment_done(self, run: int, now: float) -> list[Action]:
        """End a run before the last segment. Its units wait for experts, except those cancelled since it
        began.
        """
        flight = self._land(run, now)
        self._run_seconds += now - flight.started
        actions: list[Action] = []
        for unit in flight.cancelled:
            self._batching.free(unit.sequence)
            actions += self._drop(unit.sequence.request_id)
        released = [unit.sequence.request_id for unit in flight.cancelled]
        return actions + ([Release(released)] if released else [])

    def _step_done(self, done: StepDone, now: float) -> list[Action]:
        """End a run at the last segment.

        Its units passed all layers: commit their KV and emit the sampled tokens.
        """
        flight = self._land(done.step, now)
        self._run_seconds += now - flight.started
        for unit in flight.units:
            self._count(unit)
            self._end(unit.sequence.request_id)
        chunks = [(unit.sequence, unit.rows) for unit in flight.units]
        emit = land(flight.plan, chunks, done, self._batching)
        ended = [sequence for sequence, _ in chunks if sequence.stage is Stage.FINISHED]
        for sequence in ended:
            self._batching.free(sequence)
        actions: list[Action] = [emit] if emit.request_ids else []
        return actions + ([Release([sequence.request_id for sequence in ended])] if ended else [])

    def _failed(self, run: int, now: float) -> list[Action]:
        """Start every unit of the run again, also if all its parts arrived before the run was stopped."""
        flight = self._land(run, now)
        ended = []
        for unit in flight.units:
            request_id = unit.sequence.request_id
            self._end(request_id)
            self._batching.record_failure(unit.sequence)
            if unit.sequence.stage is Stage.FINISHED:
                self._batching.free(unit.sequence)
                ended.append(request_id)
        return [self._runs.failed(run, flight.units), *([Release(ended)] if ended else [])]

    def _land(self, run: int, now: float) -> _Flight:
        """End the current run and return it. Raises ValueError when another run was named."""
        flight = self._flight
        if flight is None or flight.plan.step != run:
            raise ValueError(f"run {run} is not in flight")
        self._flight, self._ended = None, now
        return flight

    def _count(self, unit: Unit) -> None:
        if unit.sequence.num_pending == 1 and unit.sequence.num_generated > 0:
            self._decode_tokens += unit.rows
        else:
            self._prefill_tokens += unit.rows

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
        units = [
            Unit(sequence, rows, decode=rows == 1 + len(sequence.draft_tokens))
            for sequence, rows in schedule.chunks
        ]
        self._units.update((unit.sequence.request_id, unit) for unit in units)
        self._rows += sum(unit.rows for unit in units)
        self._decodes += sum(unit.decode for unit in units)
        self._ready.add(units, now)
        actions: list[Action] = []
        if schedule.preempted_sequences:
            actions.append(
                Release(
                    [sequence.request_id for sequence in schedule.preempted_sequences], is_preemption=True
                )
            )
        if schedule.admitted_sequences:
            actions += admit(schedule.admitted_sequences, now, self._blocks)
        return actions

    def _next_run(self, now: float) -> list[Action]:
        """Run all units that are ready at one segment.

        The policy picks among the segments with enough of them.
        """
        if not self._ready:
            if not self._units:
                self._ended = None
            return []
        tokens = self._ready.tokens
        if tokens.sum() < self._rows:  # experts still compute for other units
            enough = [self._gather.runs_alone(rows, self._load) for rows in tokens[:, 0].tolist()]
            tokens = tokens * np.array(enough)[:, None]
        chosen = self._policy.choose(tokens, self._ready.waited(now)) if tokens.any() else None
        if chosen is None:
            return []
        segment = chosen[0]
        if self._ended is not None:
            self._idle += SMOOTHING * (now - self._ended - self._idle)
        units = self._ready.take(segment)
        self._partial_runs += sum(unit.rows for unit in units) < self._rows
        action, left = self._runs.begin(segment, units, last=segment == self._segments - 1)
        self._flight = _Flight(action.plan, units, now)
        return [action, *left]
