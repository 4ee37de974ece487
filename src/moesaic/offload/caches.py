"""Where the cache of keys and values lies, and what attention reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Kernels
from moesaic.kvcache.paged import PagedKV
from moesaic.models.block import Block
from moesaic.models.spec import KVLayout
from moesaic.offload.link import Link
from moesaic.offload.parts import Part

CPU = torch.device("cpu")


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


class Resident:
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
        part.attended = block.attention(rows.query, kv.keys(layer), kv.values(layer), part.attention)

    def save(self, layer: int, part: Part) -> None:
        """It stays there."""


class Moving:
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
        """Over blocks of the micro-batch's own: first those that have tokens, then the new ones."""
        known, widths = self._blocks(batch)
        tables = np.zeros_like(batch.block_tables)
        old, new = 0, int(known.sum())
        for table, have, width in zip(tables, known.tolist(), widths.tolist(), strict=True):
            table[:have] = np.arange(old, old + have)
            table[have:width] = np.arange(new, new + width - have)
            old, new = old + have, new + width - have
        return AttentionBatch.build(replace(batch, block_tables=tables), self._block_size, self._device)

    def load(self, layer: int, part: Part) -> None:
        known, widths = self._blocks(part.batch)
        kv = self._room(int(widths.sum()))
        tables = zip(part.batch.block_tables, known.tolist(), strict=True)
        blocks = torch.from_numpy(np.concatenate([table[:have] for table, have in tables]))
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
        part.attended = block.attention(rows.query, kv.keys(0), kv.values(0), part.attention)
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

    def _blocks(self, batch: TokenBatch) -> tuple[IntArray, IntArray]:
        """[s] blocks that have tokens before this step, and blocks with this step's."""
        before = batch.context_lens - np.diff(batch.query_starts)
        return -(-before // self._block_size), -(-batch.context_lens // self._block_size)
