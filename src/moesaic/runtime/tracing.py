"""What an attention worker writes into a trace. The loop and the scheduler know nothing of it.

Of its time in one row there are:

    schedule    the scheduler's answer to an event
    layer l     rows on their way from the experts before to the gate of layer l, whose experts are asked
    dispatch    in it: the rows are sent to the servers
    wait        for experts, and for nothing else
    collect     answers came in and were put in their places
    to sampler  rows on their way from the last experts through the last block
    sampling    from there to tokens; a part of `to sampler` where the model is run place by place
    step        a whole step, where the experts are computed in this process
    gate        waiting for the other workers, before a step that all begin together

and in another one, `pairs at servers`, how many (row, expert) pairs are asked for and not answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moesaic.core.metrics import WorkerStats
from moesaic.core.tokens import IntArray
from moesaic.experts.client import ExpertRequest, RequestHandle
from moesaic.experts.remote import RemoteExperts
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Event,
    RunSegment,
    RunStep,
    Scheduler,
    StepDone,
    StepPlan,
)
from moesaic.runtime.executor import Executor
from moesaic.runtime.step.running_step import RunningStep
from moesaic.trace.track import Track


@dataclass
class _Piece:
    """Of a step or a run, without a wait in it."""

    plan: StepPlan
    begin: float
    name: str
    inner: list[tuple[str, float, float, dict[str, object]]] = field(default_factory=list)
    """Name, begin, end and arguments of what lies in it."""


class StepTrace:
    """Cuts the worker's time into pieces: an answer of the experts ends one and begins the next."""

    def __init__(self, track: Track) -> None:
        self.track = track
        self._plan: StepPlan | None = None
        self._piece: _Piece | None = None

    def begin(self, plan: StepPlan, name: str) -> None:
        """Rows of `plan` are on their way; `name`: where to, unless it turns out to be a layer."""
        self._plan, self._piece = plan, _Piece(plan, self.track.now(), name)

    def resume(self, plan: StepPlan) -> None:
        """They go on as soon as there is an answer."""
        self._plan, self._piece = plan, None

    def answered(self, begin: float, end: float) -> None:
        """A look for the answer, from `begin` to `end`, found it."""
        if self._plan is not None:
            self._write(begin)
            self._piece = _Piece(self._plan, end, "to sampler")

    def dispatched(self, layer: int, pairs: int, begin: float) -> None:
        """The piece led to the gate of `layer`; its rows were sent since `begin`."""
        if self._piece is not None:
            self._piece.name = f"layer {layer}"
            self._add("dispatch", begin, layer=layer, pairs=pairs)

    @contextmanager
    def sampling(self, rows: int) -> Iterator[None]:
        """Tokens are picked in the block."""
        begin = self.track.now()
        yield
        if self._piece is None:
            self.track.span("sampling", begin, self.track.now(), rows=rows)
        else:
            self._add("sampling", begin, rows=rows)

    def end(self) -> None:
        """The rows wait, or are through."""
        self._write(self.track.now())
        self._plan = self._piece = None

    def _add(self, name: str, begin: float, **arguments: object) -> None:
        assert self._piece is not None
        self._piece.inner.append((name, begin, self.track.now(), arguments))

    def _write(self, end: float) -> None:
        piece = self._piece
        if piece is None:
            return
        batch = piece.plan.batch
        decodes = int(np.count_nonzero(np.diff(batch.query_starts) == 1))
        rows = {"rows": batch.num_rows, "decode": decodes, "prefill": batch.num_rows - decodes}
        self.track.span(piece.name, piece.begin, end, step=piece.plan.step, **rows)
        for name, inner_begin, inner_end, arguments in piece.inner:
            self.track.span(name, inner_begin, inner_end, **arguments)


def timeline(trace: str | None, clock: Callable[[], float]) -> StepTrace | None:
    """Of a worker whose part of the trace is the file `trace`; None: there is no trace.

    Raises ConfigError when the file cannot be written.
    """
    return None if trace is None else StepTrace(Track(Path(trace), clock))


class TracedScheduler:
    """A Scheduler whose answers are seen."""

    def __init__(self, scheduler: Scheduler, timeline: StepTrace) -> None:
        self._scheduler = scheduler
        self._track = timeline.track

    def handle(self, event: Event, now: float) -> list[Action]:
        begin = self._track.now()
        actions = self._scheduler.handle(event, now)
        self._track.span("schedule", begin, self._track.now(), event=type(event).__name__)
        return actions

    def stats(self) -> WorkerStats:
        return self._scheduler.stats()


class TracedExecutor(Executor):
    """Its steps and runs are seen, piece by piece."""

    def __init__(self, timeline: StepTrace, *parts: Any, **named: Any) -> None:
        """parts, named: of an Executor."""
        super().__init__(*parts, **named)
        self._timeline = timeline

    def execute(self, action: Action) -> None:
        match action:
            case RunSegment():
                self._timeline.begin(action.plan, "to sampler" if action.segment else "step")
                try:
                    super().execute(action)
                finally:
                    self._timeline.end()
            case RunStep(plan):
                super().execute(action)
                self._walks[plan.step] = plan, _TracedStep(self._walks[plan.step][1], plan, self._timeline)
            case _:
                super().execute(action)

    def _finish(self, plan: StepPlan, hidden: torch.Tensor) -> StepDone:
        with self._timeline.sampling(len(plan.sampled)):
            return super()._finish(plan, hidden)


class _TracedStep(RunningStep):
    """Another walk, seen."""

    def __init__(self, walk: RunningStep, plan: StepPlan, timeline: StepTrace) -> None:
        self._walk = walk
        self.chosen = walk.chosen
        self._plan = plan
        self._timeline = timeline
        self._begun = False

    def advance(self) -> torch.Tensor | None:
        if self._begun:
            self._timeline.resume(self._plan)
        else:
            self._begun = True
            self._timeline.begin(self._plan, "step")
        try:
            return self._walk.advance()
        finally:
            self._timeline.end()

    @property
    def ready(self) -> bool:
        return self._walk.ready


@dataclass
class _Question:
    """A submission that is not answered yet."""

    layer: int
    left: int
    """Pairs that did not come in."""


class TracedRemote(RemoteExperts):
    """What is asked and waited for is seen, and how many pairs are with the servers."""

    def __init__(self, timeline: StepTrace, *parts: Any, **more: Any) -> None:
        """parts, more: of RemoteExperts."""
        super().__init__(*parts, **more)
        self._timeline = timeline
        self._track = timeline.track
        self._open: dict[int, _Question] = {}
        """By ticket."""
        self._at_gate = False
        """It has rows and waits for others to begin with them."""

    def submit(self, ask: ExpertRequest) -> RequestHandle:
        begin = self._track.now()
        handle = super().submit(ask)
        self._open[handle.number] = _Question(ask.layer, ask.expert_ids.numel())
        self._timeline.dispatched(ask.layer, ask.expert_ids.numel(), begin)
        self._count()
        return handle

    def poll(self, handle: RequestHandle) -> torch.Tensor | None:
        begin = self._track.now()
        rows = super().poll(handle)
        if rows is not None:
            end = self._track.now()
            self._timeline.answered(begin, end)
            question = self._open.get(handle.number)
            if question is not None:
                self._track.span("collect", begin, end, layers=[question.layer], pairs=question.left)
                self._close(handle)
        return rows

    def release(self, handle: RequestHandle) -> None:
        super().release(handle)
        self._close(handle)

    def arrivals(self) -> list[tuple[RequestHandle, IntArray]]:
        begin = self._track.now()
        news = super().arrivals()
        found = [
            (self._open[handle.number], handle, pairs)
            for handle, pairs in news
            if handle.number in self._open
        ]
        if found:
            layers = sorted({question.layer for question, _, _ in found})
            count = sum(len(pairs) for _, _, pairs in found)
            self._track.span("collect", begin, self._track.now(), layers=layers, pairs=count)
        for question, handle, pairs in found:
            question.left -= len(pairs)
            if not question.left:
                self._close(handle)
        return news

    def wait(self, timeout: float | None, wakeup: int) -> bool:
        begin = self._track.now()
        news = super().wait(timeout, wakeup)
        end = self._track.now()
        if self._open:
            layers = sorted({question.layer for question in self._open.values()})
            self._track.span("wait", begin, end, layers=layers, pairs=self._pairs_out)
        elif self._at_gate:
            self._track.span("gate", begin, end)
        return news

    def enter(self, work: bool) -> None:
        super().enter(work)
        self._at_gate = work

    def entered(self) -> bool:
        entered = super().entered()
        self._at_gate = self._at_gate and not entered
        return entered

    @property
    def _pairs_out(self) -> int:
        return sum(question.left for question in self._open.values())

    def _close(self, handle: RequestHandle) -> None:
        if self._open.pop(handle.number, None) is not None:
            self._count()

    def _count(self) -> None:
        self._track.count("pairs at servers", self._pairs_out)
