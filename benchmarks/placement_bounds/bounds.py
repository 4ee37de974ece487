"""How local placement can get at most: an upper bound.

It is about given counts, each token id on its best rank, and placements that give each rank E / R experts,
give or take one. Who places by these counts reaches less on tokens that are not among them. The optimum
itself, of small layers, is in `exact.py`.

The bound is a semidefinite relaxation, solved from its dual side. Let x_r in {0, 1}^E be the experts of
rank r, s = E / R of them (where R doesn't divide E, experts that nobody chooses fill up), and U the sum of
all x_r x_r', which is 1 where two experts share a rank. What a token's local choices come to is at most a
constant and a linear function of U (`choices.py`); summed over tokens that is a constant plus <C, U>. Of all
U two things are kept: its eigenvalues are s, once along (1 .. 1), and R - 1 others of at most s (the
relaxation of Donath and Hoffman 1973); its rows have a 1 on the diagonal and others of at most 1 with the sum
s - 1. Multipliers Y split <C, U>:

    <C - Y, U>  <=  s / E * sum(C - Y) + s * (R - 1 largest eigenvalues across (1 .. 1))
    <Y, U>      <=  sum_e (Y_ee + the s - 1 largest others of row e)

Any multipliers give a bound, so it needs no convergence to be true; ADMM makes it small. With a cap on the
ranks' loads (as `ours` has) each expert has a multiplier b_e >= 0 that adds b_e * (cap - sum_f load_f U_ef).

That U is transitive (the triangles of Grötschel and Wakabayashi 1989) is not used: with multipliers for it,
too, bounds of 64 experts (two layers of benchmarks/routings.py, 300 rounds) were 0.1 to 0.3 % lower on 2 and
4 ranks and less than 0.1 % on 8. How loose the bound is: benchmarks/optimum.py,
docs/lab/2026-11-21-predicted-routing.md.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from moesaic.core.profile import Profile
from moesaic.policy.placement.solvers.annealing import dense
from moesaic.policy.placement.solvers.solver import experts_per_rank
from placement_bounds.choices import Tokens

FloatArray = npt.NDArray[np.float64]

HOT, COLD = 0.05, 0.0002
"""First and last heat of the tokens' descent."""
START, LEAST = 30.0, 3.0
BALANCE, GROWTH = 10.0, 1.5
"""ADMM's penalty changes by this factor where one residual is so many times the other."""


def upper_bound(
    profile: Profile,
    ranks: int,
    rounds: int = 400,
    spare: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> FloatArray:
    """[layers] no placement's token-level local activation rate on the profile's own counts is above.

    rounds: more take longer and bring it down. spare: for placements whose ranks carry at most this share of
    a layer's choices beyond their fair one, as in `ours`; 1: for all placements.

    Raises ConfigError where `ranks` is not in 1 .. experts.
    """
    experts_per_rank(profile.num_experts, ranks)
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
    if size == 1 or np.count_nonzero(rows, axis=1).max() == 1:  # no pair of experts to put together
        return simple
    relaxed = _Relaxation(rows.sum(axis=0), ranks, 1 / ranks + spare)
    tokens, least = Tokens(rows, ranks), 1.0
    for heat in np.geomspace(HOT, COLD, rounds).tolist():
        tokens.descend(relaxed.shared, heat)
        constant, pairs = tokens.bound(relaxed.shared)
        least = min(least, constant + relaxed.step(pairs))
    return min(simple, least)


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
        self.weight = self.least = 0.0
        """ADMM's penalty."""

    def step(self, pairs: FloatArray) -> float:
        """A bound of <pairs, U> by the multipliers as they are; then better ones."""
        fined = np.outer(self.paid, self.loads)
        left = pairs - self.split - (fined + fined.T) / 2
        values, _ = _across(left)
        found = self.size / len(left) * float(left.sum()) + self.size * float(values[1 - self.ranks :].sum())
        found += _row_by_row(self.split, self.size)
        found += float(self.paid.sum()) * self.cap
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
        apart = float(np.linalg.norm(self.shared - self.boxed))
        moved = float(np.linalg.norm(self.boxed - before))
        if apart > BALANCE * moved:
            self.weight *= GROWTH
        elif moved > BALANCE * apart and self.weight > self.least:
            self.weight /= GROWTH


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
