"""Measures how well routing is predicted on requests that the prediction has never seen.

Each prediction learns from one part of a profile's requests and is tested on the others:

 - *static*: the experts that a token id chose most often (Sem-MoE, appendix A.2).
 - *look back*: the experts that most often follow the experts of earlier layers (Sem-MoE, appendix A.2).
 - *rank*: the rank of a token, from its id, from its ranks in the last two layers, or from both
   (Speculative MoE, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moesaic.core.profile import Counts, Profile, Routes, SmallArray
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.predict import build, device, predict
from moesaic.policy.placement.routing_statistics import hits, hottest
from moesaic.policy.placement.solvers import vanilla

LAYERS_BACK = 5


@dataclass(frozen=True)
class Static:
    """Quality of the static prediction: a token id always chooses the k experts that it chose most often
    before."""

    precision: float
    """Share of those k experts that were chosen at least once. Mean over token ids that both parts know."""
    f1: float
    """F1 of those k experts against all experts that were chosen at least once."""
    hits: float
    """Share of a token's experts that are among those k. Mean over tokens; unknown ids count as 0."""


@dataclass(frozen=True)
class RankPrediction:
    """Quality of rank predictions: the share of (token, expert) pairs on the predicted rank.

    This is the local activation rate of tokens that are placed on their predicted rank.
    """

    guess: float
    """Rate if every token is predicted on the busiest rank."""
    token: float
    """Rate with table T."""
    two_gram: float
    """Rate with table A, or with T in the first two layers."""
    both: float
    """Rate with the table that has the higher confidence."""
    most: float
    """Rate if each token is on the rank with most of its experts. No prediction can do better."""


@dataclass(frozen=True)
class LayerPrediction:
    """The quality of all predictions in one layer."""

    layer: int
    """Number of the layer in the model."""
    static: Static
    look_back: tuple[float, ...]
    """Share of a token's experts that are predicted from its best experts of the last 0, 1, 2, ... layers.

    The prediction is the k experts that follow them most often. There is one value for each number of
    layers that exist, at most LAYERS_BACK.
    """
    ranks: RankPrediction


@dataclass(frozen=True)
class Prediction:
    """The quality of all predictions, learned from some requests and tested on others."""

    learned_requests: int
    asked_requests: int
    ranks: int
    """Number of ranks. Experts are placed in consecutive ranges."""
    layers: tuple[LayerPrediction, ...]


def examine(profile: Profile, routes: Routes, share: float, ranks: int, seed: int) -> Prediction | None:
    """Learn from a random `share` of the requests of `routes` and test on the others.

    ranks: of a vanilla placement. Returns None if there are too few requests. Raises ConfigError if there
    are more ranks than experts.
    """
    if routes.requests < 2:
        return None
    train_routes, test_routes = routes.split(min(share, 1 - 1 / routes.requests), seed)
    if not len(train_routes.tokens) or not len(test_routes.tokens):
        return None
    train_profile = profile.with_routes(train_routes)
    by_rank = predict_ranks(train_profile, test_routes, ranks)
    layers = tuple(
        LayerPrediction(
            number,
            static_top(
                train_profile.counts[index],
                test_routes.tokens,
                test_routes.experts[:, index],
                profile.num_experts,
            ),
            look_back(train_routes.experts, test_routes.experts, index, profile.num_experts),
            by_rank[index],
        )
        for index, number in enumerate(profile.layers)
    )
    return Prediction(train_routes.requests, test_routes.requests, ranks, layers)


def static_top(
    counts: Counts, tokens: npt.NDArray[np.int32], experts: SmallArray, num_experts: int
) -> Static:
    """Measure the static prediction in one layer.

    counts: what was learned. tokens: [t] and experts: [t, k] chosen later.

    If prediction and choice have k experts each, precision and F1 are the same number, `hits`. The papers
    print two numbers (96.3 % and 78.8 %), since they ask whether an id's k experts are ever chosen.

    Example: k = 2. Token 7 chose experts 0 and 1 before, then 0, 2 and 0, 3. Precision is 1/2 (0 was
    chosen, 1 was not). One of the three experts 0, 2, 3 was predicted, so F1 = 2 * 1/2 * 1/3 / (1/2 + 1/3)
    = 0.4. hits is 1/2.
    """
    vocab_size, k = len(counts.starts) - 1, experts.shape[1]
    top = hottest(counts, k)
    test_counts = Counts.from_pairs(tokens, experts, vocab_size, num_experts)
    common_ids = np.intersect1d(counts.known_tokens, test_counts.known_tokens)
    is_hit = (test_counts.experts[:, None] == top[test_counts.tokens]).any(axis=1)
    num_hits = np.bincount(test_counts.tokens, is_hit, minlength=vocab_size)[common_ids]
    num_chosen = np.diff(test_counts.starts)[common_ids]
    return Static(
        precision=_mean(num_hits / k),
        f1=_mean(2 * num_hits / (k + num_chosen)),
        hits=_mean(hits(top[tokens], experts)),
    )


def look_back(
    train_experts: SmallArray, test_experts: SmallArray, layer: int, num_experts: int
) -> tuple[float, ...]:
    """Accuracies of predictions from 0, 1, 2, ... earlier layers, for layer `layer`, counted from 0.

    train_experts, test_experts: [t, layers, k] experts of two sets of tokens. A past that was never seen is
    shortened by its earliest layer until it was seen.
    """
    k = train_experts.shape[2]
    train_layer, past = train_experts[:, layer], np.zeros(len(train_experts), dtype=np.int64)
    test_past = np.zeros(len(test_experts), dtype=np.int64)
    predicted_experts = np.empty((len(test_experts), k), dtype=np.int16)
    accuracies = []
    for back in range(min(LAYERS_BACK, layer) + 1):
        if back:
            past = past * num_experts + train_experts[:, layer - back, 0]
            test_past = test_past * num_experts + test_experts[:, layer - back, 0]
        pasts, past_index = np.unique(past, return_inverse=True)
        common = hottest(Counts.from_pairs(past_index, train_layer, len(pasts), num_experts), k)
        place = np.minimum(np.searchsorted(pasts, test_past), len(pasts) - 1)
        is_known = pasts[place] == test_past
        predicted_experts[is_known] = common[place[is_known]]
        accuracies.append(_mean(hits(predicted_experts, test_experts[:, layer])))
    return tuple(accuracies)


def predict_ranks(train_profile: Profile, test_routes: Routes, ranks: int) -> list[RankPrediction]:
    """Measure the rank predictions of each layer.

    Experts are in consecutive ranges. Each token id is on the rank with most of its choices.
    """
    clusters = vanilla.solve(train_profile, ranks)
    tables = build(train_profile, clusters)
    blind = replace(tables, confidence=np.zeros_like(tables.confidence))
    past: list[IntArray] = []
    predictions = []
    for layer, owners in enumerate(clusters.experts):
        homes = owners[test_routes.experts[:, layer]]
        history = np.stack(past[-2:], axis=1) if layer >= 2 else None
        busiest = np.bincount(owners, train_profile.loads[layer], minlength=ranks).argmax()
        answers = (
            np.full(len(homes), busiest),
            predict(tables, layer, test_routes.tokens)[0],
            predict(blind, layer, test_routes.tokens, history)[0],
            predict(tables, layer, test_routes.tokens, history)[0],
        )
        past.append(device(test_routes.experts[:, layer], owners, ranks))
        shares_there = [_mean((homes == answer[:, None]).mean(axis=1)) for answer in (*answers, past[-1])]
        predictions.append(RankPrediction(*shares_there))
    return predictions


def _mean(values: npt.NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else 0.0
