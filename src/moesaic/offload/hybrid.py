"""The cache of a model of which some layers keep states: these stay where they are, and nothing is copied."""

from __future__ import annotations

from collections.abc import Collection

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.models.block import Block
from moesaic.models.kvcache.states import StateCache
from moesaic.offload.caches import Cache
from moesaic.offload.parts import MicroBatch


class HybridCache:
    """See `caches.Cache`. Another cache has the layers with keys and values."""

    def __init__(
        self, paged_cache: Cache, states: StateCache, state_layers: Collection[int], num_layers: int
    ) -> None:
        self._paged_cache, self._states = paged_cache, states
        others = [layer for layer in range(num_layers) if layer not in state_layers]
        self._paged_layers = {layer: index for index, layer in enumerate(others)}
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
