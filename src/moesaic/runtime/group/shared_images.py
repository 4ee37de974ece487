"""The KV and states of all ranks of a group as one memory, so that they can be sent to another group.

Each rank has the keys, values and states of its own heads. The first rank asks the others for copies, or
gives them what to write, between two steps or two layers. A copy has the bytes of rank after rank. So it fits
a group of as many ranks, and each rank gets back what the rank with its heads has computed.

Question: How is the KV of a group's ranks sent to another worker?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import Group
from moesaic.experts.collectives.packets import FloatArray
from moesaic.models.kvcache.images import Bytes, CopiedMemory, OnLayerWritten
from moesaic.models.kvcache.memory import HybridMemory, LayerMemory
from moesaic.models.kvcache.paged_kv import PagedKV
from moesaic.runtime.group.shared_prefixes import parse_order
from moesaic.runtime.prefix_cache.part import OwnPart

_MARK = -(1 << 62)
"""The first number of a request. Nothing else that is announced begins with it."""
_SIZES, _COPY_BLOCKS, _PUT_BLOCKS, _COPY_STATES, _PUT_STATES = range(5)
_FIELDS = 6
"""Numbers of a request before its blocks: mark, kind, first layer, end of the layers, skipped, rounds. For
states they are followed by page and seat."""
ROUND = 2 << 20
"""Float32 numbers of a rank in one round of a collective at most: 8 MiB."""

Result = TypeVar("Result")


class GroupMemory:
    """On the first rank: a `CopiedMemory` of all ranks."""

    def __init__(
        self, group: Group, memory: CopiedMemory, explain_loss: Callable[[ConnectionLost], MoesaicError]
    ) -> None:
        """memory: of the first rank. explain_loss: the error to raise where a rank is gone. The other ranks
        have to be ready for requests."""
        self._group, self._memory, self._explain_loss = group, memory, explain_loss
        sizes = self._run_request(self._ask_sizes).reshape(-1, 2).T.tolist()
        self._layer_bytes: list[int] = sizes[0]
        """Bytes of a block in a layer, on each rank."""
        self._state_bytes: list[int] = sizes[1]

    @property
    def num_layers(self) -> int:
        return self._memory.num_layers

    @property
    def layer_bytes(self) -> int:
        return sum(self._layer_bytes)

    @property
    def state_bytes(self) -> int:
        return sum(self._state_bytes)

    def copy_blocks(self, blocks: IntArray, layers: range) -> Bytes:
        sizes = [len(blocks) * len(layers) * size for size in self._layer_bytes]
        own_part = self._memory.copy_blocks(blocks, layers)
        return self._collect(_COPY_BLOCKS, (layers.start, layers.stop, 0), blocks, own_part, sizes)

    def put_blocks(self, blocks: IntArray, layers: range, data: Bytes, num_skipped: int = 0) -> None:
        sizes = [len(blocks) * len(layers) * size for size in self._layer_bytes]
        own_part = self._give(_PUT_BLOCKS, (layers.start, layers.stop, num_skipped), blocks, data, sizes)
        self._memory.put_blocks(blocks, layers, own_part, num_skipped)

    def copy_states(self, page: int, seat: int) -> Bytes:
        own_part, places = self._memory.copy_states(page, seat), np.array([page, seat])
        return self._collect(_COPY_STATES, (0, 0, 0), places, own_part, self._state_bytes)

    def put_states(self, page: int, seat: int, data: Bytes) -> None:
        own_part = self._give(_PUT_STATES, (0, 0, 0), np.array([page, seat]), data, self._state_bytes)
        self._memory.put_states(page, seat, own_part)

    def watch(self, on_written: OnLayerWritten) -> None:
        """Calls nothing: in the middle of a layer the other ranks compute, and answer no request."""

    def _ask_sizes(self) -> IntArray:
        self._group.announce(_request(_SIZES, (0, 0, 0), 0, np.zeros(0, np.int64)))
        return _all_sizes(self._group, self._memory)

    def _collect(
        self, kind: int, fields: tuple[int, int, int], places: IntArray, own_part: Bytes, sizes: Sequence[int]
    ) -> Bytes:
        """The bytes of each rank, in their order."""

        def run() -> list[FloatArray]:
            rounds = _rounds(sizes)
            self._group.announce(_request(kind, fields, rounds, places))
            counts = [0, *map(_numbers, sizes[1:])]
            return _exchange(self._group, rounds, [_EMPTY] * len(sizes), counts)

        received_parts = self._run_request(run)
        parts = [_bytes(part, size) for part, size in zip(received_parts, sizes, strict=True)]
        return np.concatenate([own_part, *parts[1:]])

    def _give(
        self, kind: int, fields: tuple[int, int, int], places: IntArray, data: Bytes, sizes: Sequence[int]
    ) -> Bytes:
        """Sends the other ranks their parts of `data`. Returns the first rank's part."""
        parts = np.split(data, np.cumsum(sizes)[:-1])

        def run() -> None:
            rounds = _rounds(sizes)
            self._group.announce(_request(kind, fields, rounds, places))
            _exchange(self._group, rounds, [_EMPTY, *map(_floats, parts[1:])], [0] * len(sizes))

        self._run_request(run)
        return parts[0]

    def _run_request(self, run: Callable[[], Result]) -> Result:
        """Runs one request. After an error the group is closed, since the other ranks are in the middle."""
        try:
            return run()
        except ConnectionLost as lost:
            self._group.close()
            raise self._explain_loss(lost) from None
        except BaseException:
            self._group.close()
            raise


def next_message(group: Group, memory: LayerMemory, prefixes: OwnPart | None = None) -> bytes:
    """On another rank: the next message of the first rank that is no request for its memory. It answers those
    that come before, and obeys orders about stored prefixes. Raises ConnectionLost when the first rank is
    gone, or for a damaged request.

    prefixes: this rank's part of them. None: none are stored.
    """
    while True:
        message = group.announce(b"")
        order = parse_order(message)
        if order is not None and prefixes is not None:
            order.obey(group, prefixes)
            continue
        if int.from_bytes(message[:8], "little", signed=True) != _MARK:
            return message
        if len(message) % 8 or len(message) < 8 * _FIELDS or not isinstance(memory, PagedKV | HybridMemory):
            raise ConnectionLost(f"a request for KV of {len(message)} bytes")
        _answer(np.frombuffer(message, np.int64), group, memory)


def _answer(request: IntArray, group: Group, memory: CopiedMemory) -> None:
    _, kind, start, stop, num_skipped, rounds = request[:_FIELDS].tolist()
    places, layers = request[_FIELDS:].copy(), range(start, stop)
    empty_parts, state_bytes = [_EMPTY] * group.size, memory.state_bytes
    if kind == _SIZES:
        _all_sizes(group, memory)
    elif kind in (_COPY_BLOCKS, _COPY_STATES):
        blocks = kind == _COPY_BLOCKS
        data = memory.copy_blocks(places, layers) if blocks else memory.copy_states(*places.tolist())
        _exchange(group, rounds, [_floats(data), *empty_parts[1:]], [0] * group.size)
    else:
        size = len(places) * len(layers) * memory.layer_bytes if kind == _PUT_BLOCKS else state_bytes
        numbers = [_numbers(size), *[0] * (group.size - 1)]
        data = _bytes(_exchange(group, rounds, empty_parts, numbers)[0], size)
        if kind == _PUT_BLOCKS:
            memory.put_blocks(places, layers, data, num_skipped)
        else:
            page, seat = places.tolist()
            memory.put_states(page, seat, data)


def _all_sizes(group: Group, memory: CopiedMemory) -> IntArray:
    """[2 * ranks] the bytes of a block in a layer and of states, of each rank."""
    own_sizes = np.array([memory.layer_bytes, memory.state_bytes])
    return group.gather_notes(own_sizes, np.arange(2 * group.size))


def _request(kind: int, fields: tuple[int, int, int], rounds: int, places: IntArray) -> bytes:
    return np.array([_MARK, kind, *fields, rounds, *places.tolist()], np.int64).tobytes()


def _exchange(
    group: Group, rounds: int, parts: Sequence[FloatArray], counts: Sequence[int]
) -> list[FloatArray]:
    """Sends parts[r] to rank r, and returns counts[r] numbers of each rank: none of this one."""
    received: list[list[FloatArray]] = [[] for _ in parts]
    for begin in range(0, rounds * ROUND, ROUND):
        round_parts = [part[begin : begin + ROUND] for part in parts]
        round_parts[group.rank] = _EMPTY
        round_counts = [min(max(0, count - begin), ROUND) for count in counts]
        for received_of_rank, answer in zip(received, group.answer(round_parts, round_counts), strict=True):
            # The answers are views of the transport's memory, which the next round overwrites.
            received_of_rank.append(answer.copy())
    return [np.concatenate([_EMPTY, *rounds_of_rank]) for rounds_of_rank in received]


def _rounds(sizes: Sequence[int]) -> int:
    """Rounds for so many bytes of each rank."""
    return math.ceil(_numbers(max(sizes)) / ROUND)


def _numbers(size: int) -> int:
    """Float32 numbers that have so many bytes at least."""
    return math.ceil(size / 4)


def _floats(data: Bytes) -> FloatArray:
    """[n, 1] the bytes as float32 numbers, which nobody computes with."""
    padded_bytes = np.zeros(4 * _numbers(len(data)), np.uint8)
    padded_bytes[: len(data)] = data
    return padded_bytes.view(np.float32).reshape(-1, 1)


def _bytes(numbers: FloatArray, size: int) -> Bytes:
    return numbers.reshape(-1).view(np.uint8)[:size]


_EMPTY: FloatArray = np.zeros((0, 1), np.float32)
