"""A paged KV cache: one tensor of blocks per layer. The scheduler decides which request uses which block.

Question: Where are the KV blocks in memory?
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import torch

from moesaic.core.tokens import IntArray
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.cache import stored_width
from moesaic.kernels.reference.cache import decode
from moesaic.kernels.table import Kernels
from moesaic.models.block import Block, Projections
from moesaic.models.kvcache.images import ByteLines, Bytes, OnLayerWritten
from moesaic.models.pages import HUGE_PAGE
from moesaic.models.spec import KVLayout


class PagedKV:
    """Keys and values of every layer in blocks of `block_size` tokens.

    layout: what one token of one layer stores. With `value_in_key` (MLA's latent) the values are the first
    `value_width` numbers of the keys and take no memory of their own. dtype: a float type, or int8 with a
    scale for each row (`kernels.cache`).
    """

    def __init__(
        self,
        layout: KVLayout,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        allocate_now: bool = False,
    ) -> None:
        """allocate_now: allocate all memory now, not when blocks are first written."""
        self._store = kernels.store
        self.device = device
        shape = (num_layers, num_blocks, block_size, layout.kv_heads)
        # zeros, not empty: masked-out slots are read and multiplied by 0, and 0 * NaN is NaN.
        key_shape = (*shape, stored_width(layout.key_width, dtype))
        self._keys = self._allocate(key_shape, dtype, device, allocate_now)
        self._values = tuple(keys[..., : layout.value_width] for keys in self._keys)
        by_layer: list[tuple[torch.Tensor, ...]] = [(keys,) for keys in self._keys]
        if not layout.value_in_key:
            width = stored_width(layout.value_width, dtype)
            self._values = self._allocate((*shape, width), dtype, device, allocate_now)
            by_layer = list(zip(self._keys, self._values, strict=True))
        self._lines = ByteLines([tensor for tensors in by_layer for tensor in tensors])
        self._tensors = len(by_layer[0]) if by_layer else 0
        """Tensors of a layer."""
        self._on_layer_written: OnLayerWritten = _ignore_layer

    def _allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, allocate_now: bool
    ) -> tuple[torch.Tensor, ...]:
        return zeros(shape, dtype, device, allocate_now)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor) -> None:
        """Stores rows.

        key: [n, kv_heads, key_width]. value: [n, kv_heads, value_width], or None if it is part of the key.
        slots: [n] block * block_size + offset.
        """
        self._store(self._keys[layer], key, slots)
        if value is not None:
            self._store(self._values[layer], value, slots)

    def keys(self, layer: int) -> torch.Tensor:
        """Returns [blocks, block_size, kv_heads, stored width of a key]."""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """Returns [blocks, block_size, kv_heads, stored width of a value], or [..., value_width] of keys."""
        return self._values[layer]

    def attend(self, layer: int, block: Block, rows: Projections, batch: AttentionBatch) -> torch.Tensor:
        """Stores the rows of a step, then lets the block attend. See `LayerMemory`."""
        self.write(layer, rows.key, rows.value, batch.slots)
        self._on_layer_written(layer)
        return block.attention(rows.query, self.keys(layer), self.values(layer), batch)

    # ---- see `CopiedMemory`

    state_bytes = 0

    @property
    def num_layers(self) -> int:
        return len(self._keys)

    @property
    def layer_bytes(self) -> int:
        return self._lines.num_bytes // max(1, len(self._keys))

    def watch(self, on_layer_written: OnLayerWritten) -> None:
        self._on_layer_written = on_layer_written

    def copy_blocks(self, blocks: IntArray, layers: range) -> Bytes:
        return self._lines.copy(blocks, self._tensor_slice(layers))

    def put_blocks(self, blocks: IntArray, layers: range, data: Bytes, num_skipped: int = 0) -> None:
        self._lines.put(blocks, data, num_skipped, self._tensor_slice(layers))

    # ---- see `BlockMemory` of the runtime

    @property
    def block_bytes(self) -> int:
        return self._lines.num_bytes

    def copy_block(self, block: int) -> Bytes:
        return self._lines.copy_line(block)

    def put_block(self, block: int, data: Bytes) -> None:
        self._lines.put_line(block, data)

    page_bytes = 0

    def copy_page(self, page: int) -> Bytes:
        return np.empty(0, np.uint8)

    def put_page(self, page: int, data: Bytes) -> None:
        pass

    def _tensor_slice(self, layers: range) -> slice:
        """The tensors of these layers."""
        return slice(layers.start * self._tensors, layers.stop * self._tensors)

    def copy_states(self, page: int, seat: int) -> Bytes:
        return np.empty(0, np.uint8)

    def put_states(self, page: int, seat: int, data: Bytes) -> None:
        pass

    def first_not_finite(self, blocks: IntArray, length: int) -> int | None:
        """The first layer that has a NaN or an infinite number in the first `length` tokens of `blocks`.

        Returns None if there is none. It reads all of these rows, so it is for errors only.
        """
        block_ids = torch.from_numpy(blocks[: -(-length // self._keys[0].shape[1])]).to(self.device)
        for layer, pair in enumerate(zip(self._keys, self._values, strict=True)):
            for tensor in pair:
                rows = tensor.index_select(0, block_ids).flatten(0, 1)[:length]
                if not torch.isfinite(decode(rows) if rows.dtype == torch.int8 else rows).all():
                    return layer
        return None


def _ignore_layer(layer: int) -> None:
    """What happens with the rows of a layer if nobody watches."""


def zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, allocate_now: bool
) -> tuple[torch.Tensor, ...]:
    """Returns one tensor of zeros for each layer.

    On a CPU, the system provides the memory page by page when a block is first written. numpy requests huge
    pages, and each layer begins at one. Blocks are used from the first on, so only the last page in use is
    partly used.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device).unbind()
    size = math.prod(shape[1:]) * dtype.itemsize
    step = size if size < HUGE_PAGE else -(-size // HUGE_PAGE) * HUGE_PAGE
    memory = np.zeros(shape[0] * step + HUGE_PAGE, np.uint8)
    begin = -memory.ctypes.data % HUGE_PAGE
    parts = [memory[start : start + size] for start in range(begin, begin + shape[0] * step, step)]
    for part in parts if allocate_now else ():
        part[:: mmap.PAGESIZE] = 0  # the system provides a page when one byte of it is written
    return tuple(torch.from_numpy(part).view(dtype).view(shape[1:]) for part in parts)


def bytes_per_token(layout: KVLayout, num_layers: int, dtype: torch.dtype) -> int:
    """Bytes that one token takes over all layers, including scales."""
    elements = layout.kv_heads * sum(stored_width(width, dtype) for width in layout.widths)
    return num_layers * elements * dtype.itemsize


class SplitKV:
    """A paged KV cache on two memory levels: the first blocks are on the fast one, the rest on the slow one.

    Block b is block b of `fast` if that has so many blocks, and else block b - their number of `slow`."""

    def __init__(self, fast: PagedKV, slow: PagedKV) -> None:
        """fast, slow: of the same layers, layout, block size and dtype."""
        self.fast, self.slow = fast, slow
        self.fast_blocks = len(fast.keys(0))
        self._block_size = slow.keys(0).shape[1]

    def attend(self, layer: int, block: Block, rows: Projections, batch: AttentionBatch) -> torch.Tensor:
        """Is not possible where the blocks are: `offload.caches.MovingCache` brings them together."""
        raise TypeError("a cache on two levels is attended to by a pass")

    def first_not_finite(self, blocks: IntArray, length: int) -> int | None:
        """The first layer with a NaN or an infinite number in the first `length` tokens of `blocks`."""
        used = blocks[: -(-length // self._block_size)]
        unfilled, found = len(used) * self._block_size - length, []
        for kv, mine, first in (
            (self.fast, used < self.fast_blocks, 0),
            (self.slow, used >= self.fast_blocks, self.fast_blocks),
        ):
            if mine.any():
                tokens = int(mine.sum()) * self._block_size - (unfilled if mine[-1] else 0)
                found.append(kv.first_not_finite(used[mine] - first, tokens))
        return min((layer for layer in found if layer is not None), default=None)
