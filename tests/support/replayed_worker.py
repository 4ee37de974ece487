"""A recorded run of a real worker, fed to the worker and the executor of the simulation.

What came from outside comes at the recorded times: requests, answers of experts, openings of the barrier.
Runs take as long as they took. What the scheduler is told, and what it answers, is left to the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from moesaic.core.messages import Cancel, Submit
from moesaic.core.tokens import IntArray
from moesaic.planning.sim.device import Device
from moesaic.planning.sim.executor import SimulatedExecutor
from moesaic.planning.sim.routes import Routes
from moesaic.planning.sim.timeline import Timeline
from moesaic.planning.sim.worker import SimulatedWorker
from moesaic.policy.scheduling.schedulers.actions import (
    Admit,
    BarrierPassed,
    Emit,
    Event,
    PartsArrived,
    RequestsArrived,
    RequestsCancelled,
    RunSegment,
    RunStep,
    Scheduler,
    SegmentDone,
    StepDone,
    StepPlan,
)
from tests.support.recorded_cluster import Journal

EARLIER = 1e-8
"""Seconds by which something comes before the worker looks for it, where the worker is not asleep."""
Ended = SegmentDone | StepDone


class RecordedAnswers:
    """The experts of a recorded run, with the calls of `SimulatedExperts`."""

    def __init__(self, timeline: Timeline, top_k: int, layers: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.waiting, self.cause = False, "experts"
        self.runs: list[int] = []
        """The run of each submission, in order."""
        self.submitted = 0
        self.missing: dict[int, int] = {}
        """Submission -> pairs without an answer."""
        self.news: list[tuple[int, IntArray]] = []
        self.layerwise = True
        self.last: list[int] = []
        """Submission to the last layer of each step."""
        self.early: dict[int, list[IntArray]] = {}
        """Submission to come -> answers that are there as soon as it is submitted."""
        self.opened = False
        self._layers, self._top_k = layers, top_k

    def submit(self, layer: int, expert_ids: IntArray) -> int:
        self.submitted += 1
        if self.layerwise:
            self.missing[self.submitted] = expert_ids.size
            for pairs in self.early.pop(self.submitted, []):
                self._receive(self.submitted, pairs)
        elif layer == self._layers - 1:  # what came before is answered at once
            self.missing[self.submitted] = 1
            self.last.append(self.submitted)
        return self.submitted

    def is_complete(self, number: int) -> bool:
        return not self.missing.get(number, 0)

    def arrivals(self) -> list[tuple[int, IntArray]]:
        found, self.news = self.news, []
        return found

    def answer(self, run: int, pairs: IntArray) -> None:
        number = 1 + self.runs.index(run)
        if number > self.submitted:  # the answer came before the worker looked for the first time
            self.early.setdefault(number, []).append(pairs)
        else:
            self._receive(number, pairs)
        self.wake()

    def _receive(self, number: int, pairs: IntArray) -> None:
        self.missing[number] -= len(pairs)
        self.news.append((number, pairs))

    def finish(self, step: int) -> None:
        """A step has the last of its answers. Steps ask for them in the order in which they began."""
        self.missing[self.last[step]] = 0
        self.wake()

    def open(self) -> None:
        self.opened = True
        self.wake()

    def progress(self) -> None: ...

    def deadline(self) -> float:
        return math.inf

    def enter_barrier(self, work: bool) -> None: ...

    def has_passed_barrier(self) -> bool:
        opened, self.opened = self.opened, False
        return opened


class Silent:
    """Reports that go nowhere."""

    def on_admitted(self, action: Admit) -> None: ...

    def on_tokens(self, action: Emit) -> None: ...


class Replay:
    """The simulation's worker in place of the recorded one."""

    def __init__(self, scheduler: Scheduler, journal: Journal, layers: int, top_k: int) -> None:
        self.journal: Journal = []
        self._recorded = journal
        self._timeline = Timeline(journal[0][1])
        self._experts = RecordedAnswers(self._timeline, top_k, layers)
        runs = [action for *_, actions in journal for action in actions if isinstance(action, RunSegment)]
        self._experts.layerwise = bool(runs)
        self._experts.runs = [action.plan.step for action in runs if action.segment < layers]
        self._took: dict[int, float] = {}
        """Run -> its seconds."""
        self._handled: list[float] = []
        """Seconds of each event, where the worker did not sleep after it."""
        self._samples = {
            event.step: (event.tokens, event.counts) for event, *_ in journal if isinstance(event, StepDone)
        }
        executor = SimulatedExecutor(
            "worker",
            self._timeline,
            Device("worker", self._timeline),
            self._experts,  # type: ignore[arg-type]
            Routes(np.full((layers, top_k), 1 / top_k), top_k, 0),
            self._seconds,
            Silent(),
            layerwise=bool(runs),
            sample=lambda plan: self._samples[plan.step],
        )
        self._worker = SimulatedWorker(
            self._timeline,
            scheduler,
            executor,
            lambda *entry: self.journal.append(entry),
            self._handling,
        )
        self._measure()
        self._set()

    def run(self) -> Journal:
        """What the simulation's scheduler was told, and what it answered."""
        self._timeline.run()
        return self.journal

    def _seconds(self, plan: StepPlan, segment: int) -> float:
        return self._took.get(plan.step, 0.0)

    def _handling(self, event: Event) -> float:
        return self._handled[len(self.journal) - 1]

    def _measure(self) -> None:
        """How long runs took. A run begins with the entry that has it, and ends before the next one."""
        self._under_way = [False] * len(self._recorded)
        pending: int | None = None
        for index, (event, now, actions) in enumerate(self._recorded):
            following = self._recorded[index + 1][1] if index + 1 < len(self._recorded) else now
            if isinstance(event, Ended):
                pending = None
            self._handled.append(0.0 if pending is None else following - now)
            self._under_way[index] = pending is not None
            begun = [action for action in actions if isinstance(action, RunSegment)]
            if begun:
                pending = index
                self._took[begun[0].plan.step] = following - now
                self._under_way[index] = True

    def _set(self) -> None:
        """Let come what came from outside. Steps of a whole worker end by their last answers."""
        for index, (event, now, _) in enumerate(self._recorded):
            awake = index > 0 and self._under_way[index - 1]
            action = self._outside(event)
            if action is not None:
                self._timeline.schedule(now - EARLIER if awake else now, action)

    def _answer(self, parts: list[tuple[int, IntArray]]) -> None:
        for run, pairs in parts:
            self._experts.answer(run, pairs)

    def _outside(self, event: Event) -> Callable[[], None] | None:
        match event:
            case RequestsArrived(requests, generated) if requests:
                return lambda: self._worker.send(Submit(list(requests), list(generated)))
            case RequestsCancelled(request_ids):
                return lambda: self._worker.send(Cancel(request_ids))
            case PartsArrived(parts):
                return lambda: self._answer(parts)
            case BarrierPassed():
                return self._experts.open
            case StepDone() if not self._experts.layerwise:
                step = event.step
                return lambda: self._experts.finish(step)
        return None


def begun(journal: Journal) -> int:
    """How many runs or steps a journal has."""
    return sum(isinstance(action, RunSegment | RunStep) for *_, actions in journal for action in actions)
