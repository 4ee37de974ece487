"""Computes statistics of a model's routing from a profile: how skewed it is, and what is chosen together.

Each layer has statistics of four kinds: the load of the experts, the concentration of single tokens
(Sem-MoE, Table 1 and appendix A.2), experts chosen together, and tokens that follow each other.
`request_map` handles requests and their topics. `routing_prediction` measures how well routing can be
predicted.

Statistics are plain numbers and tuples, which a program can print or write as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.profile import Counts, Profile, Routes, SmallArray
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.balance import max_over_median
from moesaic.policy.placement.request_map import RequestMap, map_requests

FloatArray = npt.NDArray[np.float64]

DISTANCES = (1, 2, 4, 8, 16, 32)
"""Distances between two tokens of a request, in tokens, at which their experts are compared."""


@dataclass(frozen=True)
class Quartiles:
    """The 25th, 50th and 75th percentile of a value."""

    p25: float
    p50: float
    p75: float


@dataclass(frozen=True)
class LayerStatistics:
    """The statistics of one layer."""

    layer: int
    """Number of the layer in the model."""
    loads: tuple[float, ...]
    """Load of each expert divided by the mean load, largest first."""
    max_over_median: float
    """Max / median of the experts' loads. It is infinite if half of the experts have no load."""
    f1: Quartiles
    """Share of a token's experts that are among the k which its id chose most often. Quartiles over the
    routes' tokens."""
    top_hotness: Quartiles
    """Share of a token id's choices that fell on the k experts it chose most often. Quartiles over token
    ids."""
    rest_hotness: Quartiles
    """Share of a token id's choices that fell on the next most frequent expert after those k. Quartiles
    over token ids."""
    kurtosis: Quartiles
    """Kurtosis of a token id's counts of all experts (Pearson's: 3 for a normal distribution). Quartiles
    over token ids.

    If k of E experts are chosen equally often, it is (1 - 3 p (1 - p)) / (p (1 - p)) with p = k / E: 8.8
    for 6 of 64.
    """
    partners: float
    """Share of an expert's partners that are its k - 1 most frequent ones. Mean over experts, weighted by
    load.

    Partners are the experts that are chosen together with it.
    """
    partners_by_chance: float
    """`partners` if experts were chosen independently with the same loads."""
    repeated: tuple[float, ...]
    """Share of a token's experts that an earlier token of its request chose as well, for each of DISTANCES
    that occurs."""
    repeated_by_chance: float
    """`repeated` for two random tokens of the profile."""


@dataclass(frozen=True)
class Statistics:
    """The statistics of a model's routing."""

    model: str
    tokens: int
    """Number of tokens that were counted."""
    token_ids: int
    """Number of token ids that occurred."""
    requests: int
    """Number of requests in the routes."""
    vocab_size: int
    num_experts: int
    top_k: int
    topics: tuple[str, ...]
    layers: tuple[LayerStatistics, ...]
    requests_map: RequestMap | None
    """The map of the requests, or None if there are no routes."""


def describe(profile: Profile, routes: Routes) -> Statistics:
    """Compute the statistics. routes: the profile's own, or a part of them if there are many."""
    layers = tuple(_layer(profile, routes, index) for index in range(len(profile.layers)))
    known = np.unique(np.concatenate([counts.known_tokens for counts in profile.counts]))
    return Statistics(
        model=profile.model,
        tokens=profile.tokens,
        token_ids=len(known),
        requests=routes.requests,
        vocab_size=profile.vocab_size,
        num_experts=profile.num_experts,
        top_k=profile.top_k,
        topics=profile.topics,
        layers=layers,
        requests_map=map_requests(routes, profile.num_experts),
    )


def sample(routes: Routes, tokens: int, seed: int) -> Routes:
    """Sample random whole requests with at most `tokens` tokens together, but at least one request.

    They keep their order.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(routes.requests)
    ends = np.cumsum(np.diff(routes.starts)[order])
    return routes.select(np.sort(order[: max(1, int(np.searchsorted(ends, tokens, side="right")))]))


def _layer(profile: Profile, routes: Routes, index: int) -> LayerStatistics:
    counts, size, k = profile.counts[index], profile.num_experts, profile.top_k
    experts = routes.experts[:, index]
    loads = profile.loads[index]
    longest = int(np.diff(routes.starts).max(initial=0))
    top, rest = hotness(counts, k)
    partners, by_chance = co_activation(together(experts, size), loads, k)
    return LayerStatistics(
        layer=profile.layers[index],
        loads=tuple((np.sort(loads)[::-1] / max(loads.mean(), 1e-9)).tolist()),
        max_over_median=float(max_over_median(loads[None])[0]),
        f1=_quartiles(hits(hottest(counts, k)[routes.tokens], experts)),
        top_hotness=_quartiles(top),
        rest_hotness=_quartiles(rest),
        kurtosis=_quartiles(kurtosis(counts, size)),
        partners=partners,
        partners_by_chance=by_chance,
        repeated=tuple(repeated(routes, index, distance) for distance in DISTANCES if distance < longest),
        repeated_by_chance=_repeated_by_chance(loads, k),
    )


def _quartiles(values: FloatArray) -> Quartiles:
    return Quartiles(*np.quantile(values, (0.25, 0.5, 0.75)).tolist()) if len(values) else Quartiles(0, 0, 0)


# ---- single tokens


def hottest(counts: Counts, k: int) -> SmallArray:
    """[V, k] the experts that each token id chose most often, most frequent first.

    Ties go to the lower number.

    -1 fills the entries of an id that chose fewer than k experts.
    """
    order, place = _hottest_first(counts)
    found = np.full((len(counts.starts) - 1, k), -1, dtype=np.int16)
    first = place < k
    found[counts.tokens[first], place[first]] = counts.experts[order[first]]
    return found


def _hottest_first(counts: Counts) -> tuple[IntArray, IntArray]:
    """[m] order of the entries by falling count within each token id, and [m] the position of each within
    its id."""
    most = int(counts.counts.max(initial=0))
    order = np.argsort(counts.tokens * (most + 1) + most - counts.counts, kind="stable")
    return order, np.arange(len(order)) - counts.starts[counts.tokens]


def hits(predicted: SmallArray, experts: SmallArray) -> FloatArray:
    """[n] share of each row's experts [n, k] that are among the predicted ones [n, m]."""
    right = np.zeros(experts.shape, dtype=np.bool_)
    for column in predicted.T:
        right |= experts == column[:, None]
    found: FloatArray = right.sum(axis=1) / experts.shape[1]
    return found


def hotness(counts: Counts, k: int) -> tuple[FloatArray, FloatArray]:
    """Share of each known token id's choices on its k most frequent experts, and on the next one.

    Example: counts 5, 3, 2 and k = 2 give 0.8 and 0.2.
    """
    order, place = _hottest_first(counts)
    ranked = counts.counts[order]
    size = len(counts.starts) - 1
    total = np.bincount(counts.tokens, counts.counts, minlength=size)[counts.known_tokens]
    top, rest = (
        np.bincount(counts.tokens[part], ranked[part], minlength=size)[counts.known_tokens] / total
        for part in (place < k, place == k)
    )
    return top, rest


def kurtosis(counts: Counts, num_experts: int) -> FloatArray:
    """Kurtosis m4 / m2^2 of each known token id's num_experts counts; 0 if all counts are equal."""
    tokens, size = counts.tokens, len(counts.starts) - 1
    total = np.bincount(tokens, counts.counts, minlength=size)
    mean = (total / num_experts)[tokens]

    def moment(power: int) -> FloatArray:
        absent = num_experts - np.diff(counts.starts)
        there = np.bincount(tokens, (counts.counts - mean) ** power, minlength=size)
        everywhere: FloatArray = (there + absent * (total / num_experts) ** power) / num_experts
        return everywhere[counts.known_tokens]

    spread = moment(2)
    found = np.zeros_like(spread)
    np.divide(
        moment(4), spread**2, out=found, where=spread > 1e-12 * mean[counts.starts[counts.known_tokens]] ** 2
    )
    return found


# ---- what goes together


def together(experts: SmallArray, num_experts: int) -> IntArray:
    """[E, E] tokens that chose both experts in one layer; 0 on the diagonal. experts: [t, k]."""
    chosen = experts.astype(np.int64)
    keys = (chosen[:, :, None] * num_experts + chosen[:, None, :]).ravel()
    found = np.bincount(keys, minlength=num_experts**2).reshape(num_experts, num_experts)
    np.fill_diagonal(found, 0)
    return found.astype(np.int64)


def map_together(routes: Routes, index: int, num_experts: int) -> tuple[tuple[float, ...], ...]:
    """[E, E] share of each expert's tokens that also chose the other expert in layer `index`, 0 to 1, for a
    picture."""
    experts = routes.experts[:, index]
    tokens = np.bincount(experts.ravel(), minlength=num_experts)
    found = together(experts, num_experts) / np.maximum(tokens, 1)[:, None]
    return tuple(tuple(row) for row in found.tolist())


def co_activation(pairs: IntArray, loads: IntArray, k: int) -> tuple[float, float]:
    """Share of an expert's k - 1 most frequent partners, as measured and by chance.

    Both are 0 without pairs.

    Example: k = 2, experts 0 and 1 are always chosen together, and so are 2 and 3. The measured share is 1.
    By chance it is 1/3 if loads are even.
    """
    if k < 2 or not pairs.any():
        return 0.0, 0.0
    weight = pairs.sum(axis=1)
    chance = np.tile(loads.astype(np.float64), (len(loads), 1))
    np.fill_diagonal(chance, 0)
    found, by_chance = (
        float((weight * _top_share(part.astype(np.float64), k - 1)).sum() / weight.sum())
        for part in (pairs, chance)
    )
    return found, by_chance


def _top_share(rows: FloatArray, k: int) -> FloatArray:
    """[n] share of each row's k largest entries."""
    top = np.sort(rows, axis=1)[:, -k:].sum(axis=1)
    found: FloatArray = top / np.maximum(rows.sum(axis=1), 1e-12)
    return found


def repeated(routes: Routes, index: int, distance: int) -> float:
    """Share of a token's experts in layer `index` that the token `distance` earlier in its request chose as
    well.

    It is 0 if there are no such tokens.
    """
    same = routes.owners[distance:] == routes.owners[:-distance]
    experts = routes.experts[:, index]
    now, before = experts[distance:][same], experts[:-distance][same]
    return float(hits(before, now).mean()) if len(now) else 0.0


def _repeated_by_chance(loads: IntArray, k: int) -> float:
    chosen = k * loads / max(loads.sum(), 1)  # [E] share of the tokens that choose each expert
    return float((chosen**2).sum() / k)
