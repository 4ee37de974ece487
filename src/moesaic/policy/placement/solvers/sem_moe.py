"""Semantic Parallelism's co-scheduling (Algorithm 1): experts and requests are placed greedily in turns.

 1. Requests are clustered by the experts they choose.
 2. Experts of each layer, heaviest first, go to the rank with a free slot and the best score. The score
    counts experts there that the same tokens choose, and requests there that choose it, minus the rank's
    load. Then pairs are swapped.
 3. Requests, longest first, go to the rank with a free place and the best score. The score counts similar
    requests there, and experts there that it chooses, over all layers.
 4. Steps 2 and 3 are repeated. The cost of a round is the fullest rank's load plus the remote choices. The
    round with the least cost is kept.

The paper leaves some things open. A request has one rank for all layers, so its scores are summed over
layers. That makes a rank's number mean the same in all of them; `align` still looks for better numbers.
Every term is a share (of all pairs of choices, of all choices, of a rank's fair load), so that the weights
below are comparable. Token labels are those of `tokens.label_tokens`, since the paper's (line 54) cover only
tokens of the sampled requests.

If a profile has too few sampled requests, its most frequent token ids replace them.
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
from moesaic.policy.placement.solvers.solver import Progress, experts_per_rank
from moesaic.policy.placement.solvers.swaps import Affinity, swap_experts
from moesaic.policy.placement.solvers.tokens import label_tokens

FloatArray = npt.NDArray[np.float64]
RowArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Weights:
    """Weights of the scores, and numbers of steps. The paper gives none of them."""

    experts: float = 1.0
    """alpha_e: weight of tokens that choose both an expert and others of the rank."""
    requests: float = 1.0
    """beta_e: weight of choices of an expert by requests of the rank."""
    load: float = 0.25
    """gamma_e: weight of the rank's load, where 1 is its fair share."""
    alike: float = 0.5
    """alpha_r: weight of the cosine between a request and the rank's requests, after subtracting means."""
    served_choices: float = 1.0
    """beta_r: weight of a request's choices that experts of the rank serve, where 1 is an even share."""
    steps: int = 16
    """n_steps: rounds, each of which places experts and requests."""
    swaps: int = 2000
    """ft_steps: maximum number of exchanges of two experts of a layer."""
    max_requests: int = 4096
    """Maximum number of requests that are used."""


@dataclass(frozen=True)
class Inputs:
    """The numbers that the placement is computed from."""

    rows: RowArray
    """[r, layers, E] how often each request chooses each expert. The longest request comes first."""
    pairs: FloatArray
    """[layers, E, E] share of each two experts in all pairs of choices by one token; 0 on the diagonal."""
    loads: FloatArray
    """[layers, E] share of each expert in the layer's choices."""
    room: IntArray
    """[R] number of experts of a layer on each rank."""

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
    """Place experts and requests in turns.

    Raises ConfigError unless `ranks` is 1 to the number of experts.
    """
    weights = weights or Weights()
    inputs = inputs_of(profile, experts_per_rank(profile.num_experts, ranks), weights)
    experts = alternate(inputs, np.random.default_rng(seed), weights, progress)
    return label_tokens(profile, align(profile, experts, ranks))


def alternate(
    inputs: Inputs, rng: np.random.Generator, weights: Weights, progress: Progress | None = None
) -> IntArray:
    """Ranks [layers, E] of the experts in the best of `weights.steps` rounds.

    Example: one request chooses experts 0 and 2, another one 1 and 3. Both then have their experts on their
    rank.
    """
    layers = len(inputs.loads)
    requests = cluster_requests(inputs, rng)
    best, least = np.zeros(inputs.loads.shape, dtype=np.int64), np.inf
    for step in range(weights.steps):
        experts = np.empty(inputs.loads.shape, dtype=np.int64)
        for layer in range(layers):
            experts[layer] = place_experts(inputs, layer, requests, rng, weights)
            if progress is not None:
                progress(step * layers + layer + 1, weights.steps * layers)
        requests = place_requests(inputs, experts, weights)
        if (found := cost(inputs, experts, requests)) < least:
            best, least = experts, found
    return best


def inputs_of(profile: Profile, room: IntArray, weights: Weights) -> Inputs:
    """Take the numbers for the placement from a profile."""
    size = profile.num_experts
    pairs = np.stack([coactivation(counts, size, profile.top_k) for counts in profile.counts])
    pairs[:, np.arange(size), np.arange(size)] = 0.0
    pairs /= np.maximum(pairs.sum(axis=(1, 2), keepdims=True), 1e-300)
    loads = profile.loads / np.maximum(profile.loads.sum(axis=1, keepdims=True), 1)
    enough = profile.routes.requests >= 2 * len(room)
    rows = (
        _request_rows(profile, weights.max_requests) if enough else _token_rows(profile, weights.max_requests)
    )
    order = np.argsort(-rows.sum(axis=(1, 2)), kind="stable")
    return Inputs(rows[order], pairs, loads, room)


def _request_rows(profile: Profile, max_requests: int) -> RowArray:
    """[r, layers, E] how often each of the first `max_requests` sampled requests chooses each expert."""
    routes, size = profile.routes, profile.num_experts
    requests = min(max_requests, routes.requests)
    tokens = int(routes.starts[requests])
    rows = np.empty((requests, len(profile.counts), size), dtype=np.float32)
    for layer in range(len(profile.counts)):
        keys = routes.owners[:tokens, None] * size + routes.experts[:tokens, layer]
        rows[:, layer] = np.bincount(keys.ravel(), minlength=requests * size).reshape(requests, size)
    return rows


def _token_rows(profile: Profile, max_ids: int) -> RowArray:
    """[r, layers, E] how often each of the `max_ids` most frequent token ids chooses each expert."""
    size = profile.num_experts
    num_choices = np.bincount(
        profile.counts[0].tokens, weights=profile.counts[0].counts, minlength=profile.vocab_size
    )
    ids = np.argsort(-num_choices, kind="stable")[: min(max_ids, np.count_nonzero(num_choices))]
    number = np.full(profile.vocab_size, -1)
    number[ids] = np.arange(len(ids))
    rows = np.zeros((len(ids), len(profile.counts), size), dtype=np.float32)
    for layer, counts in enumerate(profile.counts):
        id_index = number[counts.tokens]
        rows[id_index[id_index >= 0], layer, counts.experts[id_index >= 0]] = counts.counts[id_index >= 0]
    return rows


# ---- requests


def cluster_requests(inputs: Inputs, rng: np.random.Generator, rounds: int = 10) -> IntArray:
    """Ranks [r] of the requests by the experts they choose: k-means on the sphere with equal sizes (line
    44)."""
    unit = _unit(inputs)
    labels = np.zeros(len(unit), dtype=np.int64)
    if not len(unit):
        return labels
    first = rng.permutation(len(unit))[: inputs.ranks]
    centres = unit[np.resize(first, inputs.ranks)]
    for _ in range(rounds):
        labels = _assign_evenly(unit @ centres.T, inputs.ranks)
        centres = np.eye(inputs.ranks, dtype=np.float32)[labels].T @ unit
        centres /= np.maximum(np.linalg.norm(centres, axis=1, keepdims=True), 1e-30)
    return labels


def place_requests(inputs: Inputs, experts: IntArray, weights: Weights) -> IntArray:
    """Ranks [r] of the requests, longest first, given the ranks of the experts [layers, E] (lines 28 to
    42)."""
    unit, local = _unit(inputs), _local(inputs, experts)
    size = local.sum(axis=1, keepdims=True)
    mean = local.sum(axis=0) / max(1.0, local.sum())
    served = weights.served_choices * inputs.ranks * (local / np.maximum(size, 1.0) - mean)
    left = requests_per_rank(len(unit), inputs.ranks)
    centres = np.zeros((inputs.ranks, unit.shape[1]), dtype=np.float32)
    labels = np.zeros(len(unit), dtype=np.int64)
    for request, row in enumerate(unit):
        length = np.maximum(np.linalg.norm(centres, axis=1), 1.0)
        score = weights.alike * (centres @ row) / length + served[request]
        rank = int(np.where(left > 0, score, -np.inf).argmax())
        labels[request] = rank
        left[rank] -= 1
        centres[rank] += row
    return labels


def requests_per_rank(requests: int, ranks: int) -> IntArray:
    """[R] number of requests on each rank.

    Example: 5 requests, 3 ranks -> 2, 2, 1; 1 request, 2 ranks -> 1, 0.
    """
    return requests // ranks + (np.arange(ranks) < requests % ranks).astype(np.int64)


def _flat(inputs: Inputs) -> RowArray:
    """[r, layers * E] how often each request chooses each expert."""
    return inputs.rows.reshape(len(inputs.rows), inputs.loads.size)


def _unit(inputs: Inputs) -> RowArray:
    """[r, layers * E] shares of each request's choices minus the mean of all requests, scaled to length 1
    or 0."""
    flat = _flat(inputs)
    shares = flat / np.maximum(flat.sum(axis=1, keepdims=True), 1.0)
    shares -= shares.sum(axis=0) / max(1, len(shares))
    unit: RowArray = shares / np.maximum(np.linalg.norm(shares, axis=1, keepdims=True), 1e-12)
    return unit


def _assign_evenly(score: RowArray, ranks: int) -> IntArray:
    """Ranks [r] by score [r, R], with equally many requests on each rank.

    Requests with the largest differences between ranks choose first.
    """
    top = np.sort(score, axis=1)
    matters = top[:, -1] - top[:, -2] if ranks > 1 else top[:, -1]
    left = requests_per_rank(len(score), ranks)
    labels = np.zeros(len(score), dtype=np.int64)
    for request in np.argsort(-matters, kind="stable").tolist():
        rank = int(np.where(left > 0, score[request], -np.inf).argmax())
        labels[request] = rank
        left[rank] -= 1
    return labels


def _local(inputs: Inputs, experts: IntArray) -> FloatArray:
    """[r, R] number of each request's choices that experts of each rank serve, over all layers."""
    held = np.eye(inputs.ranks, dtype=np.float32)[experts].reshape(-1, inputs.ranks)
    return (_flat(inputs) @ held).astype(np.float64)


# ---- experts


def place_experts(
    inputs: Inputs, layer: int, requests: IntArray, rng: np.random.Generator, weights: Weights
) -> IntArray:
    """Ranks [E] of a layer's experts, given the ranks of the requests [r] (lines 3 to 26)."""
    affinity = _affinity(inputs, layer, requests, weights)
    left = inputs.room.copy()
    carried = np.zeros(inputs.ranks)
    held = np.zeros((len(affinity.loads), inputs.ranks))
    for expert in np.argsort(-affinity.loads, kind="stable").tolist():
        load = affinity.loads[expert]
        score = affinity.pairs[expert] @ held + affinity.ranks[expert] - load * (2 * carried + load)
        rank = int(np.where(left > 0, score, -np.inf).argmax())
        held[expert, rank] = 1.0
        carried[rank] += load
        left[rank] -= 1
    return swap_experts(affinity, held.argmax(axis=1), rng, weights.swaps)


def _affinity(inputs: Inputs, layer: int, requests: IntArray, weights: Weights) -> Affinity:
    """The value of a layer's placement: both affinities, minus gamma times R times the squares of the
    ranks' loads.

    With squares, greedy steps and exchanges raise the same value. One more expert adds to R * load ** 2
    its load times twice the load of the rank in fair shares.
    """
    choices = inputs.rows[:, layer].T @ np.eye(inputs.ranks)[requests]
    share = choices / max(1.0, float(choices.sum()))
    loads = inputs.loads[layer] * np.sqrt(weights.load * inputs.ranks)
    return Affinity(2 * weights.experts * inputs.pairs[layer], weights.requests * share, loads)


def cost(inputs: Inputs, experts: IntArray, requests: IntArray) -> float:
    """Cost of a round: the fullest rank's load in fair shares, averaged over layers, plus the share of
    remote choices."""
    layers = np.arange(len(experts))[:, None]
    carried = np.zeros((len(experts), inputs.ranks))
    np.add.at(carried, (layers, experts), inputs.loads)
    local = _local(inputs, experts)
    mine = local[np.arange(len(requests)), requests].sum() / max(1.0, local.sum())
    return float(carried.max(axis=1).mean() * inputs.ranks + 1 - mine)
