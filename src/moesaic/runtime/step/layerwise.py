"""Runs the model segment by segment, with rows of any requests: the mechanism under the asynchronous
scheduler.

Rows that are asked for together walk together. As long as all of them go on as one batch, which is mostly
so, they stay on the walk that they are on, as a whole step does; a walk of others begins in the middle of the
model with what was merged for its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.core.tokens import TokenBatch
from moesaic.experts.remote import RemoteExperts
from moesaic.policy.scheduling.schedulers.actions import PartsArrived, RowSource, RunSegment
from moesaic.runtime.step.forward import Forward
from moesaic.runtime.step.running_step import RunningStep


@dataclass(frozen=True)
class _PendingRun:
    """A run whose experts were asked. What its rows need to go on is held by the walk."""

    batch: TokenBatch
    walk: RunningStep


class LayerwiseRunner:
    """Keeps the rows of every run until they went on together, or the scheduler forgets it."""

    def __init__(self, forward: Forward, experts: RemoteExperts) -> None:
        """experts: those that `forward` asks."""
        self._forward = forward
        self._experts = experts
        self._runs: dict[int, _PendingRun] = {}
        self._run_of: dict[int, int] = {}
        """Ticket -> run."""

    def run(self, action: RunSegment) -> torch.Tensor | None:
        """Carry out one run. At the last segment: hidden states [m, h] of the batch's logit_rows, else
        None."""
        run, batch = action.plan.step, action.plan.batch
        before = self._together(action)
        if before is not None:
            walk = before.walk
            assert walk.handle is not None
            hidden = walk.go_on(self._experts.rows(walk.handle))
        else:
            walk = self._begun(action)
            hidden = walk.go_on(None)
        if hidden is None:
            assert walk.handle is not None
            self._runs[run], self._run_of[walk.handle.number] = _PendingRun(batch, walk), run
        return hidden

    def chosen(self, run: int) -> torch.Tensor:
        """[n, k] the expert ids of a run's rows, at the layer whose experts it asked."""
        held = self._runs[run].walk.held
        assert held is not None and held.gated.expert_ids is not None
        return held.gated.expert_ids

    def arrived(self) -> list[PartsArrived]:
        """What the experts answered since the last call: one event, so that the scheduler sees all of it
        before it chooses."""
        news = [(self._run_of.get(handle.number), pairs) for handle, pairs in self._experts.arrivals()]
        parts = [(run, pairs) for run, pairs in news if run is not None]
        return [PartsArrived(parts)] if parts else []

    def forget(self, runs: list[int]) -> None:
        """Nobody needs these runs any more. Those that went on together, or broke off before they asked, are
        unknown."""
        for run in runs:
            asked = self._taken(run)
            if asked is not None:
                asked.walk.drop()

    def _together(self, action: RunSegment) -> _PendingRun | None:
        """The run before, where this one has all of its rows and no others; it is over then."""
        if len(action.sources) != 1:
            return None
        before = action.sources[0].run
        return self._taken(before) if self._runs[before].batch is action.plan.batch else None

    def _taken(self, run: int) -> _PendingRun | None:
        asked = self._runs.pop(run, None)
        if asked is not None and asked.walk.handle is not None:
            del self._run_of[asked.walk.handle.number]
        return asked

    def _begun(self, action: RunSegment) -> RunningStep:
        if action.segment == 0:
            return self._forward.begin(action.plan.batch)
        merged = torch.cat([self._merged(source) for source in action.sources])
        return self._forward.begin_behind(action.segment, action.plan.batch, merged)

    def _merged(self, source: RowSource) -> torch.Tensor:
        """Hidden states of these rows after the experts of their last layer."""
        walk = self._runs[source.run].walk
        assert walk.held is not None and walk.handle is not None
        mine = slice(source.start, source.stop)
        rows = self._experts.rows(walk.handle)[mine].to(walk.held.gated.residual.device)
        return walk.held.each(lambda tensor: tensor[mine]).merge(rows)
