"""What runners of recorded steps share: a pool of recordings, of which each is used by one step at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch

from moesaic.core.tokens import TokenBatch
from moesaic.experts.client import ExpertRequest
from moesaic.kernels.table import OperationRecorder
from moesaic.runtime.step.eager import EagerRunner
from moesaic.runtime.step.running_step import (
    PendingMerge,
    RunningStep,
    SharedRows,
    StepDropped,
    StepGenerator,
    StepResult,
)

Item = ExpertRequest | PendingMerge | SharedRows | StepResult | None
"""What a StepGenerator yields or returns."""
RecordedStepT = TypeVar("RecordedStepT")
"""A recorded step and the arrays that it reads."""


@dataclass(frozen=True)
class SharedMemory(Generic[RecordedStepT]):
    """Recorded steps that share their memory, so that one of them runs at a time."""

    recorder: OperationRecorder
    steps: dict[tuple[int, ...], RecordedStepT] = field(default_factory=dict)
    """The recorded steps, by the numbers that decide which operations a step has."""


class RecordingRunner(ABC, Generic[RecordedStepT]):
    """Records steps of some kinds when they first come, and runs all others operation by operation.

    A recording holds only operations of this process. Where a direct call answers the experts, one recording
    is the whole step. Otherwise a recording ends at each request and at each merge.
    """

    def __init__(
        self,
        eager: EagerRunner,
        make_recorder: Callable[[], OperationRecorder],
        table_width: int,
        direct: bool,
    ) -> None:
        """table_width: KV blocks of the longest sequence. direct: whether the experts answer at once."""
        self._eager = eager
        self._make_recorder = make_recorder
        self._table_width = table_width
        self._direct = direct
        self._free: list[SharedMemory[RecordedStepT]] = []
        """Recordings that no step under way uses: two steps must not share memory."""

    @abstractmethod
    def _is_recorded(self, batch: TokenBatch) -> bool:
        """Whether steps of this kind are recorded."""

    @abstractmethod
    def _run(self, batch: TokenBatch, memory: SharedMemory[RecordedStepT]) -> StepGenerator:
        """Replay a step, which is recorded first if `memory` has none of its kind."""

    def records(self, batch: TokenBatch) -> bool:
        """Whether a step is replayed, and recorded before if it must be."""
        return self._is_recorded(batch)

    def begin(self, batch: TokenBatch) -> RunningStep:
        """Begin a step, which is replayed if steps of its kind are recorded."""
        if not self._is_recorded(batch):
            return self._eager.begin(batch)
        memory = self._take_memory()
        return self._running(partial(self._run, batch, memory), memory)

    def begin_at_segment(self, segment: int, batch: TokenBatch, hidden: torch.Tensor) -> RunningStep:
        """Begin a step between two layers. Such steps are not recorded."""
        return self._eager.begin_at_segment(segment, batch, hidden)

    def _take_memory(self) -> SharedMemory[RecordedStepT]:
        """Recordings for one step."""
        return self._free.pop() if self._free else SharedMemory[RecordedStepT](self._make_recorder())

    def _running(self, run: Callable[[], StepGenerator], memory: SharedMemory[RecordedStepT]) -> RunningStep:
        """The step of a generator, which `run` makes when the step goes on. Then others may use `memory`."""
        return RunningStep(self._eager.experts, self._and_free(run, memory))

    def _and_free(
        self, run: Callable[[], StepGenerator], memory: SharedMemory[RecordedStepT]
    ) -> StepGenerator:
        try:
            result = yield from run()
        except StepDropped:
            self._free.append(memory)
            raise
        self._free.append(memory)  # not after another error: its rows may be sent once more
        return result

    def _wrap_stages(self, generator: StepGenerator) -> StepGenerator:
        """The stages of a step. If the experts answer at once, they yield nothing."""
        return _run_at_once(RunningStep(self._eager.experts, generator)) if self._direct else generator


def next_item(generator: StepGenerator, answer: torch.Tensor | None) -> Item:
    """What a step yields next, or its result."""
    try:
        return generator.send(answer)
    except StopIteration as end:
        result: StepResult = end.value
        return result


def _run_at_once(step: RunningStep) -> StepGenerator:
    yield from ()
    return step.finish()
