"""A step under way: it goes through the stages and stops where it waits for experts."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.experts.client import ExpertRequest, RequestHandle, RoutedExperts
from moesaic.models.block import Block, Gated


class Combine:
    """How a row's answers become one: the two values of --combine.

    exact: the servers answer pair by pair, and the merge weighs them in the order of the ranks, as one
    process does. partial: each server weighs and sums what it has of a row (Expert-as-a-Service, section 4),
    which is fewer bytes and equal up to rounding; the merge adds the sums.
    """

    def __init__(self, partial: bool, rows: int, top_k: int, device: torch.device) -> None:
        """rows: of the largest step."""
        self._ones = torch.ones(rows, top_k, device=device) if partial else None

    def ask(self, layer: int, gated: Gated) -> tuple[ExpertRequest, Gated]:
        """The question, and what its answer is merged with."""
        assert gated.expert_ids is not None and gated.weights is not None
        if self._ones is None:
            return ExpertRequest(layer, gated.normed, gated.expert_ids), gated
        ask = ExpertRequest(layer, gated.normed, gated.expert_ids, weights=gated.weights)
        return ask, replace(gated, weights=self._ones[: len(gated.weights)])


@dataclass(frozen=True)
class PendingMerge:
    """What the answer of a layer's experts is merged with. It never leaves the process."""

    block: Block
    gated: Gated
    dense: torch.Tensor | None

    def merge(self, rows: torch.Tensor | None) -> torch.Tensor:
        """rows [n, k, h] -> hidden states [n, h] behind the block."""
        return self.block.merge(self.gated, self.dense, rows)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PendingMerge:
        """The same of other tensors."""
        gated = self.gated
        assert gated.expert_ids is not None and gated.weights is not None
        kept = gated.residual, gated.normed, gated.expert_ids, gated.weights
        dense = None if self.dense is None else change(self.dense)
        return PendingMerge(self.block, Gated(*map(change, kept)), dense)


ChosenExperts = list[torch.Tensor | IntArray]
"""[n, k] expert ids of a step's rows, layer after layer; arrays where a recording writes them each time."""

StepGenerator = Generator[ExpertRequest | PendingMerge | None, torch.Tensor | None, torch.Tensor]
"""Yields what it asks, and then, where it needs the answer, which it is sent, what that will be merged with
(None: no rows); returns hidden states."""


class StepDropped(Exception):
    """Is thrown into stages from which nobody goes on, once nothing of theirs will be asked again."""


class RunningStep:
    """Stages that are suspended while experts compute, so that another walk may go on meanwhile."""

    def __init__(
        self, experts: RoutedExperts, stages: StepGenerator, chosen: ChosenExperts | None = None
    ) -> None:
        """chosen: where the stages put the expert ids of their rows."""
        self.chosen: ChosenExperts = [] if chosen is None else chosen
        """At the end, until the next step: [n, k] expert ids of all rows, layer after layer."""
        self.handle: RequestHandle | None = None
        """Of the question whose answer it waits for; None: before the first one, and at the end."""
        self.held: PendingMerge | None = None
        """What that answer will be merged with."""
        self._experts = experts
        self._stages = stages

    def advance(self) -> torch.Tensor | None:
        """Go on as far as answers are there. Returns hidden states [m, h] of the batch's logit_rows after the
        last block, before the final norm, once; None: it waits for experts. The keys and values of all rows
        are in the cache then, and the result holds until the next step."""
        while True:
            answer = None if self.handle is None else self._experts.poll(self.handle)
            if self.handle is not None and answer is None:
                return None
            hidden = self.go_on(answer)
            if hidden is not None:
                return hidden

    def go_on(self, answer: torch.Tensor | None) -> torch.Tensor | None:
        """To the next question, or to the end: the same result. answer: [n, k, h] to the question before."""
        used, self.handle, self.held = self.handle, None, None
        try:
            ask = self._stages.send(answer)
        except StopIteration as end:
            hidden: torch.Tensor = end.value
            return hidden
        finally:
            if used is not None:
                self._experts.release(used)
        assert isinstance(ask, ExpertRequest)
        self.handle = self._experts.submit(ask)
        held = self._stages.send(None)
        assert not isinstance(held, ExpertRequest)
        self.held = held
        return None

    def drop(self) -> None:
        """Nobody goes on from here. The last question has its answer, so that other steps may have the memory
        of this one."""
        try:
            self._stages.throw(StepDropped())
        except StepDropped:
            pass
        if self.handle is not None:
            self._experts.release(self.handle)

    @property
    def ready(self) -> bool:
        """Whether `advance` would get any further."""
        return self.handle is None or self._experts.poll(self.handle) is not None

    def finish(self) -> torch.Tensor:
        """`advance` to the end, where experts answer at once."""
        hidden = self.advance()
        if hidden is None:
            raise RuntimeError("this step waits for experts")
        return hidden


class StepRunner(Protocol):
    """What begins the steps of a worker: one process, or a group of them."""

    def begin(self, batch: TokenBatch) -> RunningStep:
        """Start a step. `RunningStep.advance` goes on with it whenever the experts have answered."""
        ...
