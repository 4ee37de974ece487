"""Predicts the rank of a token before the gate chooses its experts.

Speculative MoE (section 3.3) and Sem-MoE (section 3.2) have two tables. Table T maps a token id to a rank.
Table A maps the token's ranks in the last two layers (a device 2-gram) to a rank. The prediction with the
higher confidence is used.

Both confidences are the same quantity: the share of a token's experts that is expected on the rank. It is
the share of counted pairs, for the token id or for the past ranks. A token id or past that was never seen
has the average share. We tried adding average tokens to every row, so that ids seen once are less certain.
Predictions of the demo's routing did not improve.
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
    """Build the tables for experts placed as in `clusters`.

    T has the labels of `clusters`, which keep loads even, with the confidence that the profile gives them.
    A token that the profile has never seen takes the entry of its nearest known one. If the nearest one was
    not computed, it has its own label and the confidence of an average token. A is counted over the
    profile's routes.

    Example: one layer, k = 1, experts 0 and 1 on ranks 0 and 1. Token 0 chose expert 0 three times and
    expert 1 once; token 2 was never seen. Token 0 with label 0 has confidence 3/4 and scores 3/4, 1/4.
    Token 2 with label 1 has confidence 1/4.
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
    """[V, ranks] share of each token id's experts that is expected on each rank, in one layer.

    owners: [E] the rank of each expert.
    """
    vocab_size = len(counts.starts) - 1
    keys = counts.tokens * ranks + owners[counts.experts]
    pairs = np.bincount(keys, weights=counts.counts, minlength=vocab_size * ranks)
    return _normalize(pairs.reshape(vocab_size, ranks))


def device(experts: AnyIntArray, owners: AnyIntArray, ranks: int) -> IntArray:
    """[n] the rank with most of each row's experts. A tie goes to the rank of the better expert.

    experts: [n, k] of one layer, best first. owners: [E] the rank of each expert.

    Example: experts [[3, 0, 1]] with owners [0, 0, 1, 1] give rank 0, which has two of them. [[3, 0]] is a
    tie, and expert 3 is the better one, so it gives rank 1.
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
    """[n] the predicted rank of each row in this layer, and [n] the confidence.

    layer: counted from 0 over the tables' layers. tokens: [n] ids. history: [n, 2] what `device` returned
    for the rows two layers ago and one layer ago. None means that there are no two layers before; then only
    T is used. If both confidences are equal, T decides.

    Source: Speculative MoE, Algorithm 2; Sem-MoE, Algorithm 3, line 2.
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
    """[layers, ranks^2] ranks and confidences of table A. All are 0 if the profile has no routes."""
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
        share = _normalize(pairs)
        after[layer], confidence[layer] = share.argmax(axis=1), share.max(axis=1)
    return after, confidence


def _normalize(pairs: npt.NDArray[Any]) -> FloatArray:
    """Counted pairs [n, ranks] as shares that sum to 1. An empty row gets the shares of all rows together."""
    average = pairs.sum(axis=0) if pairs.any() else np.ones(pairs.shape[1])
    rows = np.where(pairs.any(axis=1, keepdims=True), pairs, average)
    found: FloatArray = rows / rows.sum(axis=1, keepdims=True)
    return found
