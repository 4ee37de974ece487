"""How local placement can get at all: the optimum of small layers, an upper bound of large ones.

Both are about given counts, each token id on its best rank, and placements that give each rank E / R experts,
give or take one. Who places by these counts reaches less on tokens that are not among them.

`exact` is an integer program (HiGHS) over all groups of experts that a rank can hold: which are taken, and
which of them each token goes to. With a variable for each expert and rank instead, the linear relaxation
would put 1 / R of everything everywhere and HiGHS would try it all. It is for a dozen experts and tens of
token ids.

`upper_bound` is a semidefinite relaxation, solved from its dual side. Let x_r in {0, 1}^E be the experts of
rank r, s = E / R of them (where R doesn't divide E, experts that nobody chooses fill up), and U the sum of
all x_r x_r', which is 1 where two experts share a rank. A token with choices w has max_r w . x_r local ones,
and for any t, any c > 0 and any l >= 0

    w . x_r  <=  t + (w + l - t / s) . x_r  <=  t + c / 2 + z' U z / (2 c),    z = w + l - t / s,

with equality at the best ones where U is a placement. Summed over tokens that is a constant plus <C, U>. Of
all U two things are kept: its eigenvalues are s, once along (1 .. 1), and R - 1 others of at most s (the
relaxation of Donath and Hoffman 1973); its rows have a 1 on the diagonal and others of at most 1 with the sum
s - 1. A matrix of multipliers Y splits <C, U> between the two:

    <C - Y, U>  <=  s / E * sum(C - Y) + s * (R - 1 largest eigenvalues across (1 .. 1))
    <Y, U>      <=  sum_e (Y_ee + the s - 1 largest others of row e).

Any t, c, l, Y give a bound, so it needs no convergence to be true; ADMM makes it small. With a cap on the
ranks' loads (as `ours` has) each expert has a multiplier b_e >= 0 that adds b_e * (cap - sum_f load_f U_ef).

How loose it is: in layers of 6 to 12 experts, whose optimum is known, it was 0 to 6 % above that on 2 ranks,
3 to 8 % on 3, 7 to 9 % on 4, and up to 15 % where ranks differ in size. On benchmarks/routings.py it is 3 or
4 % above `ours` on 2 ranks, 7 to 9 % on 4, 10 to 13 % on 8, for 64 and 128 experts. Gaps of that size are the
bound's own: they don't tell that a better placement exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_array, csr_array, eye_array, kron

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Counts, Profile
from moesaic.core.tokens import IntArray
from moesaic.policy.cocluster.ours import chosen, dense
from moesaic.policy.cocluster.solver import rooms

FloatArray = npt.NDArray[np.float64]

SAMPLE = 1024
"""Frequent token ids, and as many rarer ones, by which U and the multipliers are found."""
GROUPS = 1000
"""As many as an integer program is solved for."""
CHUNK = 8192
"""Token ids at a time where all are summed up: bounds memory."""
TINY = 1e-12
START, LEAST = 30.0, 3.0
BALANCE, GROWTH = 10.0, 1.5
"""ADMM's penalty changes by this factor where one residual is so many times the other."""


def exact(counts: Counts, num_experts: int, ranks: int, seconds: float = np.inf) -> tuple[float, IntArray]:
    """The best local activation rate of a small layer, and ranks [E] that reach it.

    Raises ConfigError where `ranks` is not in 1 .. num_experts or can be filled in more than GROUPS ways,
    TimeoutError where the optimum was not proved in `seconds`.
    Example: a token that chooses experts 0 and 2, one that chooses 1 and 3, 2 ranks -> 1.0, ranks 0 1 0 1.
    """
    room = rooms(num_experts, ranks)
    if sum(comb(num_experts, size) for size in set(room.tolist())) > GROUPS:
        raise ConfigError.field("experts", num_experts, f"{GROUPS} ways to fill one of {ranks} ranks at most")
    held = np.array(
        [
            np.isin(np.arange(num_experts), group)
            for size in sorted(set(room.tolist()))
            for group in combinations(range(num_experts), size)
        ],
        dtype=np.float64,
    )
    rows = dense(counts, num_experts).astype(np.float64)
    tokens, groups = len(rows), len(held)
    # one variable for each group: a rank holds it; one for each token and group: the token goes there
    there = kron(np.ones((tokens, 1)), eye_array(groups)), -eye_array(tokens * groups)
    once = csr_array(np.vstack([held.T, np.ones(groups)])), None
    somewhere = None, kron(eye_array(tokens), np.ones((1, groups)))
    ones = np.ones(num_experts + 1 + tokens)
    ones[num_experts] = ranks
    found = milp(
        np.concatenate([np.zeros(groups), -(rows @ held.T).ravel()]),
        constraints=LinearConstraint(
            block_array([there, once, somewhere], format="csr"),
            np.concatenate([np.zeros(tokens * groups), ones]),
            np.concatenate([np.full(tokens * groups, np.inf), ones]),
        ),
        integrality=np.repeat([1, 0], [groups, tokens * groups]),
        bounds=Bounds(0.0, 1.0),
        options={"mip_rel_gap": 0.0, "time_limit": seconds},
    )
    if found.status != 0:
        raise TimeoutError(f"no optimum was proved in {seconds} seconds")
    taken = held[found.x[:groups] > 0.5]
    return float(-found.fun / rows.sum()), taken.argmax(axis=0).astype(np.int64)


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
    _descended(relaxed, some, rounds, 2)
    least = _descended(relaxed, rows, max(1, rounds // 8), 8)
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
