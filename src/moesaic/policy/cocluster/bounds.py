"""How local placement can get at most: an upper bound.

It is about given counts, each token id on its best rank, and placements that give each rank E / R experts,
give or take one. Who places by these counts reaches less on tokens that are not among them. The optimum
itself, of small layers, is in `exact.py`.

The bound is a semidefinite relaxation, solved from its dual side. Let x_r in {0, 1}^E be the experts of
rank r, s = E / R of them (where R doesn't divide E, experts that nobody chooses fill up), and U the sum of
all x_r x_r', which is 1 where two experts share a rank. A token with choices w has max_r w . x_r local ones,
and for any t, any c > 0 and any l >= 0

    w . x_r  <=  t + (w + l - t / s) . x_r  <=  t + c / 2 + z' U z / (2 c),    z = w + l - t / s,

with equality at the best ones where U is a placement. Summed over tokens that is a constant plus <C, U>. Of
all U three things are kept: its eigenvalues are s, once along (1 .. 1), and R - 1 others of at most s (the
relaxation of Donath and Hoffman 1973); its rows have a 1 on the diagonal and others of at most 1 with the sum
s - 1; it is transitive (the triangles of Grötschel and Wakabayashi 1989). Multipliers Y and T split <C, U>:

    <C - Y - T, U>  <=  s / E * sum(C - Y - T) + s * (R - 1 largest eigenvalues across (1 .. 1))
    <Y, U>          <=  sum_e (Y_ee + the s - 1 largest others of row e)
    <T, U>          <=  sum of T's multipliers, see `_Triangles`.

Any t, c, l, Y, T give a bound, so it needs no convergence to be true; ADMM makes it small. With a cap on the
ranks' loads (as `ours` has) each expert has a multiplier b_e >= 0 that adds b_e * (cap - sum_f load_f U_ef).

How loose it is: in layers of 6 to 12 experts, whose optimum is known, it was 0 to 4 % above that on 2 ranks,
6 % on 3, 4 to 8 % on 4, and up to 14 % where ranks differ in size. On benchmarks/routings.py it is 2 % above
`ours` on 2 ranks, 8 % on 4, 12 % on 8 of 64 experts. Gaps of that size may be the bound's own: they don't
tell that a better placement exists.

Multipliers of triangles take 4 E^3 bytes, twice that on 2 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.profile import Profile
from moesaic.policy.cocluster.ours import chosen, dense
from moesaic.policy.cocluster.solver import rooms

FloatArray = npt.NDArray[np.float64]

SAMPLE = 1024
"""Frequent token ids, and as many rarer ones, by which U and the multipliers are found."""
CHUNK = 8192
"""Token ids at a time where all are summed up: bounds memory."""
TINY = 1e-12
START, LEAST = 30.0, 3.0
BALANCE, GROWTH = 10.0, 1.5
"""ADMM's penalty changes by this factor where one residual is so many times the other."""
EASE = 8.0
"""Triangles pay by ADMM's penalty over so many times the experts: each pair is in about as many."""


def upper_bound(
    profile: Profile,
    ranks: int,
    rounds: int = 100,
    spare: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> FloatArray:
    """[layers] no placement's token-level local activation rate on the profile's own counts is above.

    rounds: more take longer and bring it down. spare: for placements whose ranks carry at most this share of
    a layer's choices beyond their fair one, as in `ours`; 1: for all placements.

    Raises ConfigError where `ranks` is not in 1 .. experts.
    """
    rooms(profile.num_experts, ranks)
    found = np.ones(len(profile.counts))
    for layer, counts in enumerate(profile.counts):
        if ranks > 1 and len(counts.experts):
            found[layer] = bound(dense(counts, profile.num_experts).astype(np.float64), ranks, rounds, spare)
        if progress is not None:
            progress(layer + 1, len(found))
    return found


def bound(rows: FloatArray, ranks: int, rounds: int, spare: float = 1.0) -> float:
    """The same for one layer's counts [t, E]."""
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % ranks)))
    rows /= rows.sum()
    size = rows.shape[1] // ranks
    simple = float(np.sort(rows, axis=1)[:, -size:].sum())  # each token's own best experts, all on one rank
    if size == 1:
        return simple
    relaxed = _Relaxation(rows.sum(axis=0), ranks, 1 / ranks + spare)
    some = chosen(rows.astype(np.float32), SAMPLE, SAMPLE, np.random.default_rng(0)).T.astype(np.float64)
    least = _descended(relaxed, some, rounds, 2)
    if len(some) < len(rows):  # what holds for a sample is no bound for all
        least = _descended(relaxed, rows, max(1, rounds // 8), rounds)
    return min(simple, least, 1.0)


def _descended(relaxed: _Relaxation, rows: FloatArray, rounds: int, steps: int) -> float:
    """The least bound of some rounds. steps: of l in the first round, 2 in the others."""
    least, raised = np.inf, rows.copy()
    for turn in range(rounds):
        constant, pairs = 0.0, np.zeros_like(relaxed.shared)
        for start in range(0, len(rows), CHUNK):
            part = slice(start, start + CHUNK)
            tokens = _Tokens.of(rows[part], raised[part], relaxed.shared, relaxed.ranks, 2 if turn else steps)
            raised[part] = tokens.raised
            constant += tokens.constant()
            pairs += tokens.pairs()
        least = min(least, constant + relaxed.step(pairs))
    return least


@dataclass(frozen=True)
class _Tokens:
    """t, c and l of each token."""

    raised: FloatArray
    """[t, E] w + l"""
    floor: FloatArray
    """[t] t"""
    spread: FloatArray
    """[t] c"""
    size: float
    """s"""

    @classmethod
    def of(cls, rows: FloatArray, raised: FloatArray, shared: FloatArray, ranks: int, steps: int) -> _Tokens:
        """At U = shared the best t and c, and l after some steps of projected gradient from raised - rows."""
        size = rows.shape[1] / ranks
        for step in range(steps + 1):
            there = raised @ shared
            total = raised.sum(axis=1)
            mean = total / ranks
            variance = np.maximum((there * raised).sum(axis=1) - total * mean, TINY * total**2)
            floor = mean - np.sqrt(variance / (ranks * (ranks - 1)))
            if step < steps:
                raised = np.maximum(rows, raised - (there - floor[:, None]) / size)
        spread = np.sqrt(ranks * (floor - mean) ** 2 + variance)
        return cls(raised, floor, spread, size)

    def constant(self) -> float:
        return float((self.floor + self.spread / 2).sum())

    def pairs(self) -> FloatArray:
        """[E, E] C, by which U is weighed."""
        shifted = self.raised - (self.floor / self.size)[:, None]
        scaled = shifted / np.sqrt(2 * self.spread)[:, None]
        found: FloatArray = scaled.T @ scaled
        return found


class _Relaxation:
    """U and its multipliers, under ADMM."""

    def __init__(self, loads: FloatArray, ranks: int, cap: float) -> None:
        experts = len(loads)
        self.ranks, self.size = ranks, experts // ranks
        self.loads = loads / np.linalg.norm(loads)
        self.cap = cap / float(np.linalg.norm(loads))
        even = (self.size - 1) / (experts - 1)
        self.shared = np.full((experts, experts), even) + (1 - even) * np.eye(experts)
        """[E, E] U as its eigenvalues allow; its rows sum up to s."""
        self.boxed = self.shared.copy()
        """[E, E] U as its entries allow."""
        self.split = np.zeros((experts, experts))
        """[E, E] Y"""
        self.paid = np.zeros(experts)
        """[E] b"""
        self.triangles = _Triangles(experts, ranks)
        self.weight = self.least = 0.0
        """ADMM's penalty."""

    def step(self, pairs: FloatArray) -> float:
        """A bound of <pairs, U> by the multipliers as they are; then better ones."""
        fined = np.outer(self.paid, self.loads)
        left = pairs - self.split - self.triangles.pairs - (fined + fined.T) / 2
        values, _ = _across(left)
        found = self.size / len(left) * float(left.sum()) + self.size * float(values[1 - self.ranks :].sum())
        found += _row_by_row(self.split, self.size)
        found += float(self.paid.sum()) * self.cap + self.triangles.most
        self._improve(left)
        return found

    def _improve(self, left: FloatArray) -> None:
        if not self.weight:
            self.weight = START * float(np.abs(left - np.diag(np.diag(left))).mean())
            self.least = self.weight / LEAST
        before = self.boxed
        self.shared = _nearest(self.boxed + left / self.weight, self.size, self.ranks)
        self.boxed = np.clip(self.shared + self.split / self.weight, 0.0, 1.0)
        np.fill_diagonal(self.boxed, 1.0)
        self.split += self.weight * (self.shared - self.boxed)
        over = self.shared @ self.loads - self.cap
        self.paid = np.maximum(0.0, self.paid + self.weight / 2 * over)
        self.triangles.pay(self.shared, self.weight / (EASE * len(left)))
        apart = float(np.linalg.norm(self.shared - self.boxed))
        moved = float(np.linalg.norm(self.boxed - before))
        if apart > BALANCE * moved:
            self.weight *= GROWTH
        elif moved > BALANCE * apart and self.weight > self.least:
            self.weight /= GROWTH


class _Triangles:
    """Multipliers of U_ef + U_eg - U_fg <= 1: where e is with f and with g, these are together, too.

    On 2 ranks also of U_ef + U_eg + U_fg >= 1: of three experts two are together. One for each (e, f, g).
    """

    def __init__(self, experts: int, ranks: int) -> None:
        shape = (experts, experts, experts)
        self.apart = np.zeros(shape, dtype=np.float32)
        self.joined = np.zeros(shape if ranks == 2 else (0, 0, 0), dtype=np.float32)
        self.pairs = np.zeros((experts, experts))
        """[E, E] T, symmetric: all of them, by what they weigh U with."""
        self.most = 0.0
        """No placement's <T, U> is above."""

    def pay(self, shared: FloatArray, rate: float) -> None:
        """A step of gradient ascent: more for what U = shared violates, less for the others, none below 0."""
        one = ((shared + shared.T) / 2).astype(np.float32)
        both = one[:, :, None] + one[:, None, :] - 1
        self.apart = np.maximum(self.apart + np.float32(rate) * (both - one), 0)
        first = self.apart.sum(axis=2, dtype=np.float64)
        self.pairs = first + first.T - self.apart.sum(axis=0, dtype=np.float64)
        self.most = float(first.sum())
        if self.joined.size:
            self.joined = np.maximum(self.joined - np.float32(rate) * (both + one), 0)
            third = self.joined.sum(axis=2, dtype=np.float64)
            self.pairs -= 3 * third
            self.most -= float(third.sum())


def _across(matrix: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Eigenvalues, ascending, and vectors of a symmetric matrix across (1 .. 1), and one 0 for along it."""
    centred = matrix - matrix.mean(axis=0)
    centred -= centred.mean(axis=1)[:, None]
    values, vectors = np.linalg.eigh((centred + centred.T) / 2)
    return values, vectors


def _nearest(matrix: FloatArray, size: int, ranks: int) -> FloatArray:
    """[E, E] what is nearest to it among all with eigenvalue s along (1 .. 1), others in 0 .. s, trace E."""
    values, vectors = _across(matrix)
    low, high = float(values.min()) - size, float(values.max())
    for _ in range(60):
        middle = (low + high) / 2
        enough = np.clip(values - middle, 0.0, size).sum() > size * (ranks - 1)
        low, high = (middle, high) if enough else (low, middle)
    found: FloatArray = (vectors * np.clip(values - low, 0.0, size)) @ vectors.T
    found -= found.mean(axis=0)
    found -= found.mean(axis=1)[:, None]
    return found + size / len(matrix)


def _row_by_row(split: FloatArray, size: int) -> float:
    """The diagonal and the size - 1 largest others of each row, summed up."""
    others = split.copy()
    np.fill_diagonal(others, -np.inf)
    return float(np.trace(split) + np.sort(others, axis=1)[:, 1 - size :].sum())
