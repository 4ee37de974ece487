"""A step under way: it goes through the stages and stops where it waits for experts."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Protocol

import torch

from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.experts.client import Ask, RoutedExperts, Ticket
from moesaic.models.block import Gated


class Combine:
    """How a row's answers become one: the two values of --combine.

    exact: the servers answer pair by pair, and the merge weighs them in the order of the ranks, as one
    process does. partial: each server weighs and sums what it has of a row (Expert-as-a-Service, section 4),
    which is fewer bytes and equal up to rounding; the merge adds the sums.
    """

    def __init__(self, partial: bool, rows: int, top_k: int, device: torch.device) -> None:
        """rows: of the largest step."""
        self._ones = torch.ones(rows, top_k, device=device) if partial else None

    def ask(self, layer: int, gated: Gated) -> tuple[Ask, Gated]:
        """The question, and what its answer is merged with."""
        assert gated.expert_ids is not None and gated.weights is not None
        if self._ones is None:
            return Ask(layer, gated.normed, gated.expert_ids), gated
        ask = Ask(layer, gated.normed, gated.expert_ids, weights=gated.weights)
        return ask, replace(gated, weights=self._ones[: len(gated.weights)])


Chosen = list[torch.Tensor | IntArray]
"""[n, k] expert ids of a step's rows, layer after layer; arrays where a recording writes them each time."""

Stages = Generator[Ask | None, torch.Tensor | None, torch.Tensor]
"""Yields what it asks, and then None where it needs the answer, which it is sent; returns hidden states."""


class Walk:
    """Stages that are suspended while experts compute, so that another walk may go on meanwhile."""

    def __init__(self, experts: RoutedExperts, stages: Stages, chosen: Chosen | None = None) -> None:
        """chosen: where the stages put the expert ids of their rows."""
        self.chosen: Chosen = [] if chosen is None else chosen
        """At the end, until the next step: [n, k] expert ids of all rows, layer after layer."""
        self._experts = experts
        self._stages = stages
        self._ticket: Ticket | None = None
        self._waits = False

    def advance(self) -> torch.Tensor | None:
        """Go on as far as answers are there. Returns hidden states [m, h] of the batch's logit_rows after the
        last block, before the final norm, once; None: it waits for experts. The keys and values of all rows
        are in the cache then, and the result holds until the next step."""
        while True:
            used, answer = None, None
            if self._waits:
                used = self._ticket
                assert used is not None
                answer = self._experts.poll(used)
                if answer is None:
                    return None
            try:
                ask = self._stages.send(answer)
            except StopIteration as end:
                hidden: torch.Tensor = end.value
                return hidden
            finally:
                if used is not None:
                    self._experts.release(used)
            self._waits = ask is None
            if ask is not None:
                self._ticket = self._experts.submit(ask)

    @property
    def ready(self) -> bool:
        """Whether `advance` would get any further."""
        return not self._waits or (self._ticket is not None and self._experts.poll(self._ticket) is not None)

    def finish(self) -> torch.Tensor:
        """`advance` to the end, where experts answer at once."""
        hidden = self.advance()
        if hidden is None:
            raise RuntimeError("this step waits for experts")
        return hidden


class Steps(Protocol):
    """What begins the steps of a worker: one process, or a group of them."""

    def begin(self, batch: TokenBatch) -> Walk:
        """Start a step. `Walk.advance` goes on with it whenever the experts have answered."""
        ...
