"""What tokens pay for in an upper bound of local placement: see `bounds.py`, whose notation this is.

A token with choices w has max_r w . x_r local ones. Of the rank b where that is, two things are known for any
split of w into a + (w - a), where a is 0 but on a few experts S, the token's most frequent ones:

 1. *Which of S are there*, for any fines N >= 0 on pairs of S:

        a . x_b  <=  h + sum_{e<f} N_ef x_be x_bf  <=  h + sum_{e<f} N_ef U_ef,

    h being the most that a . x - sum N_ef x_e x_f comes to over all subsets x of S, which are tried out.
    So a token that chooses two experts alike, once each, has at most 1 + U_ef local choices: with a = 1 on
    both and N_ef = 1, h is 1.
 2. *How much is there*, for any t, c > 0 and l >= 0, s being the experts of a rank:

        (w - a) . x_b  <=  t + z . x_b  <=  t + c / 2 + z' U z / (2 c),    z = w + l - a - t / s,

    with equality at the best t and c where U is a placement.

Summed over tokens both are a constant plus <C, U>. Any a, N, l give a bound; gradient descent with momentum
makes it small, on h smoothed to a logarithm of a sum of exponentials that gets sharper as it goes on (heat).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Rows = npt.NDArray[Any]
"""Of float32 to descend, of float64 to bound."""
IntArray = npt.NDArray[np.int64]

MOST = 8
"""Experts in S: one more doubles the time."""
CHUNK = 8192
"""Tokens at a time: bounds memory."""
TINY = 1e-12
RATE = 0.1
"""A step is so many times the heat: the sharper h, the shorter."""
MOMENTUM = 0.9


@dataclass(frozen=True)
class _Subsets:
    """All subsets of S."""

    first: IntArray
    """[P] pairs of places in S."""
    second: IntArray
    terms: FloatArray
    """[n, m + P] which experts are in a subset, and -1 for each pair that is: times (a, N) it is h's sum."""

    @classmethod
    def of(cls, places: int, most: int) -> _Subsets:
        """Of so many places, `most` of them at most. Example: 2, 2: (0 0 0), (1 0 0), (0 1 0), (1 1 -1)."""
        held = (np.arange(2**places)[:, None] >> np.arange(places) & 1).astype(np.float64)
        held = held[held.sum(axis=1) <= most]
        first, second = np.triu_indices(places, 1)
        return cls(first, second, np.concatenate([held, -held[:, first] * held[:, second]], axis=1))


class Tokens:
    """Rows of choices [t, E], none of them empty, with the a, N and l of each; they begin at 0."""

    def __init__(self, rows: FloatArray, ranks: int) -> None:
        count, experts = rows.shape
        self.ranks, self.size = ranks, experts // ranks
        self.places = min(MOST, experts)
        """m"""
        self.weight = rows.sum(axis=1)
        """[t] choices of each: all else is in shares of them."""
        self.rows = rows / self.weight[:, None]
        self.chosen: IntArray = np.argsort(-rows, axis=1, kind="stable")[:, : self.places]
        """[t, m] S"""
        self.subsets = _Subsets.of(self.places, self.size)
        self.taken = np.zeros((count, self.subsets.terms.shape[1]), dtype=np.float32)
        """[t, m + P] a and N"""
        self.raised = np.zeros((count, experts), dtype=np.float32)
        """[t, E] l"""
        self._speeds = np.zeros_like(self.taken), np.zeros_like(self.raised)

    def descend(self, shared: FloatArray, heat: float) -> None:
        """A step towards the a, N and l that are best at U = shared [E, E]."""
        shared, terms = shared.astype(np.float32), self.subsets.terms.astype(np.float32)
        for part in self._parts():
            left, chosen = self._left(part).astype(np.float32), self.chosen[part]
            floor, spread, there = self._spread(left, shared)
            held = (there - floor[:, None]) / spread[:, None]  # share of each expert that is on rank b
            likely = self.taken[part] @ terms.T
            likely = np.exp((likely - likely.max(axis=1, keepdims=True)) / np.float32(heat))
            slope = (likely / likely.sum(axis=1, keepdims=True)) @ terms
            slope[:, : self.places] -= np.take_along_axis(held, chosen, axis=1)
            slope[:, self.places :] += shared[self._pairs(part)]
            changed = self.taken, self.raised
            for values, speed, gradient in zip(changed, self._speeds, (slope, held), strict=True):
                speed[part] = np.float32(MOMENTUM) * speed[part] + gradient
                values[part] -= np.float32(RATE * heat) * speed[part]
        for positive in (self.taken[:, self.places :], self.raised):
            np.maximum(positive, 0, out=positive)

    def bound(self, shared: FloatArray) -> tuple[float, FloatArray]:
        """A constant and C [E, E]: no placement's local choices are above the constant + <C, U>.

        The t and c are those that are best at U = shared.
        """
        experts, constant = len(shared), 0.0
        squares, fines = np.zeros((experts, experts)), np.zeros(experts**2)
        for part in self._parts():
            left, taken = self._left(part), self.taken[part].astype(np.float64)
            weight = self.weight[part]
            floor, spread, _ = self._spread(left, shared)
            most = (taken @ self.subsets.terms.T).max(axis=1)
            constant += float((weight * (most + floor + spread / 2)).sum())
            shifted = (left - (floor / self.size)[:, None]) * np.sqrt(weight / (2 * spread))[:, None]
            squares += shifted.T @ shifted
            first, second = self._pairs(part)
            fined = taken[:, self.places :] * (weight / 2)[:, None]
            fines += np.bincount((first * experts + second).ravel(), fined.ravel(), experts**2)
        pairs = fines.reshape(experts, experts)
        return constant, squares + pairs + pairs.T

    def _parts(self) -> Iterator[slice]:
        return (slice(start, start + CHUNK) for start in range(0, len(self.rows), CHUNK))

    def _pairs(self, part: slice) -> tuple[IntArray, IntArray]:
        """[t, P] the one and the other expert of each pair of S."""
        chosen = self.chosen[part]
        return chosen[:, self.subsets.first], chosen[:, self.subsets.second]

    def _left(self, part: slice) -> FloatArray:
        """[t, E] w + l - a"""
        left: FloatArray = self.rows[part] + self.raised[part]
        left[np.arange(len(left))[:, None], self.chosen[part]] -= self.taken[part, : self.places]
        return left

    def _spread(self, left: Rows, shared: Rows) -> tuple[Rows, Rows, Rows]:
        """[t] t, [t] c, [t, E] U (w + l - a)"""
        there = left @ shared
        total = left.sum(axis=1)
        mean = total / self.ranks
        variance = np.maximum((there * left).sum(axis=1) - total * mean, TINY)
        floor = mean - np.sqrt(variance / (self.ranks * (self.ranks - 1)))
        return floor, np.sqrt(self.ranks * (floor - mean) ** 2 + variance), there
