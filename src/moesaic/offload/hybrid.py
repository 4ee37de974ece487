"""The cache of a model of which some layers keep states: these stay where they are, and nothing is copied."""

from __future__ import annotations

from collections.abc import Collection

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.models.block import Block
from moesaic.models.kvcache.states import StateCache
from moesaic.offload.caches import Cache
from moesaic.offload.parts import Part


class HybridCache:
    """See `caches.Cache`. Another cache has the layers with keys and values."""

    def __init__(
        self, paged: Cache, states: StateCache, state_layers: Collection[int], num_layers: int
    ) -> None:
        self._paged, self._states = paged, states
        others = [layer for layer in range(num_layers) if layer not in state_layers]
        self._of_paged = {layer: index for index, layer in enumerate(others)}
        self._of_states = {layer: index for index, layer in enumerate(sorted(state_layers))}

    def attention(self, batch: TokenBatch) -> AttentionBatch:
        return self._paged.attention(batch)

    def load(self, layer: int, part: Part) -> None:
        if layer in self._of_paged:
            self._paged.load(self._of_paged[layer], part)

    def attend(self, layer: int, block: Block, part: Part) -> None:
        if layer in self._of_paged:
            self._paged.attend(self._of_paged[layer], block, part)
            return
        assert part.projected is not None
        states = self._states.layer(self._of_states[layer])
        part.attended = block.recurrence(part.projected, states, part.attention)

    def save(self, layer: int, part: Part) -> None:
        if layer in self._of_paged:
            self._paged.save(self._of_paged[layer], part)
