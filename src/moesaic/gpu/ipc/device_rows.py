"""Rows that stay on the GPUs of attention workers and expert servers: what both ends do on their own GPU.

A worker copies the hidden states of a request into memory that it exports, before it waits for the gate's
choice: that is the one wait of a layer, and the copy is done then. Servers read rows there, and write answers
into memory of their connection. No row goes to a host. See `gpu.ipc.device_calls`.

Question: Do rows between workers and expert servers leave the GPUs (`--transport cuda_ipc`)?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from moesaic.core.errors import ConfigError, DamagedMessage, MoesaicError
from moesaic.core.tokens import IntArray
from moesaic.experts import wire
from moesaic.experts.client import ExpertRequest, RequestArrays, RowPlace
from moesaic.experts.outstanding import AnswerMemory
from moesaic.experts.server_memory import CallMemory, HostMemory
from moesaic.gpu.ipc import device_sharing
from moesaic.gpu.ipc.device_calls import CallRows, Departures, DeviceCall, DeviceCaller, DeviceIncoming
from moesaic.gpu.ipc.device_heap import DeviceHeap, Place
from moesaic.gpu.ipc.device_sharing import DeviceSharing
from moesaic.kernels.moving import move_array, to_host_arrays
from moesaic.transport.calls import Call, Caller, Incoming

if TYPE_CHECKING:
    from moesaic.transport.shm import ShmCaller


def _numbers(memory: torch.Tensor, width: int) -> torch.Tensor:
    """Bytes as rows [n, h] of float32."""
    return memory.view(torch.float32).view(-1, width)


def _device_rows(incoming: Incoming) -> CallRows | None:
    """The rows of a call on GPUs. None: the call is in memory of the host."""
    return incoming.call_rows if isinstance(incoming, DeviceIncoming) else None


class WorkerRows:
    """The memory of a worker's GPU that expert servers read and write."""

    def __init__(self, device: torch.device, sharing: DeviceSharing) -> None:
        self._device, self._sharing = device, sharing
        self._hidden = DeviceHeap(sharing.export)
        self._answers: list[DeviceHeap] = []
        self.departures = Departures()
        self.is_frozen = False
        """Nothing is freed now: the driver would wait for a graph that waits for the host."""
        self.answers: AnswerMemory = DeviceAnswers(device)
        """Puts answers together."""

    def wrap_caller(self, caller: Caller) -> Caller:
        """The connection with memory for its answers. Any thread may call it.

        Raises ConfigError if the server's process cannot be watched.
        """
        heap = DeviceHeap(self._sharing.export)
        try:
            device_caller = DeviceCaller(cast("ShmCaller", caller), heap, self.departures)
        except MoesaicError:
            caller.close()
            raise
        self._answers.append(heap)
        return device_caller

    def arrays(self, request: ExpertRequest) -> RequestArrays:
        """The request with its rows in exported memory. The host waits for the GPU once."""
        hidden = request.hidden
        place = self._hidden.take(4 * hidden.numel())
        rows = _numbers(place.tensor[: 4 * hidden.numel()], hidden.shape[1])
        with torch.inference_mode():
            rows.copy_(hidden, non_blocking=True)
        ids, weights = to_host_arrays((request.expert_ids, request.weights))
        assert ids is not None
        for heap in (self._hidden, *self._answers):
            heap.reclaim_places()
        flat = None if weights is None else weights.reshape(-1)
        return RequestArrays(rows, ids.reshape(-1), flat, request.expert_ids.shape[1], place)

    def give_back(self, place: RowPlace) -> None:
        """No server needs the rows at this place any more."""
        assert isinstance(place, Place)
        self._hidden.give_back(place)

    def poll(self) -> None:
        """Free the memory of connections that are gone."""
        if len(self.departures) and not self.is_frozen:
            self.departures.poll()
            for heap in [heap for heap in self._answers if heap.is_closed]:
                self._answers.remove(heap)  # in place: another thread adds connections

    def close(self) -> None:
        """Free all memory that no server has open. All connections are closed."""
        self.departures.close()
        if all(heap.is_closed for heap in self._answers):
            self._hidden.close()


def worker_memory(transport: str, device: str) -> WorkerRows | None:
    """The memory of a worker with --transport cuda_ipc. None: requests that no graph sends go through the
    host.

    Raises ConfigError for a worker without a GPU.
    """
    if transport != "cuda_ipc":
        return None
    place = torch.device(device)
    if place.type != "cuda":
        raise ConfigError.field("--transport", transport, f"auto, shm, socket with --device {place.type}")
    return WorkerRows(place, device_sharing.sharing(place))


class DeviceAnswers:
    """The `AnswerMemory` of a worker whose answers are on its GPU. Torch keeps the memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate an answer of so many rows on the GPU, which is both results."""
        answers = torch.empty(rows, width, device=self._device)
        return answers, answers

    def give_back(self, memory: torch.Tensor) -> None:
        """Torch uses it again once nothing looks at it."""

    def answer(self, call: Call, width: int) -> torch.Tensor:
        """[rows, h] the answer of a call, in its own memory."""
        assert isinstance(call, DeviceCall)
        return _numbers(call.device_answer, width)

    def put(
        self, target: torch.Tensor, target_rows: IntArray, source: torch.Tensor, source_rows: IntArray
    ) -> None:
        """out[lines] = rows[places], without waiting for the GPU."""
        with torch.inference_mode():
            picked_rows = source.index_select(0, move_array(source_rows, self._device))
            target.index_copy_(0, move_array(target_rows, self._device), picked_rows)

    def clear(self, target: torch.Tensor, target_rows: IntArray) -> None:
        """out[lines] = 0, without waiting for the GPU."""
        with torch.inference_mode():
            target.index_fill_(0, move_array(target_rows, self._device), 0.0)

    def copy(self, target: torch.Tensor, answer: torch.Tensor) -> None:
        """out[:] = answer, without waiting for the GPU."""
        with torch.inference_mode():
            target.copy_(answer, non_blocking=True)


@dataclass
class DeviceCallMemory:
    """A `CallMemory`: everything is on the server's own GPU but `answer`."""

    incoming: Incoming
    request: wire.Request
    hidden: torch.Tensor
    """[m, h] the rows of the request, copied."""
    rows: torch.Tensor
    """[p, h] the results of its pairs."""
    answer: torch.Tensor
    """[p, h], or [m, h] with partial sums, in memory of the client's GPU."""
    num_computed: int = 0
    """Pairs that were computed."""

    def sum_pairs(self) -> IntArray:
        """`ServerRows.finish` has written the sums."""
        return np.arange(len(self.answer))


class ServerRows:
    """A `ServerMemory` whose rows stay on GPUs. Calls without rows are in memory of the host."""

    def __init__(self, device: torch.device, hidden: int) -> None:
        """hidden: the numbers of a row."""
        self._device, self._hidden, self._host = device, hidden, HostMemory(hidden)

    def parse(self, incoming: Incoming, num_layers: int, num_experts: int) -> wire.Request:
        """Parse a request. Raises DamagedMessage also for a call that has no rows on a GPU and should."""
        call_rows = _device_rows(incoming)
        if call_rows is None:
            return self._host.parse(incoming, num_layers, num_experts)
        count, excess_bytes = divmod(len(call_rows.rows), 4 * self._hidden)
        request = wire.parse(incoming.request, num_layers, num_experts, self._hidden, count)
        if excess_bytes or request.parts or request.greeting or request.work is not None:
            raise DamagedMessage(
                f"a request has {len(call_rows.rows)} bytes of rows on a GPU, or parts beside them"
            )
        return request

    def open(self, incoming: Incoming, request: wire.Request) -> CallMemory:
        """Read the rows of a call once, without waiting for the GPU, and make room for its results."""
        call_rows, width = _device_rows(incoming), self._hidden
        if call_rows is None:
            return self._host.open(incoming, request)
        assert request.places is not None
        with torch.inference_mode():
            hidden = _numbers(call_rows.rows, width).index_select(0, move_array(request.places, self._device))
            rows = torch.empty(len(request.experts), width, device=self._device)
            return DeviceCallMemory(incoming, request, hidden, rows, _numbers(call_rows.answer, width))

    def finish(self, computed_pairs: Sequence[tuple[CallMemory, IntArray]]) -> None:
        """Write the results of these pairs into answers, and wait for the GPU once.

        With partial sums an answer is written with its last pair. Each row's byte says whether it is finite.
        """
        answered_calls: list[tuple[DeviceCallMemory, IntArray]] = []
        finite: list[torch.Tensor] = []
        with torch.inference_mode():
            for call, pairs in computed_pairs:
                if not isinstance(call, DeviceCallMemory):
                    continue
                call.num_computed += len(pairs)
                if call.request.weights is None:
                    results, lines = call.rows.index_select(0, move_array(pairs, self._device)), pairs
                elif call.num_computed == len(call.request.experts):
                    results, lines = self._sums(call), np.arange(len(call.answer))
                else:
                    continue
                call.answer.index_copy_(0, move_array(lines, self._device), results)
                finite.append(torch.isfinite(results).all(dim=1))
                answered_calls.append((call, lines))
            if not answered_calls:
                return
            flags, _ = to_host_arrays((torch.cat(finite).to(torch.uint8), None))
        assert flags is not None
        begin = 0
        for call, lines in answered_calls:
            np.frombuffer(call.incoming.answer, np.uint8)[lines] = flags[begin : begin + len(lines)]
            begin += len(lines)

    def _sums(self, call: DeviceCallMemory) -> torch.Tensor:
        """[m, h] the weighted sums of a call's pairs, added up as a server on a CPU does."""
        weights = call.request.weights
        assert weights is not None
        sums = torch.zeros_like(call.hidden)
        weighted_rows = call.rows * move_array(np.array(weights), self._device)[:, None]
        for turn_pairs in call.request.turns:
            place = move_array(turn_pairs, self._device)
            sums.index_add_(
                0,
                move_array(call.request.rows[turn_pairs], self._device),
                weighted_rows.index_select(0, place),
            )
        return sums
