"""A paged KV cache on two memory levels: the first blocks are on the fast one, the others on the slow one."""

from __future__ import annotations

import torch

from moesaic.core.tokens import IntArray
from moesaic.kernels.batch import AttentionBatch
from moesaic.models.block import Block, Projections
from moesaic.models.kvcache.paged_kv import PagedKV


class SplitKV:
    """Block b is block b of `fast` if that has so many blocks, and else block b - their number of `slow`."""

    def __init__(self, fast: PagedKV, slow: PagedKV) -> None:
        """fast, slow: of the same layers, layout, block size and dtype."""
        self.fast, self.slow = fast, slow
        self.fast_blocks = len(fast.keys(0))
        self._block_size = slow.keys(0).shape[1]

    def attend(self, layer: int, block: Block, rows: Projections, batch: AttentionBatch) -> torch.Tensor:
        """Is not possible where the blocks are: `offload.caches.MovingCache` brings them together."""
        raise TypeError("a cache on two levels is attended to by a pass")

    def first_not_finite(self, blocks: IntArray, length: int) -> int | None:
        """See `PagedKV.first_not_finite`."""
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
