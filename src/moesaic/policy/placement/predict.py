"""Predicts the rank of a token before the gate has chosen: from its id, or from its ranks in the last two
layers.

Speculative MoE (section 3.3) and Sem-MoE (section 3.2): table T maps a token id to a rank; table A maps the
ranks of the last two layers (a device 2-gram) to a rank. The prediction with the higher confidence is used.

Both confidences are the same quantity, the share of a token's experts that is expected on the rank: counted
pairs over all pairs of the token id or of the past; for those never seen the average. Adding average tokens
to every row, so that ids seen once are less certain, did not improve predictions of the demo's routing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Counts, Profile
from moesaic.core.tables import Tables
from moesaic.core.tokens import IntArray

FloatArray = npt.NDArray[np.float64]
AnyIntArray = npt.NDArray[Any]


def build(profile: Profile, clusters: Coclusters) -> Tables:
    """The tables for experts placed as `clusters` says.

    T has the labels of `clusters`, which keep loads even, with the confidence that the profile gives them.
    A token that the profile has never seen is looked up at its nearest known one. If that was not computed,
    it has its own label and the confidence of an average token. A is counted over the profile's routes.

    Example: one layer, k = 1, experts 0 and 1 on ranks 0 and 1. Token 0 chose expert 0 three times and
    expert 1 once; token 2 was never seen. Token 0 labelled 0 has the confidence 3/4 and scores 3/4, 1/4;
    token 2 labelled 1 has the confidence 1/4.
    """
    layers, vocab_size, ranks = len(profile.layers), profile.vocab_size, clusters.ranks
    nearest = np.arange(vocab_size) if profile.nearest is None else profile.nearest
    labels = np.empty((vocab_size, layers), dtype=np.int16)
    confidence = np.empty((vocab_size, layers), dtype=np.float16)
    scores = np.zeros((vocab_size, ranks))
    for layer, counts in enumerate(profile.counts):
        share = shares(counts, clusters.experts[layer], ranks)[nearest]
        labels[:, layer] = clusters.tokens[layer][nearest]
        confidence[:, layer] = np.take_along_axis(share, labels[:, layer, None].astype(np.int64), 1)[:, 0]
        scores += profile.top_k * share
    after, after_confidence = _two_grams(profile, clusters)
    return Tables(
        model=profile.model,
        layers=profile.layers,
        experts=clusters.experts,
        scores=scores.astype(np.float32),
        labels=labels,
        confidence=confidence,
        after=after.astype(np.int16),
        after_confidence=after_confidence.astype(np.float16),
    )


def shares(counts: Counts, owners: AnyIntArray, ranks: int) -> FloatArray:
    """[V, ranks] the share of each token id's experts that is expected on each rank, in one layer.

    owners: [E] the rank of each expert.
    """
    vocab_size = len(counts.starts) - 1
    keys = counts.tokens * ranks + owners[counts.experts]
    pairs = np.bincount(keys, weights=counts.counts, minlength=vocab_size * ranks)
    return _normalised(pairs.reshape(vocab_size, ranks))


def device(experts: AnyIntArray, owners: AnyIntArray, ranks: int) -> IntArray:
    """[n] the rank that holds most of each row's experts; of equal ranks that of the better expert.

    experts: [n, k] of one layer, best first. owners: [E] the rank of each expert.

    Example: experts [[3, 0, 1]] with owners [0, 0, 1, 1]: rank 0 has two of them. [[3, 0]] is a draw, and
    expert 3 is the better one: rank 1.
    """
    homes = owners[experts].astype(np.int64)
    n, k = homes.shape
    keys = np.arange(n)[:, None] * ranks + homes
    held = np.bincount(keys.ravel(), minlength=n * ranks)[keys]
    best = held.argmax(axis=1) if k else np.zeros(n, dtype=np.int64)
    found: IntArray = homes[np.arange(n), best]
    return found


def predict(
    tables: Tables, layer: int, tokens: AnyIntArray, history: AnyIntArray | None = None
) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """[n] the rank of each row in this layer, and [n] the confidence.

    layer: counted from 0 over the tables' layers. tokens: [n] ids. history: [n, 2] what `device` returned
    for the rows two layers ago and one layer ago. None: there are no two layers before, and only T is used.
    Of equal confidences T's answer is taken.

    Speculative MoE, Algorithm 2; Sem-MoE, Algorithm 3, line 2.
    """
    ranks = tables.labels[tokens, layer].astype(np.int64)
    sure = tables.confidence[tokens, layer].astype(np.float32)
    if history is None:
        return ranks, sure
    keys = history[:, 0].astype(np.int64) * tables.ranks + history[:, 1]
    other = tables.after_confidence[layer, keys].astype(np.float32)
    surer = other > sure
    return np.where(surer, tables.after[layer, keys], ranks), np.where(surer, other, sure)


def _two_grams(profile: Profile, clusters: Coclusters) -> tuple[IntArray, FloatArray]:
    """[layers, ranks^2] ranks and confidences of table A; nothing is known without routes."""
    layers, ranks = len(profile.layers), clusters.ranks
    after = np.zeros((layers, ranks**2), dtype=np.int64)
    confidence = np.zeros((layers, ranks**2))
    experts = profile.routes.experts
    if not len(experts):
        return after, confidence
    past = [device(experts[:, layer], clusters.experts[layer], ranks) for layer in range(layers)]
    for layer in range(2, layers):
        keys = (past[layer - 2] * ranks + past[layer - 1])[:, None] * ranks
        keys = keys + clusters.experts[layer][experts[:, layer]]
        pairs = np.bincount(keys.ravel(), minlength=ranks**3).reshape(ranks**2, ranks)
        share = _normalised(pairs)
        after[layer], confidence[layer] = share.argmax(axis=1), share.max(axis=1)
    return after, confidence


def _normalised(pairs: npt.NDArray[Any]) -> FloatArray:
    """[n, ranks] counted pairs -> shares that sum to 1; an empty row has the shares of all rows together."""
    average = pairs.sum(axis=0) if pairs.any() else np.ones(pairs.shape[1])
    rows = np.where(pairs.any(axis=1, keepdims=True), pairs, average)
    found: FloatArray = rows / rows.sum(axis=1, keepdims=True)
    return found
