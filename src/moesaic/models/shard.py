"""Which attention heads a rank of a tensor-parallel group has.

Query heads are split into equal, consecutive portions. So are key-value heads, if there are at least as many
as ranks. Otherwise each key-value head is on several consecutive ranks. The output projection is split along
its columns (Shoeybi et al., Megatron-LM, 2019), so its result is a partial sum. All other weights are whole
on every rank. So are the projections of queries and keys where a norm spans all heads (whole_norm.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moesaic.core.errors import ConfigError
from moesaic.kernels.states import StateSizes
from moesaic.models.spec import ModelSpec

MOST_RANKS = 1024
"""Largest size of a group that a message names as allowed."""


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size`; the default is the whole model.

    With 8 query heads and 2 key-value heads, rank 3 of 4 has the last two query heads and the last key-value
    head. Rank 2 has that key-value head too:
    >>> Shard(3, 4).heads(8), Shard(3, 4).kv_heads(2)
    (range(6, 8), range(1, 2))
    """

    rank: int = 0
    size: int = 1

    def heads(self, total: int) -> range:
        """Returns the query heads of this rank, of `total` heads."""
        count = total // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def kv_heads(self, total: int) -> range:
        """Returns the key-value heads that this rank's query heads use, of `total` heads."""
        first = self.rank * total // self.size
        return range(first, first + max(1, total // self.size))

    def part(self, total: int) -> slice:
        """Splits `total` into consecutive parts, the larger ones first, and returns this rank's part.

        Parts differ in size by at most one.
        """
        base_size, num_larger = divmod(total, self.size)
        first = self.rank * base_size + min(self.rank, num_larger)
        return slice(first, first + base_size + (self.rank < num_larger))

    def spec(self, model: ModelSpec) -> ModelSpec:
        """Returns the sizes of this rank's part of a model.

        Raises ConfigError if the heads cannot be split over that many ranks.
        """
        heads, kv_heads = model.heads, model.kv.kv_heads
        if not 1 <= self.size <= heads or not _fits(self.size, heads, kv_heads):
            allowed_sizes = [
                size for size in range(1, min(heads, MOST_RANKS) + 1) if _fits(size, heads, kv_heads)
            ]
            sizes = ", ".join(map(str, allowed_sizes))
            text = f"{sizes} for {heads} query and {kv_heads} key-value heads"
            raise ConfigError.field("--tensor-parallel-size", self.size, text)
        if not 0 <= self.rank < self.size:
            raise ConfigError.field("rank", self.rank, f"0 to {self.size - 1}")
        kv = replace(model.kv, kv_heads=len(self.kv_heads(kv_heads)))
        return replace(model, heads=heads // self.size, kv=kv, states=self._states(model.states))

    def _states(self, sizes: StateSizes | None) -> StateSizes | None:
        """The states of this rank's heads of linear attention."""
        if sizes is None:
            return None
        if sizes.convolution_channels:
            if sizes.convolution_channels % self.size:
                text = f"a divisor of {sizes.convolution_channels} channels of a short convolution"
                raise ConfigError.field("--tensor-parallel-size", self.size, text)
            return replace(sizes, convolution_channels=sizes.convolution_channels // self.size)
        if sizes.key_heads % self.size:
            text = f"a divisor of {sizes.key_heads} key heads of linear attention"
            raise ConfigError.field("--tensor-parallel-size", self.size, text)
        keys, values = sizes.key_heads // self.size, sizes.value_heads // self.size
        return replace(sizes, key_heads=keys, value_heads=values)


def _fits(size: int, heads: int, kv_heads: int) -> bool:
    """Whether all ranks have the same number of heads, and each query head its key-value head."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


WHOLE = Shard()
