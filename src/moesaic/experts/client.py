"""The one interface to the routed experts, and its simplest form: a direct call.

The routed experts are a pure function

    experts(layer, hidden[n, h], expert_ids[n, k]) -> rows[n, k, h]      float32, unweighted

Gate weights are applied once, at merge, by whoever asked. Remote servers, offloaded weights and
all-to-all answer the same two calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from moesaic.kernels.table import Kernels
from moesaic.kernels.weights import ExpertWeights


@dataclass(frozen=True)
class Ticket:
    """Names one submission. Tickets of one client are never reused."""

    number: int


class RoutedExperts(Protocol):
    """Asynchronous by contract: other work may run between the two calls."""

    def submit(self, layer: int, hidden: torch.Tensor, expert_ids: torch.Tensor) -> Ticket:
        """Ask for the experts of `layer`. hidden: [n, h] float32; expert_ids: [n, k] int64, logical."""
        ...

    def poll(self, ticket: Ticket) -> torch.Tensor | None:
        """rows [n, k, h] float32, unweighted, once; None while they are not all there."""
        ...


class DirectExperts:
    """All experts of all layers in this process, computed when asked."""

    def __init__(self, weights: Mapping[int, ExpertWeights], kernels: Kernels) -> None:
        self._weights = weights
        self._kernels = kernels
        self._answers: dict[int, torch.Tensor] = {}
        self._submitted = 0

    def submit(self, layer: int, hidden: torch.Tensor, expert_ids: torch.Tensor) -> Ticket:
        ticket = Ticket(self._submitted)
        self._submitted += 1
        self._answers[ticket.number] = self._kernels.experts(self._weights[layer], hidden, expert_ids)
        return ticket

    def poll(self, ticket: Ticket) -> torch.Tensor | None:
        return self._answers.pop(ticket.number, None)
