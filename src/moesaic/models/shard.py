"""Which of the attention heads one rank of a tensor-parallel group holds.

Query heads are dealt out in equal, consecutive portions. Key-value heads too, until there are fewer of them
than ranks: then each is held by as many consecutive ranks as share it. The output projection is cut along
its columns (Shoeybi et al., Megatron-LM, 2019), so its result is a partial sum. All the rest is whole on
every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moesaic.core.errors import ConfigError
from moesaic.models.spec import ModelSpec


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size`; the default is the whole model.

    With 8 query heads over 2 key-value heads, rank 3 of 4 reads the last two of the one and the last of the
    other, which rank 2 reads too:

    >>> Shard(3, 4).heads(8), Shard(3, 4).kv_heads(2)
    (range(6, 8), range(1, 2))
    """

    rank: int = 0
    size: int = 1

    def heads(self, total: int) -> range:
        """The query heads of this rank, of `total`."""
        count = total // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def kv_heads(self, total: int) -> range:
        """The key-value heads that those query heads look at, of `total`."""
        first = self.rank * total // self.size
        return range(first, first + max(1, total // self.size))

    def part(self, total: int) -> slice:
        """This rank's of consecutive parts of `total` that differ by at most one, the larger ones first."""
        each, more = divmod(total, self.size)
        first = self.rank * each + min(self.rank, more)
        return slice(first, first + each + (self.rank < more))

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """The sizes of this rank's part of a model.

        Raises ConfigError for a number of ranks that the heads cannot be dealt out to.
        """
        heads, kv_heads = whole.heads, whole.kv.kv_heads
        allowed = [size for size in range(1, heads + 1) if _fits(size, heads, kv_heads)]
        if self.size not in allowed:
            sizes = ", ".join(map(str, allowed))
            text = f"{sizes} for {heads} query and {kv_heads} key-value heads"
            raise ConfigError.field("--tensor-parallel-size", self.size, text)
        if not 0 <= self.rank < self.size:
            raise ConfigError.field("rank", self.rank, f"0 to {self.size - 1}")
        kv = replace(whole.kv, kv_heads=len(self.kv_heads(kv_heads)))
        return replace(whole, heads=heads // self.size, kv=kv)


def _fits(size: int, heads: int, kv_heads: int) -> bool:
    """Whether every rank gets equally many heads, and no query head without its key-value head."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


WHOLE = Shard()
