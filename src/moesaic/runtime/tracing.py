"""What an attention worker writes into a trace.

Its own row of the trace has these spans:

    schedule    the scheduler's answer to an event
    layer l     rows on their way from the experts of the layer before to the gate of layer l
    dispatch    inside `layer l`: the rows are sent to the servers of that layer's experts
    wait        for experts, and for nothing else
    collect     answers came in and were put in their places
    to sampler  rows on their way from the last experts through the last block
    sampling    from there to tokens; a part of `to sampler` where the model runs segment by segment, and of
                `layer l` where layer l drafts tokens afterwards
    step        a whole step, where the experts are computed in this process
    not finite  a request ended since its logits were NaN or infinite; says where that began
    gate        waiting for the other workers before a step that all of them begin together

The counter `pairs at servers` says how many (row, expert) pairs were sent and not answered yet.

A worker whose model is larger than its fast memory has a further row for each lane. A span there is a task,
named after its kind, with its layer and its micro-batch, or its page where it loads one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moesaic.core.tokens import IntArray
from moesaic.experts.client import ExpertRequest, RequestHandle
from moesaic.policy.offloading.tasks import Kind, Lane, Task
from moesaic.policy.offloading.timeline import Timeline
from moesaic.policy.scheduling.schedulers.actions import Event, StepPlan
from moesaic.runtime.observer import IGNORING_OBSERVER, WorkerObserver
from moesaic.trace.track import Row, Track

LANES = tuple(Lane)
"""The order of the lanes' rows in a trace."""


def make_observer(trace: str | None, clock: Callable[[], float]) -> WorkerObserver:
    """The observer of a worker. trace: the file of its part of a trace; None: nothing is written.

    Raises ConfigError when the file cannot be written.
    """
    return IGNORING_OBSERVER if trace is None else WorkerTrace(Track(Path(trace), clock))


@dataclass
class _OpenRequest:
    """A request to expert servers whose answer is not complete."""

    layer: int
    missing: int
    """Pairs without an answer."""


class WorkerTrace:
    """A WorkerObserver that writes into a track."""

    def __init__(self, track: Track) -> None:
        self._track = track
        self._pieces = StepPieces(track)
        self._lanes = LaneRows(track)
        self._open: dict[int, _OpenRequest] = {}
        """The requests without a complete answer, by the number of the handle."""
        self._at_barrier = False

    # ---- steps

    def on_event_handled(self, event: Event, began: float) -> None:
        self._track.span("schedule", began, self._track.now(), event=type(event).__name__)

    def on_step_started(self, plan: StepPlan, segment: int = 0) -> None:
        self._pieces.begin(plan, "to sampler" if segment else "step")

    def on_step_resumed(self, plan: StepPlan) -> None:
        self._pieces.resume(plan)

    def on_step_paused(self) -> None:
        self._pieces.end()

    def on_sampling_started(self) -> None:
        self._pieces.on_sampling_started()

    def on_tokens_sampled(self, rows: int) -> None:
        self._pieces.on_tokens_sampled(rows)

    def on_logits_not_finite(self, request_id: int, place: str) -> None:
        now = self._track.now()
        self._track.span("not finite", now, now, request=request_id, place=place)

    def on_pass_ended(self, tasks: Sequence[Task], times: Timeline) -> None:
        self._lanes.write(tasks, times)

    # ---- requests to expert servers

    def on_request_sent(self, handle: RequestHandle, request: ExpertRequest, began: float) -> None:
        layer, pairs = request.layer, request.expert_ids.numel()
        self._open[handle.number] = _OpenRequest(layer, pairs)
        self._pieces.on_dispatch(layer, pairs, began)
        self._count()

    def on_answer(self, handle: RequestHandle, began: float) -> None:
        end = self._track.now()
        self._pieces.on_answer(began, end)
        open_request = self._open.get(handle.number)
        if open_request is not None:
            self._track.span("collect", began, end, layers=[open_request.layer], pairs=open_request.missing)
            self._close(handle)

    def on_pairs_received(self, news: Sequence[tuple[RequestHandle, IntArray]], began: float) -> None:
        open_requests = [
            (self._open[handle.number], handle, pairs)
            for handle, pairs in news
            if handle.number in self._open
        ]
        if open_requests:
            layers = sorted({request.layer for request, _, _ in open_requests})
            count = sum(len(pairs) for _, _, pairs in open_requests)
            self._track.span("collect", began, self._track.now(), layers=layers, pairs=count)
        for request, handle, pairs in open_requests:
            request.missing -= len(pairs)
            if not request.missing:
                self._close(handle)

    def on_answer_released(self, handle: RequestHandle) -> None:
        self._close(handle)

    def on_wait(self, began: float) -> None:
        end = self._track.now()
        if self._open:
            layers = sorted({request.layer for request in self._open.values()})
            self._track.span("wait", began, end, layers=layers, pairs=self._pairs)
        elif self._at_barrier:
            self._track.span("gate", began, end)

    def on_barrier(self, waiting: bool) -> None:
        self._at_barrier = waiting

    @property
    def _pairs(self) -> int:
        """Pairs at servers."""
        return sum(request.missing for request in self._open.values())

    def _close(self, handle: RequestHandle) -> None:
        if self._open.pop(handle.number, None) is not None:
            self._count()

    def _count(self) -> None:
        self._track.count("pairs at servers", self._pairs)


@dataclass
class _Piece:
    """Part of a step or a run that computes without waiting."""

    plan: StepPlan
    begin: float
    name: str
    inner: list[tuple[str, float, float, dict[str, object]]] = field(default_factory=list)
    """Name, begin, end and arguments of the spans inside it."""


class StepPieces:
    """Cuts a worker's time into pieces: an answer of the experts ends one and begins the next."""

    def __init__(self, track: Track) -> None:
        self._track = track
        self._plan: StepPlan | None = None
        self._piece: _Piece | None = None
        self._sampling = 0.0
        """When sampling began."""

    def begin(self, plan: StepPlan, name: str) -> None:
        """Rows of `plan` begin to compute. name: of the piece, unless it leads to the gate of a layer."""
        self._plan, self._piece = plan, _Piece(plan, self._track.now(), name)

    def resume(self, plan: StepPlan) -> None:
        """Rows of `plan` go on computing as soon as `on_answer` is called."""
        self._plan, self._piece = plan, None

    def on_answer(self, begin: float, end: float) -> None:
        """The answer was found by a poll from `begin` to `end`."""
        if self._plan is not None:
            self._write(begin)
            self._piece = _Piece(self._plan, end, "to sampler")

    def on_dispatch(self, layer: int, pairs: int, begin: float) -> None:
        """The piece led to the gate of `layer`. Its rows were sent from `begin` until now."""
        if self._piece is not None:
            self._piece.name = f"layer {layer}"
            self._add("dispatch", begin, layer=layer, pairs=pairs)

    def on_sampling_started(self) -> None:
        """Sampling begins."""
        self._sampling = self._track.now()

    def on_tokens_sampled(self, rows: int) -> None:
        """Sampling ends."""
        if self._piece is None:
            self._track.span("sampling", self._sampling, self._track.now(), rows=rows)
        else:
            self._add("sampling", self._sampling, rows=rows)

    def end(self) -> None:
        """The rows wait for experts or have passed the last layer."""
        self._write(self._track.now())
        self._plan = self._piece = None

    def _add(self, name: str, begin: float, **arguments: object) -> None:
        assert self._piece is not None
        self._piece.inner.append((name, begin, self._track.now(), arguments))

    def _write(self, end: float) -> None:
        piece = self._piece
        if piece is None:
            return
        batch, counts = piece.plan.batch, np.diff(piece.plan.batch.query_starts)
        num_drafted = piece.plan.num_draft_tokens
        decodes = int(np.count_nonzero(counts == 1) + np.count_nonzero(num_drafted))
        num_prefill = batch.num_rows - decodes - int(num_drafted.sum())
        rows = {"rows": batch.num_rows, "decode": decodes, "prefill": num_prefill}
        if len(num_drafted):
            rows["drafted"] = int(num_drafted.sum())
        self._track.span(piece.name, piece.begin, end, step=piece.plan.step, **rows)
        for name, inner_begin, inner_end, arguments in piece.inner:
            self._track.span(name, inner_begin, inner_end, **arguments)


class LaneRows:
    """Writes the tasks of each pass into the rows of their lanes."""

    def __init__(self, track: Track) -> None:
        """track: the worker's own row."""
        self._track = track
        self._rows: dict[Lane, Row] = {}
        self._passes = 0

    def write(self, tasks: Sequence[Task], times: Timeline) -> None:
        """Write a pass that has just ended."""
        begin = self._track.now() - times.makespan
        for task, start, end in zip(tasks, times.starts, times.ends, strict=True):
            if task.kind is not Kind.SYNC:
                place = "page" if task.kind in (Kind.LOAD_PAGE, Kind.STAGE_PAGE) else "micro_batch"
                arguments = {"pass": self._passes, "layer": task.layer, place: task.micro_batch}
                self._row(task.lane).span(task.kind.value, begin + start, begin + end, **arguments)
        self._passes += 1

    def _row(self, lane: Lane) -> Row:
        if lane not in self._rows:
            self._rows[lane] = self._track.row(lane.value, LANES.index(lane) + 1)
        return self._rows[lane]
