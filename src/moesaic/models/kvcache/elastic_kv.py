"""A paged KV cache in RAM that gives back the memory of its last blocks, and takes it again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from moesaic.kernels.cache import stored_width
from moesaic.kernels.table import Kernels
from moesaic.models.kvcache.paged_kv import PagedKV
from moesaic.models.pages import ReservedMemory
from moesaic.models.spec import KVLayout


class ElasticKV(PagedKV):
    """A PagedKV whose blocks 0 : num_blocks have memory. The others only have addresses."""

    def __init__(
        self,
        layout: KVLayout,
        num_layers: int,
        most_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        kernels: Kernels,
        page: int,
    ) -> None:
        """most_blocks: with which the cache begins, and to which it may grow. page: bytes of a page, as in
        `pages.ReservedMemory`. Raises OSError if there are not so many addresses."""
        self._page = page
        self._tensors_in_memory: list[tuple[ReservedMemory, int, int]] = []
        """Memory, where a tensor begins there, and bytes of one of its blocks."""
        super().__init__(layout, num_layers, most_blocks, block_size, dtype, torch.device("cpu"), kernels)
        self._most_blocks, self.num_blocks = most_blocks, 0
        self.resize(most_blocks)

    def resize(self, num_blocks: int) -> None:
        """Give back the blocks from `num_blocks` on, or take memory for those before it.

        What was in blocks that had no memory is zeros. Raises ValueError for more blocks than at the start.
        """
        if not 0 < num_blocks <= self._most_blocks:
            raise ValueError(f"{num_blocks} blocks of a cache of at most {self._most_blocks}")
        for memory, begin, line in self._tensors_in_memory:
            end, old_end = (
                begin + _round_up(count * line, self._page) for count in (num_blocks, self.num_blocks)
            )
            if end > old_end:
                memory.provide(old_end, end)
            else:
                memory.give_back(end, old_end)
        self.num_blocks = num_blocks

    def _allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, allocate_now: bool
    ) -> tuple[torch.Tensor, ...]:
        """Tensors [blocks, ...] of zeros, one for each layer. Each of them begins at a page."""
        size, line = math.prod(shape[1:]) * dtype.itemsize, math.prod(shape[2:]) * dtype.itemsize
        step = _round_up(size, self._page)
        memory = ReservedMemory(shape[0] * step, self._page)
        begins = range(0, shape[0] * step, step)
        self._tensors_in_memory += [(memory, begin, line) for begin in begins]
        parts = [torch.from_numpy(memory.array[begin : begin + size]) for begin in begins]
        return tuple(part.view(dtype).view(shape[1:]) for part in parts)


def list_lines(layout: KVLayout, num_layers: int, block_size: int, dtype: torch.dtype) -> Sequence[int]:
    """Bytes of a block in each tensor of a cache."""
    elements = block_size * layout.kv_heads * dtype.itemsize
    return [elements * stored_width(width, dtype) for width in layout.widths for _ in range(num_layers)]


def _round_up(size: int, page: int) -> int:
    return -(-size // page) * page
