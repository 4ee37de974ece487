"""Carries out the actions of a scheduler in virtual time. It has the calls of `runtime.executor.Executor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moesaic.core.tokens import IntArray
from moesaic.planning.sim.client import SimulatedExperts
from moesaic.planning.sim.device import Device
from moesaic.planning.sim.routes import Routes, Rows, number_rows
from moesaic.planning.sim.timeline import Timeline, Waits
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Admit,
    BarrierPassed,
    Emit,
    EnterBarrier,
    Event,
    Forget,
    PartsArrived,
    RunSegment,
    RunStep,
    SegmentDone,
    StepDone,
    StepPlan,
)

TOKEN = 1
"""The token that is sampled. Requests end by their number of tokens."""
Seconds = Callable[[StepPlan, int], float]
"""(plan, segment) of a run -> how long the device computes it."""
Sample = Callable[[StepPlan], tuple[IntArray, IntArray | None]]
"""The plan of a run at the last segment -> tokens and counts, as in StepDone."""


class Reports(Protocol):
    """Gets what a worker would send to the engine."""

    def on_admitted(self, action: Admit) -> None:
        """Requests have joined the batch."""
        ...

    def on_tokens(self, action: Emit) -> None:
        """Requests have new tokens."""
        ...


def sample_constant(plan: StepPlan) -> tuple[IntArray, IntArray | None]:
    """Sample the same token for each entry."""
    return np.full(len(plan.sampled_sequences), TOKEN, dtype=np.int64), None


@dataclass
class _Step:
    """A step that runs all segments, one after another."""

    plan: StepPlan
    segment: int = 0
    submission: int | None = None
    """What it waits for. None before the first segment."""


class SimulatedExecutor:
    """Owns the device of one worker, and its experts."""

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        device: Device,
        experts: SimulatedExperts,
        routes: Routes,
        seconds: Seconds,
        reports: Reports,
        layerwise: bool,
        sample: Sample = sample_constant,
    ) -> None:
        """layerwise: for a scheduler that runs the model segment by segment."""
        self.experts = experts
        self.run_rows = 0
        """Rows of all runs of segments."""
        self.segments = 0
        self._name = name
        self._timeline = timeline
        self._device = device
        self._routes = routes
        self._seconds = seconds
        self._reports = reports
        self._layerwise = layerwise
        self._sample = sample
        self._events: list[Event] = []
        self._steps: dict[int, _Step] = {}
        self._run_of: dict[int, int] = {}
        """Submission -> run."""
        self._rows: dict[int, int] = {}
        """Run -> its rows."""
        self._last: tuple[StepPlan | None, Rows] = None, np.zeros(0, np.uint64)
        """The plan that asked last, and its rows."""

    def execute(self, action: Action) -> Waits:
        """Carry out one action. A step that RunStep begins is computed in `progress`."""
        match action:
            case RunSegment():
                yield from self._run_segment(action)
            case RunStep(plan):
                self._steps[plan.step] = _Step(plan)
            case Forget(runs):
                for run in runs:
                    self._rows.pop(run, None)
            case EnterBarrier(work):
                self.experts.enter_barrier(work)
            case Admit():
                self._reports.on_admitted(action)
            case Emit():
                self._reports.on_tokens(action)

    def progress(self, events: list[Event]) -> Waits:
        """Go on with every step as far as its experts have answered. Adds what happened to `events`."""
        arrivals = self.experts.arrivals()
        if self._layerwise and arrivals:
            events.append(PartsArrived([(self._run_of[number], pairs) for number, pairs in arrivals]))
            for number, _ in arrivals:
                if self.experts.is_complete(number):
                    self._run_of.pop(number, None)
        events += self._events
        self._events = []
        if self.experts.has_passed_barrier():
            events.append(BarrierPassed())
        yield from self._advance(events)
        # While one step computed, the experts may have answered another one.
        while len(self._steps) > 1 and self._any_ready():
            yield from self._advance(events)

    def _any_ready(self) -> bool:
        self.experts.progress()
        return any(self._ready(step) for step in self._steps.values())

    def _ready(self, step: _Step) -> bool:
        return step.submission is None or self.experts.is_complete(step.submission)

    def _advance(self, events: list[Event]) -> Waits:
        for number, step in list(self._steps.items()):
            while True:
                if step.submission is not None:
                    self.experts.progress()
                if not self._ready(step):
                    break
                yield from self._compute(step.plan, step.segment)
                if step.segment == self._routes.layers:
                    tokens, counts = self._sample(step.plan)
                    events.append(StepDone(number, tokens, counts))
                    del self._steps[number]
                    break
                step.submission = self._ask(step.plan, step.segment)
                step.segment += 1

    def _run_segment(self, action: RunSegment) -> Waits:
        plan, segment = action.plan, action.segment
        yield from self._compute(plan, segment)
        if segment == self._routes.layers:
            self._events.append(StepDone(plan.step, *self._sample(plan)))
            return
        self._rows[plan.step] = plan.batch.num_rows
        self._run_of[self._ask(plan, segment)] = plan.step
        self._events.append(SegmentDone(plan.step))

    def _compute(self, plan: StepPlan, segment: int) -> Waits:
        rows = plan.batch.num_rows
        self.segments, self.run_rows = self.segments + 1, self.run_rows + rows
        seconds = self._seconds(plan, segment)
        yield from self._device.compute(self._name, f"segment {segment}", seconds, rows=rows, step=plan.step)

    def _ask(self, plan: StepPlan, segment: int) -> int:
        """Send the rows to the experts of the routed layer `segment`. Returns the submission."""
        last_plan, rows = self._last
        if last_plan is not plan:
            batch, owners = plan.batch, plan.request_ids
            if batch.num_rows != len(owners):
                owners = np.repeat(owners, np.diff(batch.query_starts))
            rows = number_rows(owners, batch.positions)
            self._last = plan, rows
        return self.experts.submit(segment, self._routes.choose_experts(segment, rows, self._timeline.now))
