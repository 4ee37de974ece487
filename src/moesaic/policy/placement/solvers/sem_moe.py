"""Semantic Parallelism's co-scheduling (Algorithm 1): experts and requests are placed greedily in turns.

 1. Requests are clustered by the experts they choose.
 2. Experts of each layer, heaviest first, go to the rank with room that has the best score: experts there
    that the same tokens choose, requests there that choose it, minus the rank's load. Then pairs are
    swapped.
 3. Requests, longest first, go to the rank with room that has the best score: similar requests there,
    experts there that it chooses, over all layers.
 4. Steps 2 and 3 are repeated. The round with the least sum of the fullest rank's load and the remote
    choices is kept.

The paper leaves some things open. A request has one rank for all layers, so its scores are summed over
layers. That makes a rank's number mean the same in all of them; `align` still looks for better numbers.
Every term is a share (of all pairs of choices, of all choices, of a rank's fair load), so that the weights
below are comparable. Token labels are those of `tokens.labelled`: the paper's (line 54) cover only tokens
of the sampled requests.

A profile without enough sampled requests is solved with its most frequent token ids in place of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Profile
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers.affinity import coactivation
from moesaic.policy.placement.solvers.align import align
from moesaic.policy.placement.solvers.solver import Progress, rooms
from moesaic.policy.placement.solvers.swaps import Affinity, swapped
from moesaic.policy.placement.solvers.tokens import labelled

FloatArray = npt.NDArray[np.float64]
RowArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Weights:
    """Weights and numbers of steps. The paper gives none of them."""

    experts: float = 1.0
    """alpha_e: tokens that choose an expert and others of the rank."""
    requests: float = 1.0
    """beta_e: choices of an expert by requests of the rank."""
    load: float = 0.25
    """gamma_e: the rank's load, 1 being its fair share."""
    alike: float = 0.5
    """alpha_r: cosine between a request and the rank's requests, means taken off."""
    served: float = 1.0
    """beta_r: choices of a request that experts of the rank serve, 1 being an even share."""
    steps: int = 16
    """n_steps, rounds of both."""
    swaps: int = 2000
    """ft_steps, exchanges of two experts of a layer at most."""
    most: int = 4096
    """Maximum number of requests that are used."""


@dataclass(frozen=True)
class Scene:
    """The input of the placement."""

    rows: RowArray
    """[r, layers, E] choices of each request, longest request first."""
    pairs: FloatArray
    """[layers, E, E] share of all pairs of choices by one token that two experts make up; diagonal 0."""
    loads: FloatArray
    """[layers, E] share of a layer's choices."""
    room: IntArray
    """[R] experts of each rank."""

    @property
    def ranks(self) -> int:
        return len(self.room)


def solve(
    profile: Profile,
    ranks: int,
    seed: int = 0,
    progress: Progress | None = None,
    weights: Weights | None = None,
) -> Coclusters:
    """Experts and requests in turns. Raises ConfigError where `ranks` is not in 1 .. experts."""
    weights = weights or Weights()
    scene = made(profile, rooms(profile.num_experts, ranks), weights)
    experts = alternated(scene, np.random.default_rng(seed), weights, progress)
    return labelled(profile, align(profile, experts, ranks))


def alternated(
    scene: Scene, rng: np.random.Generator, weights: Weights, progress: Progress | None = None
) -> IntArray:
    """Ranks [layers, E] of the best of `weights.steps` rounds.

    Example: two requests, one chooses experts 0 and 2, one 1 and 3: both have theirs on their rank.
    """
    layers = len(scene.loads)
    requests = gathered(scene, rng)
    best, least = np.zeros(scene.loads.shape, dtype=np.int64), np.inf
    for step in range(weights.steps):
        experts = np.empty(scene.loads.shape, dtype=np.int64)
        for layer in range(layers):
            experts[layer] = placed(scene, layer, requests, rng, weights)
            if progress is not None:
                progress(step * layers + layer + 1, weights.steps * layers)
        requests = scheduled(scene, experts, weights)
        if (found := cost(scene, experts, requests)) < least:
            best, least = experts, found
    return best


def made(profile: Profile, room: IntArray, weights: Weights) -> Scene:
    """The input from a profile."""
    size = profile.num_experts
    pairs = np.stack([coactivation(counts, size, profile.top_k) for counts in profile.counts])
    pairs[:, np.arange(size), np.arange(size)] = 0.0
    pairs /= np.maximum(pairs.sum(axis=(1, 2), keepdims=True), 1e-300)
    loads = profile.loads / np.maximum(profile.loads.sum(axis=1, keepdims=True), 1)
    enough = profile.routes.requests >= 2 * len(room)
    rows = _request_rows(profile, weights.most) if enough else _token_rows(profile, weights.most)
    order = np.argsort(-rows.sum(axis=(1, 2)), kind="stable")
    return Scene(rows[order], pairs, loads, room)


def _request_rows(profile: Profile, most: int) -> RowArray:
    """[r, layers, E] choices of the first `most` sampled requests."""
    routes, size = profile.routes, profile.num_experts
    requests = min(most, routes.requests)
    tokens = int(routes.starts[requests])
    rows = np.empty((requests, len(profile.counts), size), dtype=np.float32)
    for layer in range(len(profile.counts)):
        keys = routes.owners[:tokens, None] * size + routes.experts[:tokens, layer]
        rows[:, layer] = np.bincount(keys.ravel(), minlength=requests * size).reshape(requests, size)
    return rows


def _token_rows(profile: Profile, most: int) -> RowArray:
    """[r, layers, E] choices of the `most` token ids that were seen most often."""
    size = profile.num_experts
    seen = np.bincount(
        profile.counts[0].tokens, weights=profile.counts[0].counts, minlength=profile.vocab_size
    )
    ids = np.argsort(-seen, kind="stable")[: min(most, np.count_nonzero(seen))]
    number = np.full(profile.vocab_size, -1)
    number[ids] = np.arange(len(ids))
    rows = np.zeros((len(ids), len(profile.counts), size), dtype=np.float32)
    for layer, counts in enumerate(profile.counts):
        found = number[counts.tokens]
        rows[found[found >= 0], layer, counts.experts[found >= 0]] = counts.counts[found >= 0]
    return rows


# ---- requests


def gathered(scene: Scene, rng: np.random.Generator, rounds: int = 10) -> IntArray:
    """Ranks [r] by what requests choose alone: k-means on the sphere with equal sizes (line 44)."""
    unit = _unit(scene)
    labels = np.zeros(len(unit), dtype=np.int64)
    if not len(unit):
        return labels
    first = rng.permutation(len(unit))[: scene.ranks]
    centres = unit[np.resize(first, scene.ranks)]
    for _ in range(rounds):
        labels = _filled(unit @ centres.T, scene.ranks)
        centres = np.eye(scene.ranks, dtype=np.float32)[labels].T @ unit
        centres /= np.maximum(np.linalg.norm(centres, axis=1, keepdims=True), 1e-30)
    return labels


def scheduled(scene: Scene, experts: IntArray, weights: Weights) -> IntArray:
    """Ranks [r] of the requests, longest first, given the experts' [layers, E] (lines 28 to 42)."""
    unit, local = _unit(scene), _local(scene, experts)
    size = local.sum(axis=1, keepdims=True)
    mean = local.sum(axis=0) / max(1.0, local.sum())
    served = weights.served * scene.ranks * (local / np.maximum(size, 1.0) - mean)
    left = rooms_of_requests(len(unit), scene.ranks)
    centres = np.zeros((scene.ranks, unit.shape[1]), dtype=np.float32)
    labels = np.zeros(len(unit), dtype=np.int64)
    for request, row in enumerate(unit):
        length = np.maximum(np.linalg.norm(centres, axis=1), 1.0)
        score = weights.alike * (centres @ row) / length + served[request]
        rank = int(np.where(left > 0, score, -np.inf).argmax())
        labels[request] = rank
        left[rank] -= 1
        centres[rank] += row
    return labels


def rooms_of_requests(requests: int, ranks: int) -> IntArray:
    """[R] requests of each rank. Example: 5 requests, 3 ranks -> 2, 2, 1; 1 request, 2 ranks -> 1, 0."""
    return requests // ranks + (np.arange(ranks) < requests % ranks).astype(np.int64)


def _flat(scene: Scene) -> RowArray:
    """[r, layers * E] choices of each request."""
    return scene.rows.reshape(len(scene.rows), scene.loads.size)


def _unit(scene: Scene) -> RowArray:
    """[r, layers * E] shares minus their mean, of length 1 or 0."""
    flat = _flat(scene)
    shares = flat / np.maximum(flat.sum(axis=1, keepdims=True), 1.0)
    shares -= shares.sum(axis=0) / max(1, len(shares))
    unit: RowArray = shares / np.maximum(np.linalg.norm(shares, axis=1, keepdims=True), 1e-12)
    return unit


def _filled(score: RowArray, ranks: int) -> IntArray:
    """Ranks [r] by score [r, R], equally many each. Requests with the largest differences between ranks
    choose first."""
    top = np.sort(score, axis=1)
    matters = top[:, -1] - top[:, -2] if ranks > 1 else top[:, -1]
    left = rooms_of_requests(len(score), ranks)
    labels = np.zeros(len(score), dtype=np.int64)
    for request in np.argsort(-matters, kind="stable").tolist():
        rank = int(np.where(left > 0, score[request], -np.inf).argmax())
        labels[request] = rank
        left[rank] -= 1
    return labels


def _local(scene: Scene, experts: IntArray) -> FloatArray:
    """[r, R] choices of each request that each rank serves, over all layers."""
    held = np.eye(scene.ranks, dtype=np.float32)[experts].reshape(-1, scene.ranks)
    return (_flat(scene) @ held).astype(np.float64)


# ---- experts


def placed(
    scene: Scene, layer: int, requests: IntArray, rng: np.random.Generator, weights: Weights
) -> IntArray:
    """Ranks [E] of a layer's experts, given the requests' [r] (lines 3 to 26)."""
    affinity = _affinity(scene, layer, requests, weights)
    left = scene.room.copy()
    carried = np.zeros(scene.ranks)
    held = np.zeros((len(affinity.loads), scene.ranks))
    for expert in np.argsort(-affinity.loads, kind="stable").tolist():
        load = affinity.loads[expert]
        score = affinity.pairs[expert] @ held + affinity.ranks[expert] - load * (2 * carried + load)
        rank = int(np.where(left > 0, score, -np.inf).argmax())
        held[expert, rank] = 1.0
        carried[rank] += load
        left[rank] -= 1
    return swapped(affinity, held.argmax(axis=1), rng, weights.swaps)


def _affinity(scene: Scene, layer: int, requests: IntArray, weights: Weights) -> Affinity:
    """Sum of both affinities over the layer, minus gamma times R times the squares of the ranks' loads.

    Squares, so that greedy steps and exchanges raise one value: what a choice adds to R * load ** 2 is twice
    the load of the rank in fair shares, times the expert's load.
    """
    choices = scene.rows[:, layer].T @ np.eye(scene.ranks)[requests]
    share = choices / max(1.0, float(choices.sum()))
    loads = scene.loads[layer] * np.sqrt(weights.load * scene.ranks)
    return Affinity(2 * weights.experts * scene.pairs[layer], weights.requests * share, loads)


def cost(scene: Scene, experts: IntArray, requests: IntArray) -> float:
    """Load of the fullest rank in fair shares, mean of the layers, plus the share of remote choices."""
    layers = np.arange(len(experts))[:, None]
    carried = np.zeros((len(experts), scene.ranks))
    np.add.at(carried, (layers, experts), scene.loads)
    local = _local(scene, experts)
    mine = local[np.arange(len(requests)), requests].sum() / max(1.0, local.sum())
    return float(carried.max(axis=1).mean() * scene.ranks + 1 - mine)
