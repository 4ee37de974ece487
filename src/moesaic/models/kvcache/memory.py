"""What the layers of a model keep of its sequences: keys and values in blocks, or states."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from moesaic.core.tokens import IntArray
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Kernels
from moesaic.models.block import Block, Projections
from moesaic.models.kvcache.images import Bytes, OnLayerWritten
from moesaic.models.kvcache.paged_kv import PagedKV
from moesaic.models.kvcache.states import StateCache
from moesaic.models.spec import ModelSpec


@dataclass(frozen=True)
class CacheSize:
    """How many sequences the memory holds."""

    num_blocks: int
    """KV blocks."""
    seats: int = 0
    """Sequences with states that run at once; 0 for a model without states."""
    snapshots: int = 0
    """Pages that may be kept of prefixes."""


class LayerMemory(Protocol):
    """The memory of all layers of a worker."""

    def attend(self, layer: int, block: Block, rows: Projections, batch: AttentionBatch) -> torch.Tensor:
        """Keeps the rows of a step and computes the attention of `layer`. Returns [n, H * d]."""
        ...

    def first_not_finite(self, blocks: IntArray, length: int) -> int | None:
        """The first layer with a NaN or an infinite number in the first `length` tokens of `blocks`."""
        ...


class HybridMemory:
    """The memory of a model of which some layers keep states and the others keys and values."""

    def __init__(
        self, kv: PagedKV, states: StateCache, state_layers: Collection[int], num_layers: int
    ) -> None:
        self._kv, self._states = kv, states
        self._kv_layers = [layer for layer in range(num_layers) if layer not in state_layers]
        of_kv = {layer: (kv, index) for index, layer in enumerate(self._kv_layers)}
        of_states = {layer: (states, index) for index, layer in enumerate(sorted(state_layers))}
        self._parts: dict[int, tuple[PagedKV | StateCache, int]] = {**of_kv, **of_states}

    def attend(self, layer: int, block: Block, rows: Projections, batch: AttentionBatch) -> torch.Tensor:
        """Keeps the rows of a step and computes the attention of `layer`. Returns [n, H * d]."""
        part, index = self._parts[layer]
        return part.attend(index, block, rows, batch)

    def first_not_finite(self, blocks: IntArray, length: int) -> int | None:
        """The first layer with a NaN or an infinite number in its keys or values. States are not looked
        at."""
        kv_layer = self._kv.first_not_finite(blocks, length)
        return None if kv_layer is None else self._kv_layers[kv_layer]

    # ---- see `CopiedMemory`

    @property
    def num_layers(self) -> int:
        return self._kv.num_layers

    @property
    def layer_bytes(self) -> int:
        return self._kv.layer_bytes

    def watch(self, on_layer_written: OnLayerWritten) -> None:
        self._kv.watch(on_layer_written)

    @property
    def state_bytes(self) -> int:
        return self._states.state_bytes

    def copy_blocks(self, blocks: IntArray, layers: range) -> Bytes:
        return self._kv.copy_blocks(blocks, layers)

    def put_blocks(self, blocks: IntArray, layers: range, data: Bytes, num_skipped: int = 0) -> None:
        self._kv.put_blocks(blocks, layers, data, num_skipped)

    def copy_states(self, page: int, seat: int) -> Bytes:
        return self._states.copy_states(page, seat)

    def put_states(self, page: int, seat: int, data: Bytes) -> None:
        self._states.put_states(page, seat, data)

    # ---- see `BlockMemory` of the runtime

    @property
    def block_bytes(self) -> int:
        return self._kv.block_bytes

    def copy_block(self, block: int) -> Bytes:
        return self._kv.copy_block(block)

    def put_block(self, block: int, data: Bytes) -> None:
        self._kv.put_block(block, data)

    @property
    def page_bytes(self) -> int:
        return self._states.page_bytes

    def copy_page(self, page: int) -> Bytes:
        return self._states.copy_page(page)

    def put_page(self, page: int, data: Bytes) -> None:
        self._states.put_page(page, data)


def layer_memory(
    spec: ModelSpec,
    size: CacheSize,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
) -> PagedKV | HybridMemory:
    """Allocates the memory of a model. dtype: of keys and values; states are float32."""
    kv = PagedKV(spec.kv, spec.kv_layers, size.num_blocks, block_size, dtype, device, kernels)
    if spec.states is None:
        return kv
    states = StateCache(spec.states, len(spec.state_layers), size.seats, size.snapshots, device)
    return HybridMemory(kv, states, spec.state_layers, spec.num_layers)
