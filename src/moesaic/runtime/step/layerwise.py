"""Runs the model segment by segment, with rows of any requests. The asynchronous scheduler needs it.

Rows of one run share one step. While all of them go on as one batch, which is the usual case, they stay in
that step. A run with other rows begins a new step in the middle of the model. It starts from what the experts
answered for its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.core.tokens import TokenBatch
from moesaic.experts.remote import RemoteExperts
from moesaic.kernels.moving import move_tensor
from moesaic.policy.scheduling.schedulers.actions import PartsArrived, RowSource, RunSegment
from moesaic.runtime.step.running_step import RunningStep, SegmentRunner, StepResult


@dataclass(frozen=True)
class _PendingRun:
    """A run that waits for its experts. The step has what its rows need to go on."""

    batch: TokenBatch
    step: RunningStep


class LayerwiseRunner:
    """Keeps the rows of every run until all of them went on, or until the scheduler forgets the run."""

    def __init__(self, runner: SegmentRunner, experts: RemoteExperts) -> None:
        """experts: those that the steps of `runner` send their requests to."""
        self._runner = runner
        self._experts = experts
        self._runs: dict[int, _PendingRun] = {}
        self._run_of: dict[int, int] = {}
        """Number of a request's handle -> run."""

    @property
    def is_busy(self) -> bool:
        """Whether `poll_arrivals` will return something although no further run begins."""
        return self._experts.is_busy

    def run(self, action: RunSegment) -> StepResult | None:
        """Carry out one run. Returns the result of its step at the last segment, else None."""
        run, batch = action.plan.step, action.plan.batch
        previous_run = self._whole_run(action)
        if previous_run is not None:
            step = previous_run.step
            assert step.handle is not None
            result = step.resume(self._experts.rows(step.handle))
        else:
            step = self._begin(action)
            result = step.resume(None)
        if result is None:
            assert step.handle is not None
            self._runs[run], self._run_of[step.handle.number] = _PendingRun(batch, step), run
        return result

    def expert_ids(self, run: int) -> torch.Tensor:
        """[n, k] expert ids of a run's rows, at the layer whose experts it waits for."""
        pending = self._runs[run].step.pending
        assert pending is not None and pending.gate_output.expert_ids is not None
        return pending.gate_output.expert_ids

    def poll_arrivals(self) -> list[PartsArrived]:
        """What the experts answered since the last call.

        It is one event, so the scheduler sees all answers before it chooses the next run.
        """
        news = [(self._run_of.get(handle.number), pairs) for handle, pairs in self._experts.arrivals()]
        parts = [(run, pairs) for run, pairs in news if run is not None]
        return [PartsArrived(parts)] if parts else []

    def forget(self, runs: list[int]) -> None:
        """Drop what is kept of these runs.

        Runs that went on as a whole, or that failed before their request, are unknown and ignored.
        """
        for run in runs:
            pending = self._take(run)
            if pending is not None:
                pending.step.drop()

    def _whole_run(self, action: RunSegment) -> _PendingRun | None:
        """The earlier run whose rows are exactly those of `action`, if there is one. It is forgotten."""
        if len(action.sources) != 1:
            return None
        previous_run = action.sources[0].run
        # The scheduler passes the same batch on while its rows stay together, so identity tells.
        return self._take(previous_run) if self._runs[previous_run].batch is action.plan.batch else None

    def _take(self, run: int) -> _PendingRun | None:
        pending = self._runs.pop(run, None)
        if pending is not None and pending.step.handle is not None:
            del self._run_of[pending.step.handle.number]
        return pending

    def _begin(self, action: RunSegment) -> RunningStep:
        if action.segment == 0:
            return self._runner.begin(action.plan.batch)
        hidden = torch.cat([self._merge_rows(source) for source in action.sources])
        return self._runner.begin_at_segment(action.segment, action.plan.batch, hidden)

    def _merge_rows(self, source: RowSource) -> torch.Tensor:
        """Hidden states of these rows after the experts of their last layer."""
        step = self._runs[source.run].step
        assert step.pending is not None and step.handle is not None
        part = slice(source.start, source.stop)
        rows = move_tensor(self._experts.rows(step.handle)[part], step.pending.gate_output.residual.device)
        return step.pending.map(lambda tensor: tensor[part]).merge(rows)
