"""Copies of KV blocks and states as bytes, so that another worker can go on with a sequence.

The bytes are those of the cache, in any cache type. A copy is only read by a worker of the same model, block
size and cache type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.tokens import IntArray

Bytes = npt.NDArray[np.uint8]
OnLayerWritten = Callable[[int], None]
"""Gets a layer, counted among those with keys and values, once it has those of a step's rows."""


class CopiedMemory(Protocol):
    """The memory of all layers, whose blocks and states can be copied."""

    @property
    def num_layers(self) -> int:
        """Layers with keys and values."""
        ...

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block in one of these layers."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence over all layers: a page and a seat. 0 without states."""
        ...

    def copy_blocks(self, blocks: IntArray, layers: range) -> Bytes:
        """Returns [len(layers) * b * layer_bytes] the contents of these blocks in consecutive layers."""
        ...

    def put_blocks(self, blocks: IntArray, layers: range, data: Bytes, num_skipped: int = 0) -> None:
        """Writes what `copy_blocks` returned into these blocks, except the first `num_skipped` ones."""
        ...

    def copy_states(self, page: int, seat: int) -> Bytes:
        """Returns [state_bytes] the contents of a page and a seat."""
        ...

    def put_states(self, page: int, seat: int, data: Bytes) -> None:
        """Writes what `copy_states` returned."""
        ...

    def watch(self, on_layer_written: OnLayerWritten) -> None:
        """Calls `on_layer_written` from now on in the thread of the steps, layer after layer. A step that is
        replayed from a recording calls nothing."""
        ...


class ByteLines:
    """Tensors whose first index is the same, such as a block, seen as lines of bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """tensors: contiguous, [lines, ...]."""
        self._lines = [tensor.flatten(1).view(torch.uint8) for tensor in tensors if tensor.shape[1:].numel()]
        self.num_bytes = sum(lines.shape[1] for lines in self._lines)
        """Bytes of a line over all tensors."""

    def copy(self, indices: IntArray, tensors: slice = slice(None)) -> Bytes:
        """Returns these lines, tensor after tensor. tensors: of these tensors.

        The lines of all tensors are [n * num_bytes].
        """
        width = sum(lines.shape[1] for lines in self._lines[tensors])
        data = np.empty(len(indices) * width, np.uint8)
        for lines, part in self._parts(indices, data, tensors):
            # `part` is memory of the host, which index_select on a GPU cannot write to.
            if lines.device.type == "cpu":
                torch.index_select(lines, 0, torch.from_numpy(indices), out=part)
            else:
                part.copy_(lines.index_select(0, torch.from_numpy(indices).to(lines.device)))
        return data

    def put(self, indices: IntArray, data: Bytes, num_skipped: int = 0, tensors: slice = slice(None)) -> None:
        """Writes what `copy` returned, except the first `num_skipped` lines of each tensor."""
        for lines, part in self._parts(indices, data, tensors):
            places = torch.from_numpy(indices[num_skipped:]).to(lines.device)
            lines.index_copy_(0, places, part[num_skipped:].to(lines.device))

    def copy_line(self, index: int) -> Bytes:
        """Returns [num_bytes] one line of all tensors, which are in memory of this host."""
        return np.concatenate([lines[index] for lines in self._arrays])

    def put_line(self, index: int, data: Bytes) -> None:
        """Writes what `copy_line` returned. No thread of torch takes part."""
        start = 0
        for lines in self._arrays:
            stop = start + lines.shape[1]
            lines[index] = data[start:stop]
            start = stop

    @cached_property
    def _arrays(self) -> list[Bytes]:
        return [lines.numpy() for lines in self._lines]

    def _parts(
        self, indices: IntArray, data: Bytes, tensors: slice
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        data_tensor, parts, start = torch.from_numpy(data), [], 0
        for lines in self._lines[tensors]:
            stop = start + len(indices) * lines.shape[1]
            parts.append((lines, data_tensor[start:stop].view(len(indices), lines.shape[1])))
            start = stop
        return parts
