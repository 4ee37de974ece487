"""The one interface to the routed experts, and its simplest implementation: a direct call.

The routed experts are a pure function

    experts(layer, hidden[n, h], expert_ids[n, k]) -> rows[n, k, h]      float32, unweighted

The caller applies the gate's weights once, at merge; with partial sums the servers do. Expert servers answer
the same calls.

Question: How does an attention worker ask for experts?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from moesaic.core.experts import Directory
from moesaic.core.messages import FaultyServer, JoinJob
from moesaic.core.tokens import FloatRows, IntArray
from moesaic.kernels.moving import to_host_arrays
from moesaic.kernels.table import Kernels
from moesaic.kernels.weights import ExpertWeights


class RowPlace(Protocol):
    """A place in memory of the own GPU, from which servers read the rows of a request."""

    @property
    def size(self) -> int:
        """Bytes of it."""
        ...


@dataclass(frozen=True)
class RequestHandle:
    """Names one request. A client never uses a number twice."""

    number: int


@dataclass(frozen=True)
class ExpertRequest:
    """Rows, and the experts of one layer that each of them needs."""

    layer: int
    hidden: torch.Tensor
    """[n, h] float32"""
    expert_ids: torch.Tensor
    """[n, k] int64, logical ids."""
    weights: torch.Tensor | None = None
    """[n, k] float32 gate weights, if partial sums are wanted. None: the answers are unweighted.

    Where a server answers several pairs of a row, the first of them gets their weighted sum and the others
    get zeros.
    """

    @cached_property
    def arrays(self) -> RequestArrays:
        """The request as numpy arrays: views, where the tensors are on the CPU. From a GPU all of them come
        through pinned memory, and the host waits for it once.

        They are kept because a recorded step submits the same request at every replay.
        """
        hidden, ids, weights = to_host_arrays((self.hidden, self.expert_ids, self.weights))
        assert hidden is not None and ids is not None
        flat = None if weights is None else weights.reshape(-1)
        return RequestArrays(hidden, ids.reshape(-1), flat, self.expert_ids.shape[1])


@dataclass(frozen=True)
class RequestArrays:
    """A request pair by pair. Pair row * k + slot stands for one expert of a row.

    slot: position in the row's top-k, 0 to k - 1.
    """

    hidden: Any
    """[n, h] float32: an array, or a tensor on the GPU where the rows stay there."""
    experts: IntArray
    """[n * k]"""
    weights: FloatRows | None
    """[n * k]"""
    top_k: int
    place: RowPlace | None = None
    """Where servers read the rows on the GPU. None: the rows are sent."""


class RoutedExperts(Protocol):
    """Computes routed experts. Other work may run between `submit` and `poll`."""

    def submit(self, request: ExpertRequest) -> RequestHandle: ...

    def poll(self, handle: RequestHandle) -> torch.Tensor | None:
        """The answer [n, k, h] float32, or None while rows are missing. It holds until the next call.

        It is unweighted unless partial sums were asked for. It may be on the CPU though the request was not.
        """
        ...

    def release(self, handle: RequestHandle) -> None:
        """The answer was used, so its memory may be used again."""
        ...


class ExpertServers(Protocol):
    """The expert servers of a worker, as its loop sees them."""

    @property
    def oldest_version_in_use(self) -> int:
        """No call under way was routed by a directory older than this version. -1: there is no directory."""
        ...

    @property
    def job_id(self) -> bytes:
        """The name of a job of GPUs that this worker can begin. Empty: it joins none."""
        ...

    def update(self, directory: Directory, secret: bytes) -> None:
        """Use these servers from now on."""
        ...

    def meet(self, place: JoinJob) -> None:
        """Join a job of GPUs, with the servers. A client that asks them by other means only does nothing."""
        ...

    def take_faulty_servers(self) -> list[FaultyServer]:
        """The servers that were given up for their answers since the last call."""
        ...

    def wait(self, timeout: float | None, wakeup: int) -> bool:
        """Sleep until rows come in or the file descriptor `wakeup` is readable, at most `timeout` seconds.

        Returns False when the time was over.
        """
        ...

    def enter_barrier(self, work: bool) -> None:
        """Wait at the barrier of a step that all workers begin together. work: with rows or without."""
        ...

    def poll_barrier(self) -> bool:
        """True once after `enter_barrier`, when all workers begin the step."""
        ...

    def close(self) -> None:
        """Close all connections. Nothing of it is used after that."""
        ...


class NoServers:
    """The ExpertServers of a worker that computes all experts itself."""

    oldest_version_in_use = -1
    job_id = b""

    def update(self, directory: Directory, secret: bytes) -> None:
        """Ignores the directory."""

    def meet(self, place: JoinJob) -> None:
        """There is nobody to meet."""

    def take_faulty_servers(self) -> list[FaultyServer]:
        return []

    def wait(self, timeout: float | None, wakeup: int) -> bool:
        """Returns at once: no answer is awaited."""
        return False

    def enter_barrier(self, work: bool) -> None:
        """Has no barrier."""
        raise RuntimeError("the barrier schedule needs expert servers")

    def poll_barrier(self) -> bool:
        return False

    def close(self) -> None:
        """Has no connections."""


class DirectExperts:
    """`RoutedExperts` with all experts of all layers in this process. `submit` computes the answer."""

    def __init__(self, weights: Mapping[int, ExpertWeights], kernels: Kernels, rows: int) -> None:
        """rows: the most rows of a step."""
        self._weights = weights
        self._kernels = kernels
        self._rows = rows
        self._answer: tuple[RequestHandle, torch.Tensor] | None = None
        self._num_submitted = 0
        self._memory: torch.Tensor | None = None
        """[rows, k, h] of every answer, allocated at the first one. The system provides only the pages that a
        step reaches. Fresh memory for each answer took a fifth of the time of a prefill."""

    def submit(self, request: ExpertRequest) -> RequestHandle:
        """Raises ValueError for a request of partial sums."""
        if request.weights is not None:
            raise ValueError("partial sums are for expert servers: a direct call sends nothing")
        handle = RequestHandle(self._num_submitted)
        self._num_submitted += 1
        target = self._answer_memory(request.hidden, request.expert_ids)
        rows = self._kernels.experts(self._weights[request.layer], request.hidden, request.expert_ids, target)
        # Only the last answer is kept: a direct call is answered before the next request comes.
        self._answer = (handle, rows)
        return handle

    def poll(self, handle: RequestHandle) -> torch.Tensor | None:
        return self._answer[1] if self._answer is not None and self._answer[0] == handle else None

    def release(self, handle: RequestHandle) -> None:
        self._answer = None

    def _answer_memory(self, hidden: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """[n, k, h] in the memory of the answer before."""
        if self._memory is None:
            self._memory = hidden.new_empty(self._rows, expert_ids.shape[1], hidden.shape[1])
        return self._memory[: len(hidden)]
