"""The one interface to the routed experts, and its simplest form: a direct call.

The routed experts are a pure function

    experts(layer, hidden[n, h], expert_ids[n, k]) -> rows[n, k, h]      float32, unweighted

Gate weights are applied once, at merge, by whoever asked. Remote servers, offloaded weights and
all-to-all answer the same two calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from moesaic.core.experts import Directory
from moesaic.core.metrics import ExpertStats
from moesaic.core.tokens import FloatRows, IntArray
from moesaic.kernels.table import Kernels
from moesaic.kernels.weights import ExpertWeights


@dataclass(frozen=True)
class RequestHandle:
    """Names one submission. Tickets of one client are never reused."""

    number: int


@dataclass(frozen=True)
class ExpertRequest:
    """A question to the experts of a layer."""

    layer: int
    hidden: torch.Tensor
    """[n, h] float32"""
    expert_ids: torch.Tensor
    """[n, k] int64, logical."""
    weights: torch.Tensor | None = None
    """[n, k] float32, if partial sums are wanted: of a row's pairs that one server answers the first is their
    weighted sum, the others are zeros."""

    @cached_property
    def arrays(self) -> RequestArrays:
        """A recorded step asks the same again and again: of tensors on the CPU these are views."""
        hidden, top_k = self.hidden.cpu().contiguous().numpy(), self.expert_ids.shape[1]
        return RequestArrays(
            hidden,
            self.expert_ids.cpu().numpy().reshape(-1),
            None if self.weights is None else self.weights.cpu().numpy().reshape(-1),
            top_k,
        )


@dataclass(frozen=True)
class RequestArrays:
    """A question pair by pair; (row, rank) is pair row * k + rank."""

    hidden: FloatRows
    """[n, h]"""
    experts: IntArray
    """[n * k]"""
    weights: FloatRows | None
    """[n * k]"""
    top_k: int


class RoutedExperts(Protocol):
    """Asynchronous by contract: other work may run between the two calls."""

    def submit(self, ask: ExpertRequest) -> RequestHandle: ...

    def poll(self, handle: RequestHandle) -> torch.Tensor | None:
        """rows [n, k, h] float32, unweighted unless partial sums were asked for, until the next call;
        None while some are missing. They may lie on the CPU though the question did not."""
        ...

    def release(self, handle: RequestHandle) -> None:
        """The rows of this ticket were used: their memory may hold others."""
        ...

    @property
    def busy(self) -> bool:
        """True while some ticket's rows are not all there."""
        ...

    def update(self, directory: Directory, secret: bytes) -> None:
        """Who serves the experts from now on."""
        ...

    @property
    def settled(self) -> int:
        """No call under way was routed by a directory older than this version; -1: there was none yet."""
        ...

    def wait(self, timeout: float | None, wakeup: int) -> bool:
        """Sleep until rows come in or the file descriptor `wakeup` is readable, at most `timeout` seconds.

        False when the time was over.
        """
        ...

    def enter(self, work: bool) -> None:
        """This worker is at the beginning of a step that all begin together, with or without rows."""
        ...

    def entered(self) -> bool:
        """True once after `enter`, when all begin."""
        ...

    def stats(self) -> ExpertStats: ...


class DirectExperts:
    """All experts of all layers in this process, computed when asked."""

    def __init__(self, weights: Mapping[int, ExpertWeights], kernels: Kernels, rows: int) -> None:
        """rows: of the largest step."""
        self._weights = weights
        self._kernels = kernels
        self._rows = rows
        self._answer: tuple[RequestHandle, torch.Tensor] | None = None
        self._submitted = 0
        self._entering = False
        self._memory: torch.Tensor | None = None
        """[rows, k, h] of every answer, from the first one on; what no step reaches the system never gives.
        Fresh memory for each would be paged in anew, which took a fifth of the time of a prefill."""

    def submit(self, ask: ExpertRequest) -> RequestHandle:
        if ask.weights is not None:
            raise ValueError("a direct call has no bytes to save: partial sums are for servers")
        handle = RequestHandle(self._submitted)
        self._submitted += 1
        out = self._room(ask.hidden, ask.expert_ids)
        rows = self._kernels.experts(self._weights[ask.layer], ask.hidden, ask.expert_ids, out)
        self._answer = (handle, rows)
        return handle

    def poll(self, handle: RequestHandle) -> torch.Tensor | None:
        return self._answer[1] if self._answer is not None and self._answer[0] == handle else None

    def release(self, handle: RequestHandle) -> None:
        self._answer = None

    @property
    def busy(self) -> bool:
        return False

    def update(self, directory: Directory, secret: bytes) -> None:
        """Nobody else is asked."""

    @property
    def settled(self) -> int:
        return -1

    def wait(self, timeout: float | None, wakeup: int) -> bool:
        """Every answer is there at once."""
        return True

    def enter(self, work: bool) -> None:
        """There is nobody to wait for."""
        self._entering = work

    def entered(self) -> bool:
        entering, self._entering = self._entering, False
        return entering

    def stats(self) -> ExpertStats:
        return ExpertStats()

    def _room(self, hidden: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """[n, k, h], over the answer before."""
        if self._memory is None:
            self._memory = hidden.new_empty(self._rows, expert_ids.shape[1], hidden.shape[1])
        return self._memory[: len(hidden)]
