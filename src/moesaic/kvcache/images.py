"""Copies of KV blocks and states as bytes, so that another worker can go on with a sequence.

The bytes are those of the cache, in any cache type. A copy is only read by a worker of the same model, block
size and cache type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.tokens import IntArray

Bytes = npt.NDArray[np.uint8]


class CopiedMemory(Protocol):
    """The memory of all layers, whose blocks and states can be copied."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence over all layers: a page and a seat. 0 without states."""
        ...

    def copy_blocks(self, blocks: IntArray) -> Bytes:
        """Returns [b * block_bytes] the contents of these blocks."""
        ...

    def put_blocks(self, blocks: IntArray, data: Bytes, skipped: int = 0) -> None:
        """Writes what `copy_blocks` returned into these blocks, except the first `skipped` ones."""
        ...

    def copy_states(self, page: int, seat: int) -> Bytes:
        """Returns [state_bytes] the contents of a page and a seat."""
        ...

    def put_states(self, page: int, seat: int, data: Bytes) -> None:
        """Writes what `copy_states` returned."""
        ...


class ByteLines:
    """Tensors whose first index is the same, such as a block, seen as lines of bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """tensors: contiguous, [lines, ...]."""
        self._lines = [one.flatten(1).view(torch.uint8) for one in tensors if one.shape[1:].numel()]
        self.num_bytes = sum(lines.shape[1] for lines in self._lines)
        """Bytes of a line over all tensors."""

    def copy(self, indices: IntArray) -> Bytes:
        """Returns [n * num_bytes] these lines, tensor after tensor."""
        data = np.empty(len(indices) * self.num_bytes, np.uint8)
        for lines, part in self._parts(indices, data):
            if lines.device.type == "cpu":
                torch.index_select(lines, 0, torch.from_numpy(indices), out=part)
            else:
                part.copy_(lines.index_select(0, torch.from_numpy(indices).to(lines.device)))
        return data

    def put(self, indices: IntArray, data: Bytes, skipped: int = 0) -> None:
        """Writes what `copy` returned, except the first `skipped` lines."""
        for lines, part in self._parts(indices, data):
            chosen = torch.from_numpy(indices[skipped:]).to(lines.device)
            lines.index_copy_(0, chosen, part[skipped:].to(lines.device))

    def _parts(self, indices: IntArray, data: Bytes) -> list[tuple[torch.Tensor, torch.Tensor]]:
        whole, parts, start = torch.from_numpy(data), [], 0
        for lines in self._lines:
            stop = start + len(indices) * lines.shape[1]
            parts.append((lines, whole[start:stop].view(len(indices), lines.shape[1])))
            start = stop
        return parts
