"""Which experts the rows of simulated requests choose.

The experts of a row depend on the seed, its request, position and layer alone. So two schedules with the
same seed route alike, whatever runs together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray

POOL = 1 << 14
"""Rows that are drawn for each layer. A row of a request takes one of them."""
FloatArray = npt.NDArray[np.float64]
Rows = npt.NDArray[np.uint64]
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def exponential(experts: int) -> FloatArray:
    """[E] shares whose values are those of an exponential distribution, at even quantiles, largest first.

    Example: 4 experts -> 0.568 0.268 0.128 0.036.
    """
    middles = (np.arange(experts)[::-1] + 0.5) / experts
    return normalize(-np.log1p(-middles))


def normalize(weights: FloatArray) -> FloatArray:
    """Shares that are proportional to these weights, along the last axis."""
    shares: FloatArray = weights / weights.sum(axis=-1, keepdims=True)
    return shares


def zipf(experts: int, exponent: float) -> FloatArray:
    """[E] shares that fall as a power: share i is proportional to (i + 1) ** -exponent."""
    shares: FloatArray = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    return normalize(shares)


def draw(shares: FloatArray, rows: int, top_k: int, rng: np.random.Generator) -> npt.NDArray[np.int16]:
    """[rows, k] different experts of each row, chosen with these shares [E] without replacement."""
    # The k largest of log share + Gumbel noise are a draw of k without replacement.
    with np.errstate(divide="ignore"):
        keys = -(np.log(shares) + rng.gumbel(size=(rows, len(shares))))
    if np.count_nonzero(shares) < top_k:
        return np.argsort(keys, axis=1)[:, :top_k].astype(np.int16)
    best = np.argpartition(keys, top_k - 1, axis=1)[:, :top_k]  # faster than sorting all experts
    order = np.argsort(np.take_along_axis(keys, best, axis=1), axis=1)
    return np.take_along_axis(best, order, axis=1).astype(np.int16)


def number_rows(requests: IntArray, positions: IntArray) -> Rows:
    """[n] a number for each row of these requests and positions [n]."""
    rows: Rows = (requests.astype(np.uint64) << np.uint64(24)) + positions.astype(np.uint64)
    return rows


@dataclass(eq=False)
class Routes:
    """Answers which experts rows choose. Popular experts may change with time."""

    shares: FloatArray
    """[layers, E] share of the choices."""
    top_k: int
    seed: int
    moves_every: float | None = None
    """Seconds after which other experts are popular. None: never."""
    _pools: dict[int, IntArray] = field(default_factory=dict)
    _orders: dict[tuple[int, int], IntArray] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        return len(self.shares)

    @property
    def experts(self) -> int:
        return len(self.shares[0])

    def choose_experts(self, layer: int, rows: Rows, now: float) -> IntArray:
        """[n, k] experts of rows (`rows_of`)."""
        pool = self._pools.get(layer)
        if pool is None:
            rng = np.random.default_rng([self.seed, layer])
            pool = self._pools[layer] = draw(self.shares[layer], POOL, self.top_k, rng).astype(np.int64)
        # A hash, so that neighbouring positions of a request take unrelated rows of the pool.
        key = rows + np.uint64(layer << 50)
        key *= _MIX
        key ^= key >> _SHIFT
        key *= _MIX
        key >>= np.uint64(50)
        experts: IntArray = pool[key.view(np.int64)]
        return experts if self.moves_every is None else self._order(layer, now)[experts]

    def _order(self, layer: int, now: float) -> IntArray:
        """[E] the expert that stands in the place of each one at this time."""
        assert self.moves_every is not None
        period = int(now / self.moves_every)
        if not period:
            return np.arange(self.experts)
        if (layer, period) not in self._orders:
            rng = np.random.default_rng([self.seed, layer, period])
            self._orders[layer, period] = rng.permutation(self.experts)
        return self._orders[layer, period]
