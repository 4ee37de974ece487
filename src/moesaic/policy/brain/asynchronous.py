"""The brain of an attention worker without barriers: Asynchronous Expert Parallelism (sections 3.2 to 3.4).

Rows wait in micro-queues, one for each place of the model (see RunLayer): before the first gate, between two
layers' experts, and before the sampler, which is the last place. Whenever the worker is free the queue policy
picks a place, and all units that are ready there run as one batch, whatever step of their requests they are
in; nobody waits for the slowest expert but the rows that were sent to it.

A *unit* is what a request has under way: one row of a decode or a chunk of its prompt, never two at a time.
It goes from place to place:

    queue 0 --run--> experts asked --all parts in--> queue 1 --run--> ... queue m --run--> token, queue 0

The paper leaves out prefill, cancellation, preemption and back-pressure. Here a chunk is ready when the parts
of all its rows are in; a cancelled request's unit is dropped wherever it is, its late parts end in the token
pool; only requests without a unit under way are preempted; and the rows under way are at most those of one
step of the other schedules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.core.metrics import WorkerStats
from moesaic.core.tokens import IntArray
from moesaic.policy.batching import Batching, Limits
from moesaic.policy.brain.actions import (
    Action,
    Arrived,
    Cancelled,
    Emit,
    Event,
    Forget,
    LayerDone,
    PartsArrived,
    Release,
    RunLayer,
    Source,
    StepDone,
    StepFailed,
    StepPlan,
)
from moesaic.policy.brain.plan import admit, step_plan
from moesaic.policy.brain.ready import Gather, Ready
from moesaic.policy.brain.unit import Unit, joined
from moesaic.policy.kvblocks import KVBlocks
from moesaic.policy.microqueue import QueuePolicy
from moesaic.policy.sequence import Stage
from moesaic.policy.tokenpool import TokenPool, Units


@dataclass(frozen=True)
class _Flight:
    """The run under way."""

    plan: StepPlan
    place: int
    units: list[Unit]
    started: float


class Asynchronous:
    """A Brain. One run at a time; it waits when no unit is ready anywhere, or too few are (see Gather)."""

    def __init__(
        self,
        limits: Limits,
        blocks: KVBlocks,
        policy: QueuePolicy,
        routed_layers: int,
        top_k: int,
        gather: Gather | None = None,
    ) -> None:
        """routed_layers: layers with experts; there is one place more."""
        self._limits = limits
        self._batching = Batching(limits, blocks)
        self._blocks = blocks
        self._policy = policy
        self._places = routed_layers + 1
        self._top_k = top_k
        self._pool = TokenPool()
        self._gather = gather or Gather()
        self._ready = Ready(self._places)
        self._units: dict[int, Unit] = {}
        """Of each request that has one."""
        self._rows = 0
        """Of all units."""
        self._unread: dict[int, int] = {}
        """Run -> its rows that no later run took yet; those of dropped units are taken."""
        self._flight: _Flight | None = None
        self._runs = 0
        self._prefill_tokens = self._decode_tokens = 0
        self._run_seconds = 0.0

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case Arrived():
                self._batching.add_all(event.requests, event.generated, now)
                actions: list[Action] = []
            case Cancelled(request_ids):
                actions = self._cancelled(request_ids)
            case PartsArrived(parts):
                actions = self._arrived(parts, now)
            case LayerDone(run):
                actions = self._layer_done(run, now)
            case StepDone(run, tokens):
                actions = self._step_done(run, tokens, now)
            case StepFailed(run):
                actions = self._failed(run)
            case _:
                raise ValueError(f"{event} is no event of this brain")
        if self._flight is None:
            actions += self._fill(now)
            actions += self._next_run(now)
        return actions

    def stats(self) -> WorkerStats:
        return WorkerStats(
            running=len(self._batching.running),
            waiting=len(self._batching.waiting),
            steps=self._runs,
            preemptions=self._batching.preemptions,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            step_seconds=self._run_seconds,
            blocks=self._blocks.stats(),
        )

    # ---- events

    def _cancelled(self, request_ids: list[int]) -> list[Action]:
        """A unit in the run under way keeps its blocks until that ends."""
        running = set() if self._flight is None else {u.sequence.request_id for u in self._flight.units}
        released, actions = [], []
        for request_id in request_ids:
            was_running = request_id in self._batching.running
            sequence = self._batching.remove(request_id)
            if sequence is None or not was_running or request_id in running:
                continue
            self._batching.free(sequence)
            released.append(request_id)
            actions += self._drop(request_id)
        return actions + ([Release(released)] if released else [])

    def _drop(self, request_id: int) -> list[Action]:
        """Take the request's unit from wherever it waits."""
        if request_id not in self._units:
            return []
        unit = self._end(request_id)
        self._pool.drop(request_id)
        return self._taken([unit])

    def _end(self, request_id: int) -> Unit:
        """The request has no unit any more."""
        unit = self._units.pop(request_id)
        self._rows -= unit.rows
        self._ready.discard(unit)
        return unit

    def _arrived(self, parts: list[tuple[int, IntArray]], now: float) -> list[Action]:
        """Units whose last part came go into the queue of the next place."""
        for run, pairs in parts:
            complete = self._pool.arrived(run, pairs)
            for request_id in [] if complete is None else complete.request_ids.tolist():
                self._ready.add(self._units[request_id], now)
        return self._forget([run for run, _ in parts])

    def _layer_done(self, run: int, now: float) -> list[Action]:
        """Its units wait for experts now; those that were cancelled meanwhile are dropped."""
        flight = self._land(run)
        self._run_seconds += now - flight.started
        gone = [unit for unit in flight.units if unit.sequence.stage is Stage.FINISHED]
        actions: list[Action] = []
        for unit in gone:
            self._batching.free(unit.sequence)
            actions += self._drop(unit.sequence.request_id)
        released = [unit.sequence.request_id for unit in gone]
        return actions + ([Release(released)] if released else [])

    def _step_done(self, run: int, tokens: IntArray, now: float) -> list[Action]:
        """Units at the last place have passed all layers: their KV is whole, and some got a token."""
        flight = self._land(run)
        self._run_seconds += now - flight.started
        for unit in flight.units:
            self._count(unit)
            unit.sequence.advance(unit.rows)
            request_id = unit.sequence.request_id
            self._blocks.commit(request_id, unit.sequence.tokens.array, unit.sequence.num_computed)
            self._end(request_id)
        emit = Emit([], [], [], [], run)
        sampled = [flight.units[index].sequence for index in flight.plan.sampled.tolist()]
        for sample, (sequence, token) in enumerate(zip(sampled, tokens.tolist(), strict=True)):
            if sequence.stage is not Stage.FINISHED:
                finish = sequence.append(token)
                if finish is not None:
                    self._batching.remove(sequence.request_id)
                emit.add(sequence.request_id, token, sample, finish)
        ended = [unit.sequence for unit in flight.units if unit.sequence.stage is Stage.FINISHED]
        for sequence in ended:
            self._batching.free(sequence)
        actions: list[Action] = [emit] if emit.request_ids else []
        return actions + ([Release([sequence.request_id for sequence in ended])] if ended else [])

    def _failed(self, run: int) -> list[Action]:
        """Every unit of the run begins again, also where all its parts came before the run broke off."""
        flight = self._land(run)
        ended = []
        for unit in flight.units:
            request_id = unit.sequence.request_id
            self._end(request_id)
            if unit.sequence.stage is Stage.FINISHED:
                self._batching.free(unit.sequence)
                ended.append(request_id)
        if self._unread.pop(run, None) is not None:
            for unit in flight.units:
                self._pool.drop(unit.sequence.request_id)
            self._pool.arrived(run, self._pool.missing(run))  # whatever was asked for, nobody waits for it
        return [Forget([run]), *([Release(ended)] if ended else [])]

    def _land(self, run: int) -> _Flight:
        flight = self._flight
        if flight is None or flight.plan.step != run:
            raise ValueError(f"run {run} is not the one under way")
        self._flight = None
        return flight

    def _count(self, unit: Unit) -> None:
        if unit.sequence.num_pending == 1 and unit.sequence.num_generated > 0:
            self._decode_tokens += 1
        else:
            self._prefill_tokens += unit.rows

    # ---- what comes next

    def _fill(self, now: float) -> list[Action]:
        """Requests without a unit get one: their next token's row, or a chunk of their prompt."""
        room = self._limits.max_num_batched_tokens - self._rows
        if room <= 0:
            return []
        schedule = self._batching.schedule(now, self._units.keys(), room)
        for sequence, rows in schedule.chunks:
            unit = self._units[sequence.request_id] = Unit(sequence, rows)
            self._rows += rows
            self._ready.add(unit, now)
        actions: list[Action] = []
        if schedule.preempted:
            actions.append(Release([sequence.request_id for sequence in schedule.preempted], preempted=True))
        if schedule.admitted:
            actions.append(admit(schedule.admitted, now))
        return actions

    def _next_run(self, now: float) -> list[Action]:
        """All units that are ready at the place that the policy picks among those with enough of them."""
        tokens = self._ready.tokens
        if tokens.sum() < self._rows:  # others are still with the experts
            tokens = tokens * self._gather.enough(self._ready, self._rows, len(self._units))
        chosen = self._policy.choose(tokens, self._ready.waited(now)) if tokens.any() else None
        if chosen is None:
            return []
        place = chosen[0]
        units = self._ready.take(place)
        run, self._runs = self._runs, self._runs + 1
        plan = step_plan(run, [(unit.sequence, unit.rows) for unit in units], self._blocks)
        self._flight = _Flight(plan, place, units, now)
        sources = joined([unit.source for unit in units if unit.source is not None])
        forgotten = self._taken(units)
        if place < self._places - 1:
            self._send(run, place, plan, units)
        return [RunLayer(plan, place, sources), *forgotten]

    def _send(self, run: int, place: int, plan: StepPlan, units: list[Unit]) -> None:
        """The units will wait for the parts of this run."""
        rows = np.array([unit.rows for unit in units])
        positions = plan.batch.positions[plan.batch.query_starts[:-1]]
        waiting = Units.of_run(run, place, plan.request_ids, plan.epochs, positions, rows)
        self._pool.open(waiting, self._top_k)
        self._unread[run] = plan.batch.num_rows
        for unit, start in zip(units, waiting.starts.tolist(), strict=True):
            unit.place, unit.source = place + 1, Source(run, start, start + unit.rows)

    def _taken(self, units: list[Unit]) -> list[Action]:
        """These units' rows are not needed any more where they are; runs that nobody needs are forgotten."""
        runs = []
        for unit in units:
            if unit.source is not None:
                self._unread[unit.source.run] -= unit.rows
                runs.append(unit.source.run)
        return self._forget(runs)

    def _forget(self, runs: list[int]) -> list[Action]:
        """A run ends when its rows were taken and every part is in: late ones go into its memory too."""
        over = [run for run in dict.fromkeys(runs) if not self._unread.get(run, 1) and self._pool.done(run)]
        for run in over:
            del self._unread[run]
        return [Forget(over)] if over else []
