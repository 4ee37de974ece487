"""Where the cache of keys and values lies, and what attention reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Kernels
from moesaic.kvcache.paged import PagedKV
from moesaic.models.block import Block
from moesaic.models.spec import KVLayout
from moesaic.offload.link import Link
from moesaic.offload.parts import Part

CPU = torch.device("cpu")
BoolArray = npt.NDArray[np.bool_]


class Cache(Protocol):
    """What a pass asks of the cache. `load` and `save` stand on the link's lanes."""

    def attention(self, batch: TokenBatch) -> AttentionBatch:
        """What attention needs to know about a micro-batch's rows."""
        ...

    def load(self, layer: int, part: Part) -> None:
        """Bring what the micro-batch attends to."""
        ...

    def attend(self, layer: int, block: Block, part: Part) -> None:
        """Keep the rows' keys and values, and leave what attention makes of them."""
        ...

    def save(self, layer: int, part: Part) -> None:
        """Bring the rows' keys and values to where the cache is."""
        ...


class Attending:
    """How rows attend to a layer of a cache that has them; offload.padding has another way."""

    def _over(
        self, block: Block, keys: torch.Tensor, values: torch.Tensor | None, part: Part
    ) -> torch.Tensor:
        """[n, Hq * dv]"""
        assert part.projected is not None
        return block.attention(part.projected.query, keys, values, part.attention)


class Resident(Attending):
    """The cache is on the level where attention is computed: nothing moves."""

    def __init__(self, kv: PagedKV, block_size: int) -> None:
        self._kv = kv
        self._block_size = block_size

    def attention(self, batch: TokenBatch) -> AttentionBatch:
        return AttentionBatch.build(batch, self._block_size, self._kv.device)

    def load(self, layer: int, part: Part) -> None:
        """It is there."""

    def attend(self, layer: int, block: Block, part: Part) -> None:
        rows, kv = part.projected, self._kv
        assert rows is not None
        kv.write(layer, rows.key, rows.value, part.attention.slots)
        part.attended = self._over(block, kv.keys(layer), kv.values(layer), part)

    def save(self, layer: int, part: Part) -> None:
        """It stays there."""


class Moving(Attending):
    """The cache is on the slow level and attention on the fast one.

    A micro-batch's blocks of one layer come down to blocks of its own, its rows' keys and values are written
    there for attention, and go up by themselves. In prefill a chunk's earlier tokens come without a task.
    """

    def __init__(
        self,
        kv: PagedKV,
        layout: KVLayout,
        block_size: int,
        kernels: Kernels,
        down: Link,
        up: Link,
        device: torch.device = CPU,
    ) -> None:
        """kv: of all layers, on the slow level. kernels, device: of the fast processor."""
        self._kv = kv
        self._layout = layout
        self._block_size = block_size
        self._kernels, self._device = kernels, device
        self._down, self._up = down, up
        self._free: list[PagedKV] = []
        """Blocks on the fast level that no micro-batch uses: the system would page fresh ones in anew."""

    def attention(self, batch: TokenBatch) -> AttentionBatch:
        return AttentionBatch.build(self._here(batch), self._block_size, self._device)

    def load(self, layer: int, part: Part) -> None:
        known, held = self._blocks(part.batch)
        kv = self._room(int(held.sum()))
        blocks = torch.from_numpy(part.batch.block_tables[known])
        if len(blocks):
            self._down.gather(kv.keys(0)[: len(blocks)], self._kv.keys(layer), blocks)
            if not self._layout.value_in_key:
                self._down.gather(kv.values(0)[: len(blocks)], self._kv.values(layer), blocks)
        part.local[layer] = kv

    def attend(self, layer: int, block: Block, part: Part) -> None:
        if layer not in part.local:
            self.load(layer, part)
        kv, rows = part.local.pop(layer), part.projected
        assert rows is not None
        kv.write(0, rows.key, rows.value, part.attention.slots)
        part.attended = self._over(block, kv.keys(0), kv.values(0), part)
        part.written[layer] = rows.key, rows.value
        self._down.finish()  # others may have these blocks now
        self.take_back(kv)

    def save(self, layer: int, part: Part) -> None:
        key, value = part.written.pop(layer)
        slots = AttentionBatch.build(part.batch, self._block_size).slots
        above = None if value is None else self._up.copy(value)
        self._kv.write(layer, self._up.copy(key), above, slots)

    def take_back(self, kv: PagedKV) -> None:
        """Blocks that `load` brought a part and that it needs no more."""
        self._free.append(kv)

    def _room(self, blocks: int) -> PagedKV:
        """A cache of one layer, of at least so many blocks."""
        while self._free:
            kv = self._free.pop()
            if len(kv.keys(0)) >= blocks:
                return kv
        dtype, size = self._kv.keys(0).dtype, self._block_size
        return PagedKV(self._layout, 1, blocks, size, dtype, self._device, self._kernels)

    def _here(self, batch: TokenBatch) -> TokenBatch:
        """Over blocks of the micro-batch's own: first those that come down, then the new ones."""
        known, held = self._blocks(batch)
        tables, come = np.zeros_like(batch.block_tables), int(known.sum())
        tables[known] = np.arange(come)
        tables[held & ~known] = np.arange(come, int(held.sum()))
        return replace(batch, block_tables=tables)

    def _blocks(self, batch: TokenBatch) -> tuple[BoolArray, BoolArray]:
        """[s, b] of the tables: blocks with tokens before this step, which come down; these and its own."""
        before = batch.context_lens - np.diff(batch.query_starts)
        place = self._block_size * np.arange(batch.block_tables.shape[1])
        return place < before[:, None], place < batch.context_lens[:, None]
