"""Where the KV cache is stored, and how attention reads it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Kernels
from moesaic.models.block import Block
from moesaic.models.kvcache.paged_kv import PagedKV
from moesaic.models.kvcache.states import StateCache
from moesaic.models.spec import KVLayout
from moesaic.offload.link import Link
from moesaic.offload.parts import MicroBatch

CPU = torch.device("cpu")
BoolArray = npt.NDArray[np.bool_]


class Cache(Protocol):
    """The KV cache as a pass uses it. `load` and `save` run on the lanes of the links."""

    def attention(self, batch: TokenBatch) -> AttentionBatch:
        """Returns the attention metadata of a micro-batch's rows."""
        ...

    def load(self, layer: int, part: MicroBatch) -> None:
        """Copies the cache blocks that the micro-batch attends to."""
        ...

    def attend(self, layer: int, block: Block, part: MicroBatch) -> None:
        """Stores the rows' keys and values, and sets `part.attended` to the attention output."""
        ...

    def save(self, layer: int, part: MicroBatch) -> None:
        """Copies the rows' keys and values to the level that stores the cache."""
        ...


class CacheAttention:
    """Attention over a cache that holds the rows' keys and values. offload.padding overrides it."""

    def _compute_attention(
        self, block: Block, keys: torch.Tensor, values: torch.Tensor | None, part: MicroBatch
    ) -> torch.Tensor:
        """Returns the attention output [n, Hq * dv]."""
        assert part.projections is not None
        return block.attention(part.projections.query, keys, values, part.attention)


class ResidentCache(CacheAttention):
    """A cache on the level that computes attention, so nothing is copied."""

    def __init__(self, kv: PagedKV, block_size: int) -> None:
        self._kv = kv
        self._block_size = block_size

    def attention(self, batch: TokenBatch) -> AttentionBatch:
        return AttentionBatch.build(batch, self._block_size, self._kv.device)

    def load(self, layer: int, part: MicroBatch) -> None:
        """Does nothing: the cache is already there."""

    def attend(self, layer: int, block: Block, part: MicroBatch) -> None:
        rows, kv = part.projections, self._kv
        assert rows is not None
        kv.write(layer, rows.key, rows.value, part.attention.slots)
        part.attention_output = self._compute_attention(block, kv.keys(layer), kv.values(layer), part)

    def save(self, layer: int, part: MicroBatch) -> None:
        """Does nothing: the cache is already there."""


class MovingCache(CacheAttention):
    """A cache of which all or some blocks are on the slow level, with attention on the fast level.

    `load` copies a micro-batch's blocks of one layer to blocks of its own on the fast level: those of the
    slow level over the link, the others within the memory. Attention writes the rows' keys and values there,
    and `save` copies only those to where their block is. In prefill no task loads the earlier tokens of a
    chunked prompt: `attend` loads them.
    """

    def __init__(
        self,
        kv: PagedKV,
        layout: KVLayout,
        block_size: int,
        kernels: Kernels,
        load_link: Link,
        save_link: Link,
        device: torch.device = CPU,
        fast: PagedKV | None = None,
    ) -> None:
        """kv: cache of all layers, on the slow level. kernels, device: those of the fast processor. fast: the
        cache's first blocks (see `kvcache.split`), on the fast level; None: all are on the slow one."""
        self._kv, self._fast = kv, fast
        self._fast_blocks = 0 if fast is None else len(fast.keys(0))
        self._layout = layout
        self._block_size = block_size
        self._kernels, self._device = kernels, device
        self._load_link, self._save_link = load_link, save_link
        self._free: list[PagedKV] = []
        """Caches on the fast level that no micro-batch uses. Fresh ones would cause page faults again."""

    def attention(self, batch: TokenBatch) -> AttentionBatch:
        return AttentionBatch.build(self._renumber_blocks(batch), self._block_size, self._device)

    def load(self, layer: int, part: MicroBatch) -> None:
        loaded_mask, used_mask = self._blocks(part.batch)
        kv, blocks = self._room(int(used_mask.sum())), part.batch.block_tables[loaded_mask]
        slow = torch.from_numpy(blocks[blocks >= self._fast_blocks] - self._fast_blocks)
        fast = torch.from_numpy(blocks[blocks < self._fast_blocks]).to(self._device)
        # `_renumber_blocks` gives the blocks of the slow level the lowest numbers, so they are copied first.
        first, last = len(slow), len(blocks)
        stays = self._fast
        sides = [(kv.keys(0), self._kv.keys(layer), None if stays is None else stays.keys(layer))]
        if not self._layout.value_in_key:
            fast_values = None if stays is None else stays.values(layer)
            sides.append((kv.values(0), self._kv.values(layer), fast_values))
        for target, below, fast_values in sides:
            if first:
                self._load_link.gather(target[:first], below, slow)
            if fast_values is not None and last > first:
                torch.index_select(fast_values, 0, fast, out=target[first:last])
        part.local[layer] = kv

    def attend(self, layer: int, block: Block, part: MicroBatch) -> None:
        if layer not in part.local:
            self.load(layer, part)
        kv, rows = part.local.pop(layer), part.projections
        assert rows is not None
        # Layer 0: a cache on the fast level has one layer, which any layer of the model may use.
        kv.write(0, rows.key, rows.value, part.attention.slots)
        part.attention_output = self._compute_attention(block, kv.keys(0), kv.values(0), part)
        part.unsaved_rows[layer] = rows.key, rows.value
        self._load_link.finish()  # afterwards another micro-batch may use these blocks
        self.take_back(kv)

    def save(self, layer: int, part: MicroBatch) -> None:
        key, value = part.unsaved_rows.pop(layer)
        slots = AttentionBatch.build(part.batch, self._block_size).slots
        first = self._fast_blocks * self._block_size
        if self._fast is not None and bool((slots < first).any()):
            stays = slots < first
            fast_rows, slow_rows = stays.to(key.device), (~stays).to(key.device)
            fast_value = None if value is None else value[fast_rows]
            self._fast.write(layer, key[fast_rows], fast_value, slots[stays].to(self._device))
            key, slots = key[slow_rows], slots[~stays]
            value = None if value is None else value[slow_rows]
        if len(slots):
            slow_value = None if value is None else self._save_link.copy(value)
            self._kv.write(layer, self._save_link.copy(key), slow_value, slots - first)

    def take_back(self, kv: PagedKV) -> None:
        """Takes back blocks that `load` gave to a part, once the part does not need them."""
        self._free.append(kv)

    def _room(self, blocks: int) -> PagedKV:
        """Returns a cache of one layer with at least `blocks` blocks."""
        while self._free:
            kv = self._free.pop()
            if len(kv.keys(0)) >= blocks:
                return kv
        dtype, size = self._kv.keys(0).dtype, self._block_size
        return PagedKV(self._layout, 1, blocks, size, dtype, self._device, self._kernels)

    def _renumber_blocks(self, batch: TokenBatch) -> TokenBatch:
        """Renumbers the batch's blocks for a cache of its own: those of the slow level, those of the fast
        one, then the new ones."""
        loaded_mask, used_mask = self._blocks(batch)
        tables, num_loaded = np.zeros_like(batch.block_tables), int(loaded_mask.sum())
        slow = loaded_mask & (batch.block_tables >= self._fast_blocks)
        first = int(slow.sum())
        tables[slow] = np.arange(first)
        tables[loaded_mask & ~slow] = np.arange(first, num_loaded)
        tables[used_mask & ~loaded_mask] = np.arange(num_loaded, int(used_mask.sum()))
        return replace(batch, block_tables=tables)

    def _blocks(self, batch: TokenBatch) -> tuple[BoolArray, BoolArray]:
        """Returns two masks [s, b] over the block tables.

        The first marks blocks with tokens before this step, which are loaded. The second also marks the
        blocks with this step's tokens.
        """
        earlier_tokens = batch.context_lens - np.diff(batch.query_starts)
        place = self._block_size * np.arange(batch.block_tables.shape[1])
        return place < earlier_tokens[:, None], place < batch.context_lens[:, None]


class HybridCache:
    """The `Cache` of a model of which some layers keep states: these stay where they are.

    Another cache has the layers with keys and values.
    """

    def __init__(
        self, paged_cache: Cache, states: StateCache, state_layers: Collection[int], num_layers: int
    ) -> None:
        self._paged_cache, self._states = paged_cache, states
        kv_layers = [layer for layer in range(num_layers) if layer not in state_layers]
        self._paged_layers = {layer: index for index, layer in enumerate(kv_layers)}
        self._state_layers = {layer: index for index, layer in enumerate(sorted(state_layers))}

    def attention(self, batch: TokenBatch) -> AttentionBatch:
        return self._paged_cache.attention(batch)

    def load(self, layer: int, part: MicroBatch) -> None:
        if layer in self._paged_layers:
            self._paged_cache.load(self._paged_layers[layer], part)

    def attend(self, layer: int, block: Block, part: MicroBatch) -> None:
        if layer in self._paged_layers:
            self._paged_cache.attend(self._paged_layers[layer], block, part)
            return
        assert part.projections is not None
        states = self._states.layer(self._state_layers[layer])
        part.attention_output = block.recurrence(part.projections, states, part.attention)

    def save(self, layer: int, part: MicroBatch) -> None:
        if layer in self._paged_layers:
            self._paged_cache.save(self._paged_layers[layer], part)
