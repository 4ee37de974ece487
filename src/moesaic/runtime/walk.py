"""A step under way: it goes through the stages and stops where it waits for experts."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from moesaic.experts.client import RoutedExperts, Ticket


@dataclass(frozen=True)
class Ask:
    """What a step asks the experts of a layer; as RoutedExperts.submit."""

    layer: int
    hidden: torch.Tensor
    expert_ids: torch.Tensor
    out: torch.Tensor | None = None


Stages = Generator[Ask | None, torch.Tensor | None, torch.Tensor]
"""Yields what it asks, and then None where it needs the answer, which it is sent; returns hidden states."""


class Walk:
    """Stages that are suspended while experts compute, so that another walk may go on meanwhile."""

    def __init__(self, experts: RoutedExperts, stages: Stages) -> None:
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
                self._ticket = self._experts.submit(ask.layer, ask.hidden, ask.expert_ids, ask.out)

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
