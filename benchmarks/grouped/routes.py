"""Routes with a given local share, and the bytes that moving them takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import equal_sizes

FLOAT = 4


@dataclass(frozen=True)
class Drawn:
    """The routes of a batch of n rows on some ranks."""

    experts: IntArray
    """[n, k] the logical ids of the chosen experts."""
    owners: IntArray
    """[n, k] the ranks of those experts."""
    homes: IntArray
    """[n] the rank of each row."""

    @property
    def local_share(self) -> float:
        """The share of the pairs that are on the row's own rank."""
        return float((self.owners == self.homes[:, None]).mean())

    @property
    def remote_pairs(self) -> int:
        return int((self.owners != self.homes[:, None]).sum())

    @property
    def remote_ranks(self) -> int:
        """How many ranks other than its own a row reaches, each counted once, summed over all rows."""
        keys = np.unique(np.arange(len(self.owners))[:, None] * (1 + self.owners.max()) + self.owners)
        home = self.homes[keys // (1 + self.owners.max())]
        return int((keys % (1 + self.owners.max()) != home).sum())


def draw(rows: int, top_k: int, num_experts: int, ranks: int, share: float, seed: int) -> Drawn:
    """`rows` in equal shards, experts in equal consecutive ranges, local pairs nearest to `share`.

    Which pairs are local is drawn evenly over all of them, and so are the experts of a row's local and remote
    pairs. num_experts: divisible by `ranks`, at least top_k on each.

    Example: 2 rows, k = 2, share 0.5 -> two of the four pairs are local, of one row or of both.
    """
    rng = np.random.default_rng(seed)
    each = num_experts // ranks
    homes = np.repeat(np.arange(ranks), equal_sizes(rows, ranks))
    wanted = np.arange(rows * top_k) < round(share * rows * top_k)
    local = rng.permutation(wanted).reshape(rows, top_k)
    experts = np.empty((rows, top_k), dtype=np.int64)
    for row, home in enumerate(homes):
        mine = np.arange(home * each, (home + 1) * each)
        others = np.setdiff1d(np.arange(num_experts), mine)
        count = int(local[row].sum())
        experts[row, local[row]] = rng.choice(mine, count, replace=False)
        experts[row, ~local[row]] = rng.choice(others, top_k - count, replace=False)
    return Drawn(experts, experts // each, homes)


def closed_forms(rows: int, hidden: int, ranks: int) -> dict[str, float]:
    """Payload bytes per rank of `rows` rows (Speculative MoE, section 3.2).

    Example: 4 rows of 8 numbers on 2 ranks, 128 bytes together: 128, 64, 64.
    """
    half = (ranks - 1) * rows * hidden * FLOAT / ranks
    return {"all-reduce": 2 * half, "reduce-scatter": half, "all-gather": half}


def all_to_all(drawn: Drawn, hidden: int, ranks: int, once: bool = True) -> float:
    """Payload bytes per rank: a row once to each other rank with experts of it, and one back for each pair.

    Without `once` a row goes there for each pair, too: 2 k (1 - l) B S / G.
    """
    there = drawn.remote_ranks if once else drawn.remote_pairs
    return (there + drawn.remote_pairs) * hidden * FLOAT / ranks
