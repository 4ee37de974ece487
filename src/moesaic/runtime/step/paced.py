"""Steps that take as long as on a modelled device (`core.paced`): a test instrument."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.core.curves import Curve
from moesaic.core.tokens import TokenBatch
from moesaic.experts.pacing import Pace
from moesaic.runtime.step.running_step import RunningStep, SegmentRunner, StepGenerator, StepResult


@dataclass(frozen=True)
class PacedRunner:
    """A `SegmentRunner` that holds each segment of a step until the modelled device would have finished."""

    runner: SegmentRunner
    curve: Curve
    pace: Pace

    def begin(self, batch: TokenBatch) -> RunningStep:
        """See `SegmentRunner`."""
        return self._hold_segments(self.runner.begin(batch), batch)

    def begin_at_segment(self, segment: int, batch: TokenBatch, hidden: torch.Tensor) -> RunningStep:
        """See `SegmentRunner`."""
        return self._hold_segments(self.runner.begin_at_segment(segment, batch, hidden), batch)

    def _hold_segments(self, step: RunningStep, batch: TokenBatch) -> RunningStep:
        seconds = self.curve.seconds(batch.num_rows)
        return step.wrap_generator(lambda generator: _holding(generator, seconds, self.pace))


def _holding(generator: StepGenerator, seconds: float, pace: Pace) -> StepGenerator:
    """The same step. Before each request, and before the result, `seconds` of the modelled device pass."""
    answer: torch.Tensor | None = None
    while True:
        began = pace.now
        try:
            request = generator.send(answer)
        except StopIteration as end:
            pace.hold(began, seconds)
            result: StepResult = end.value
            return result
        pace.hold(began, seconds)
        yield request
        answer = yield generator.send(None)
