"""A step under way. It runs the stages of the model and stops where it waits for experts.

Question: Where do rows leave for the experts in a step?
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from moesaic.core.offload import ExpertReads
from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.experts.client import ExpertRequest, RequestHandle, RoutedExperts
from moesaic.models.block import Block, GateOutput

ChosenExperts = Sequence[torch.Tensor | IntArray]
"""[n, k] expert ids of a step's rows, one entry for each routed layer. A recorded step has arrays: views of
the memory that it writes at every replay."""


@dataclass(frozen=True)
class StepResult:
    """What a step computed. It holds until the next step."""

    hidden: torch.Tensor
    """[m, h] hidden states of the batch's logit_rows after the last block, before the final norm."""
    logits: torch.Tensor | None = None
    """[m, V] float32 logits of `hidden`. None: the step did not compute them."""
    expert_ids: ChosenExperts = ()
    """Expert ids of all rows; empty where the runner does not keep them."""
    rows: torch.Tensor | None = None
    """[n, h] as `hidden`, of all rows, where the model has a layer that goes on from them. None: the rows of
    `hidden` are all rows, or nothing needs them."""
    expert_reads: ExpertReads | None = None
    """What reading experts costs now. None: it was not measured anew."""


class Combine:
    """How the answers for one row become one sum: the two values of --combine.

    exact: the servers answer pair by pair, and the merge weights the answers in top-k order, as one process
    does. partial: each server weights and sums what it has of a row (Expert-as-a-Service, section 4). That
    takes fewer bytes and is equal up to rounding. The merge adds the sums.
    """

    def __init__(self, partial: bool, rows: int, top_k: int, device: torch.device) -> None:
        """rows: the most rows of a step."""
        self._unit_weights = torch.ones(rows, top_k, device=device) if partial else None

    def request(self, layer: int, gate_output: GateOutput) -> tuple[ExpertRequest, GateOutput]:
        """The request to the experts, and the rows that their answer is merged with."""
        assert gate_output.expert_ids is not None and gate_output.weights is not None
        if self._unit_weights is None:
            return ExpertRequest(layer, gate_output.normed_rows, gate_output.expert_ids), gate_output
        request = ExpertRequest(
            layer, gate_output.normed_rows, gate_output.expert_ids, weights=gate_output.weights
        )
        return request, replace(gate_output, weights=self._unit_weights[: len(gate_output.weights)])


@dataclass(frozen=True)
class PendingMerge:
    """What the answer of a layer's experts is merged with. It never leaves the process."""

    block: Block
    gate_output: GateOutput
    dense: torch.Tensor | None
    """[n, h] output of the dense stage, if the layer has one."""

    def merge(self, rows: torch.Tensor | None) -> torch.Tensor:
        """rows [n, k, h] from the experts -> hidden states [n, h] after the block."""
        return self.block.merge(self.gate_output, self.dense, rows)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PendingMerge:
        """The same merge, with `change` applied to each tensor."""
        gate_output = self.gate_output
        assert gate_output.expert_ids is not None and gate_output.weights is not None
        tensors = gate_output.residual, gate_output.normed_rows, gate_output.expert_ids, gate_output.weights
        dense = None if self.dense is None else change(self.dense)
        return PendingMerge(self.block, GateOutput(*map(change, tensors)), dense)


@dataclass(frozen=True)
class SharedRows:
    """Where a recorded step needs the other processes that share its attention."""

    run: Callable[[int], torch.Tensor | None]
    """Exchanges so many rows, the first ones of the step. Those behind them are padded rows."""
    shape: tuple[int, ...] | None = None
    """Shape of what `run` returns for all rows of the step. None: it returns None."""


StepGenerator = Generator[ExpertRequest | PendingMerge | SharedRows | None, torch.Tensor | None, StepResult]
"""The stages of a step. For each routed layer it yields a request and then the merge that needs its answer
(None for a step without rows), and is sent the answer. It returns the result of the step. Only while it is
recorded it yields SharedRows, and is sent what these return."""


class StepDropped(Exception):
    """Thrown into the generator of a step that nobody continues."""


class Step(Protocol):
    """A step under way, as the executor sees it."""

    @property
    def is_suspended(self) -> bool:
        """True while the step waits for the answer to a request."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would get any further."""
        ...

    def advance(self) -> StepResult | None:
        """Go on as far as answers are there. Returns None where the step waits for experts.

        The result is returned once. The keys and values of all rows are in the cache then.
        """
        ...


class RunningStep:
    """A `Step` that is suspended while its experts compute, so that another step can run meanwhile."""

    def __init__(self, experts: RoutedExperts, generator: StepGenerator) -> None:
        self.handle: RequestHandle | None = None
        """The request whose answer the step waits for. None before the first one and at the end."""
        self.pending: PendingMerge | None = None
        """The merge that needs that answer."""
        self._experts = experts
        self._generator = generator

    def advance(self) -> StepResult | None:
        """Go on as far as the experts have answered. Returns the result at the end, else None."""
        while True:
            answer = None if self.handle is None else self._experts.poll(self.handle)
            if self.handle is not None and answer is None:
                return None
            result = self.resume(answer)
            if result is not None:
                return result

    def resume(self, answer: torch.Tensor | None) -> StepResult | None:
        """Go on until the next request, or to the end. Returns the result at the end, else None.

        answer: [n, k, h] of the request before; None at the beginning.
        """
        # Cleared first: after an error this step waits for nothing.
        answered_handle, self.handle, self.pending = self.handle, None, None
        try:
            request = self._generator.send(answer)
        except StopIteration as end:
            result: StepResult = end.value
            return result
        finally:
            # Only now: the generator has merged the answer when it yields or returns.
            if answered_handle is not None:
                self._experts.release(answered_handle)
        assert isinstance(request, ExpertRequest)
        self.handle = self._experts.submit(request)
        pending = self._generator.send(None)
        assert not isinstance(pending, ExpertRequest | SharedRows)
        self.pending = pending
        return None

    def wrap_generator(self, wrap: Callable[[StepGenerator], StepGenerator]) -> RunningStep:
        """A step that has not begun, with its generator inside another one."""
        return RunningStep(self._experts, wrap(self._generator))

    def drop(self) -> None:
        """End a step that nobody continues.

        Its last request must have been answered, since other steps may use the memory of this one afterwards.
        """
        try:
            self._generator.throw(StepDropped())
        except StepDropped:
            pass
        if self.handle is not None:
            self._experts.release(self.handle)

    @property
    def is_suspended(self) -> bool:
        return self.handle is not None

    @property
    def is_ready(self) -> bool:
        return self.handle is None or self._experts.poll(self.handle) is not None

    def finish(self) -> StepResult:
        """`advance` to the end. Raises RuntimeError if the experts do not answer at once."""
        result = self.advance()
        if result is None:
            raise RuntimeError("this step waits for experts")
        return result


class WholeStep:
    """A `Step` that computes its experts itself and never waits for them."""

    is_suspended = False
    is_ready = True

    def __init__(self, compute: Callable[[], StepResult]) -> None:
        self._compute = compute

    def advance(self) -> StepResult:
        """Compute the whole step."""
        return self._compute()


class StepRunner(Protocol):
    """Begins the steps of a worker."""

    def begin(self, batch: TokenBatch) -> Step:
        """Begin a step. `Step.advance` computes it."""
        ...


class SegmentRunner(Protocol):
    """A StepRunner whose steps can begin between two layers."""

    def begin(self, batch: TokenBatch) -> RunningStep:
        """Begin a step. `Step.advance` computes it."""
        ...

    def begin_at_segment(self, segment: int, batch: TokenBatch, hidden: torch.Tensor) -> RunningStep:
        """Begin a step after the experts of the first `segment` routed layers. hidden: [n, h] behind them."""
        ...
