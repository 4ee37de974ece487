"""Numbers the clusters of all layers alike.

A request stays on one rank, so a rank has to mean the same in all layers. A solver finds the clusters of
each layer alone, so their numbers mean nothing across layers. With attention-DP the papers' request
scheduler (Semantic Parallelism, Algorithm 2) gives a request one rank for all layers. What counts is then
its choices on that rank, summed over layers. The paper does not say how the numbers of different layers are
made to agree.

This module works as follows:

 - *Shares.* Layer i gives every request the shares x_i [R] of its choices by cluster, minus their mean over
   all requests. Without sampled requests, token ids replace them.
 - *Overlap.* The overlap of two clusters of two layers is the covariance of their shares, weighted by
   choices. Without subtracting the mean, hot clusters would only match each other, which balanced dispatch
   cannot use.
 - *Search.* The sum of all overlaps is increased layer by layer. Each step finds the best one-to-one
   numbering of a layer, given those of the others (the Hungarian method). It ends when a sweep over all
   layers changes nothing.
 - *Starts.* The result is a local optimum, so the search starts from several layers and keeps the best
   result.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moesaic.core.profile import Profile, SmallArray
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers.assignment import assign

FloatArray = npt.NDArray[np.float64]

STARTS = 8
"""Number of layers from which the search starts, evenly spread."""
REQUESTS_PER_RANK = 4
"""Minimum number of sampled requests for each rank. With fewer, token ids replace requests."""
MOST = 16384
"""Maximum number of requests, or of the most frequent token ids, that are used. This bounds memory."""
EXACT = 1e-9
"""Smaller relative gains count as rounding errors."""


def align(profile: Profile, experts_per_layer: npt.NDArray[np.integer], ranks: int) -> SmallArray:
    """Renumber the clusters so that a number means the same in all layers. Returns ranks [layers, E].

    experts_per_layer: [layers, E] ranks from 0. Layer 0 keeps its numbers. The result is never worse than
    the input.

    Example: there are two layers with experts 0, 1 | 2, 3. Every request that chooses 0 and 1 in layer 0
    chooses 2 and 3 in layer 1. Then [[0, 0, 1, 1], [0, 0, 1, 1]] -> [[0, 0, 1, 1], [1, 1, 0, 0]].
    """
    given = np.asarray(experts_per_layer, dtype=np.int64)
    layers = len(given)
    if not layers:
        return given.astype(np.int16)
    overlap = overlaps(profile, given, ranks)
    starts = np.unique(np.linspace(0, layers - 1, min(layers, STARTS)).astype(np.int64)).tolist()
    options = [_sweep(overlap, np.tile(np.arange(ranks), (layers, 1)))]
    options += [_sweep(overlap, _start_from(overlap, start)) for start in starts]
    numbers = max(options, key=lambda option: round(agreement(overlap, option), 9))
    numbers = np.argsort(numbers[0])[numbers]
    return np.take_along_axis(numbers, given, axis=1).astype(np.int16)


def match_numbers(experts: npt.NDArray[np.integer], had_expert: npt.NDArray[np.bool_]) -> SmallArray:
    """[R] the number that each rank should get, so that most experts keep their place.

    experts: [layers, E] ranks from 0. had_expert: [R, layers, E] True where rank r had the expert. Equal
    numbers hold in every layer.

    Example: experts 0, 1 | 2, 3 were on ranks 0 | 1, and are now on ranks 1 | 0 -> [1, 0].
    """
    ranks = len(had_expert)
    num_kept = np.array(
        [[(had_expert[old] & (experts == new)).sum() for old in range(ranks)] for new in range(ranks)]
    )
    numbers: SmallArray = assign(num_kept)[1].astype(np.int16)
    return numbers


def overlaps(profile: Profile, experts: IntArray, ranks: int) -> FloatArray:
    """[layers, R, layers, R] covariance of the shares of any two clusters.

    Its trace is 1, unless all are 0.
    """
    layers = len(experts)
    by_request = profile.routes.requests >= REQUESTS_PER_RANK * ranks
    frequent_ids = np.arange(0) if by_request else _frequent(profile)
    shares = [
        _request_choices(profile, layer, experts[layer], ranks)
        if by_request
        else _token_choices(profile, layer, experts[layer], ranks)[frequent_ids]
        for layer in range(layers)
    ]
    rows = np.stack([_center_choices(choices) for choices in shares], axis=1).reshape(-1, layers * ranks)
    gram = (rows.T @ rows).astype(np.float64)
    gram /= np.trace(gram) or 1.0
    return gram.reshape(layers, ranks, layers, ranks)


def agreement(overlap: FloatArray, numbers: IntArray) -> float:
    """Sum of the overlaps [layers, R, layers, R] over all pairs of clusters with the same number.

    numbers: [layers, R] the number of each layer's clusters.
    """
    layers, ranks = numbers.shape
    one_hot = _one_hot(numbers).reshape(layers * ranks, ranks)
    return float(np.sum(one_hot * (overlap.reshape(layers * ranks, -1) @ one_hot)))


def _frequent(profile: Profile) -> IntArray:
    """The most frequent token ids, in ascending order."""
    first = profile.counts[0]
    num_choices = np.bincount(first.tokens, weights=first.counts, minlength=profile.vocab_size)
    return np.sort(np.argsort(-num_choices, kind="stable")[: min(MOST, np.count_nonzero(num_choices))])


def _request_choices(profile: Profile, layer: int, experts: IntArray, ranks: int) -> FloatArray:
    """[requests, R] how often each request chooses experts of each cluster of a layer."""
    routes = profile.routes
    requests = min(MOST, routes.requests)
    tokens = int(routes.starts[requests])
    keys = routes.owners[:tokens, None] * ranks + experts[routes.experts[:tokens, layer]]
    choices = np.bincount(keys.ravel(), minlength=requests * ranks).astype(np.float64)
    return choices.reshape(requests, ranks)


def _token_choices(profile: Profile, layer: int, experts: IntArray, ranks: int) -> FloatArray:
    """[V, R] how often each token id chooses experts of each cluster of a layer."""
    counts = profile.counts[layer]
    keys = counts.tokens * ranks + experts[counts.experts]
    choices = np.bincount(
        keys, weights=counts.counts.astype(np.float64), minlength=profile.vocab_size * ranks
    )
    return choices.astype(np.float64).reshape(-1, ranks)


def _center_choices(choices: FloatArray) -> npt.NDArray[np.float32]:
    """[n, R] shares of the choices [n, R] minus the mean over all, times the root of the row's choices."""
    size = choices.sum(axis=1, keepdims=True)
    mean = choices.sum(axis=0) / max(1.0, size.sum())
    shares = choices / np.maximum(size, 1.0)
    centred: npt.NDArray[np.float32] = ((shares - mean) * np.sqrt(size)).astype(np.float32)
    return centred


def _one_hot(numbers: IntArray) -> FloatArray:
    """Numbers [..., R] as a matrix [..., R, R] with 1 at (cluster, its number)."""
    found: FloatArray = np.eye(numbers.shape[-1])[numbers]
    return found


def _start_from(overlap: FloatArray, start: int) -> IntArray:
    """Numbers [layers, R] to start with.

    Layer `start` keeps its own, and each next one follows those before it. Layer 0 comes after the last
    one.
    """
    layers, ranks = overlap.shape[:2]
    numbers = np.tile(np.arange(ranks), (layers, 1))
    one_hot = np.zeros((layers, ranks, ranks))
    for layer in np.roll(np.arange(layers), -start).tolist():
        if layer != start:
            gain = overlap[layer].reshape(ranks, -1) @ one_hot.reshape(-1, ranks)
            numbers[layer] = assign(gain)[1]
        one_hot[layer] = _one_hot(numbers[layer])
    return numbers


def _sweep(overlap: FloatArray, numbers: IntArray) -> IntArray:
    """Renumber one layer at a time until no further change improves the overlap.

    Returns numbers [layers, R].
    """
    layers, ranks = numbers.shape
    numbers, one_hot = numbers.copy(), _one_hot(numbers)
    has_changed = True
    while has_changed:
        has_changed = False
        for layer in range(layers):
            one_hot[layer] = 0.0
            gain = overlap[layer].reshape(ranks, -1) @ one_hot.reshape(-1, ranks)
            cluster, best = assign(gain)
            if gain[cluster, best].sum() - gain[cluster, numbers[layer]].sum() > EXACT:
                numbers[layer], has_changed = best, True
            one_hot[layer] = _one_hot(numbers[layer])
    return numbers
