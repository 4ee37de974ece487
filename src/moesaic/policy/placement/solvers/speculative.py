"""Speculative MoE's co-clustering (Algorithm 1): the cross-entropy method over labels of experts and
tokens.

A matrix p [E, R] has the probability of each expert on each rank. Every step draws K assignments and scores
each by the choices that stay on their token's rank. Then it moves p towards the best 20 %. A draw has two
parts:

 1. Experts are placed one after another, in random order. Each is drawn by its p over the ranks with a free
    slot.
 2. Tokens are placed by frequency, heaviest first. A rank is full once it carries 1.1 times the mean load.

This version differs where the paper gives no detail or does not work as printed:

 - *Tokens follow the experts of their draw.* As printed, each token has a p of its own and is drawn
   independently of the experts. With 100,000 independent labels, the effect of moving one expert disappears
   in noise. The elite are then the luckiest draws, and the tokens' p drifts. Here a token's p is the share
   of its choices on each rank, which sums up p of the experts it chooses. In a draw it goes to the rank
   that is not full and has most of its choices. Its label is the rank with the largest share, and its
   confidence is that share.
 - *The search starts from a good placement.* A uniform p, as printed, is the same under any renumbering of
   the ranks. Draws first have to agree on numbers, and p settles too early. Here the start places experts
   together that the same tokens choose, and exchanges pairs until none gains. p may stray from there.
 - *The best draw so far is always among the elite*, so the answer is the best one that was drawn.
 - *Settings.* The paper does not give K, the number of steps and the smoothing of p. `CrossEntropySearch`
   has the values used here. The search ends early once p is settled.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Counts, Profile
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers.layers import solve_layers
from moesaic.policy.placement.solvers.solver import Progress, experts_per_rank
from moesaic.policy.placement.solvers.swaps import Affinity, swap_experts

FloatArray = npt.NDArray[np.float64]
RowArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class CrossEntropySearch:
    """The settings of the cross-entropy method."""

    samples: int = 64
    """K: number of assignments drawn in each step."""
    steps: int = 40
    elite: float = 0.2
    """rho: share of the draws that p moves towards. The default is the paper's."""
    slack: float = 1.1
    """f: load over the mean load at which a rank is full and gets no more tokens. The default is the
    paper's."""
    smoothing: float = 0.5
    """How far p moves in a step. With 1 it forgets its old value."""
    stray: float = 0.1
    """Probability mass that the start spreads evenly over all ranks."""
    restarts: int = 16
    """Number of random starts of the exchanges. The best result starts the search."""
    balance: float = 0.5
    """Price of the mean square of the ranks' loads in the start. All pairs on one rank together count 0 to
    1."""
    settled_probability: float = 0.95
    """The search ends when the most likely rank of every expert has more than this probability."""
    heads: int = 2048
    """Number of token ids that count individually. Rarer ones with the same favourite expert are counted as
    one."""
    blocks: int = 20
    """How often a rank's load is checked while it fills."""


def solve(
    profile: Profile,
    ranks: int,
    seed: int = 0,
    progress: Progress | None = None,
    search: CrossEntropySearch | None = None,
) -> Coclusters:
    """Solve each layer alone, then number the clusters of all layers alike.

    Raises ConfigError unless `ranks` is 1 to the number of experts.
    """
    chosen, size = search or CrossEntropySearch(), profile.num_experts
    return solve_layers(
        profile,
        ranks,
        seed,
        progress,
        lambda counts, rng, _: search_layer(dense(counts, size), ranks, rng, chosen),
    )


def search_layer(
    rows: RowArray, ranks: int, rng: np.random.Generator, settings: CrossEntropySearch
) -> IntArray:
    """Search the ranks [E] of a layer's experts. rows: [tokens, E] how often each token chose each expert.

    Example: some tokens choose experts 0 and 2, others choose 1 and 3. Then 0 and 2 share a rank.
    """
    room = experts_per_rank(rows.shape[1], ranks)
    tokens = _heads(rows, settings.heads)
    best = _start(tokens, room, rng, settings)
    best_score = float(scores(tokens, best[None], ranks, settings)[0])
    p = (1 - settings.stray) * np.eye(ranks)[best] + settings.stray / ranks
    elite = max(1, round(settings.elite * settings.samples))
    for _ in range(settings.steps):
        drawn = draw(p, room, settings.samples, rng)
        score = scores(tokens, drawn, ranks, settings)
        order = np.argsort(-score, kind="stable")[:elite]
        if score[order[0]] > best_score:
            best, best_score = drawn[order[0]], float(score[order[0]])
        chosen = np.concatenate([drawn[order], best[None]])
        p += settings.smoothing * (np.eye(ranks)[chosen].mean(axis=0) - p)
        if p.max(axis=1).min() > settings.settled_probability:
            break
    return best


def draw(p: FloatArray, room: IntArray, samples: int, rng: np.random.Generator) -> IntArray:
    """Draw assignments: ranks [samples, E]. Each rank gets exactly as many experts as it has slots.

    p: [E, R] likelihoods. room: [R] slots.
    """
    experts = len(p)
    left = np.tile(room, (samples, 1))
    found = np.empty((samples, experts), dtype=np.int64)
    each = np.arange(samples)
    for expert in rng.permutation(experts).tolist():
        weight = np.where(left > 0, p[expert] + 1e-12, 0.0).cumsum(axis=1)
        rank = (weight <= rng.random((samples, 1)) * weight[:, -1:]).sum(axis=1)
        found[:, expert] = rank
        left[each, rank] -= 1
    return found


def scores(tokens: RowArray, experts: IntArray, ranks: int, settings: CrossEntropySearch) -> FloatArray:
    """[K] number of choices that stay on their token's rank, for each assignment.

    tokens: [t, E] choices, heaviest token first. experts: [K, E] ranks.

    Example: tokens [[3, 1], [3, 0]] and experts [[0, 1]]. The mean load is 3.5, so a rank is full at 1.1 *
    3.5. The first token brings 4 to rank 0, which fills it. Only rank 1 is open to the second token. The
    score is 3 + 0.
    """
    samples = len(experts)
    held = np.eye(ranks, dtype=np.float32)[experts].transpose(1, 0, 2).reshape(-1, samples * ranks)
    size = tokens.sum(axis=1, dtype=np.float64)
    most = settings.slack * size.sum() / ranks
    carried, local = np.zeros(samples * ranks), np.zeros(samples)
    first = np.arange(samples) * ranks
    for block in _blocks(size, size.sum() / ranks / settings.blocks):
        there = (tokens[block] @ held).reshape(-1, samples, ranks)
        there[:, carried.reshape(samples, ranks) >= most] = -1.0
        rank = there.argmax(axis=2)
        local += np.take_along_axis(there, rank[:, :, None], axis=2)[:, :, 0].sum(axis=0)
        weights = np.repeat(size[block], samples)
        carried += np.bincount((first + rank).ravel(), weights=weights, minlength=samples * ranks)
    return local


def _blocks(size: FloatArray, load: float) -> list[slice]:
    """Blocks of consecutive items.

    A new block begins where the sum of the sizes before passes a multiple of `load`.

    Example: sizes 5 1 1 1 1, load 2 -> 5 | 1 | 1 1 | 1.
    """
    number = np.floor((size.cumsum() - size) / (load or 1.0))
    ends = [*(np.flatnonzero(np.diff(number)) + 1).tolist(), len(size)]
    return [slice(start, end) for start, end in pairwise([0, *ends])]


def dense(counts: Counts, num_experts: int) -> RowArray:
    """[tokens, E] how often each token id that was seen chose each expert, in ascending order of ids."""
    row = np.cumsum(np.diff(counts.starts) > 0)[counts.tokens] - 1
    found = np.zeros((len(counts.known_tokens), num_experts), dtype=np.float32)
    found[row, counts.experts] = counts.counts
    return found


def _heads(rows: RowArray, count: int) -> RowArray:
    """The heaviest `count` rows, and the sums of the other rows by their favourite expert.

    The heaviest row comes first.
    """
    order = np.argsort(-rows.sum(axis=1), kind="stable")
    heads, tail = rows[order[:count]], rows[order[count:]]
    favourite = np.eye(rows.shape[1], dtype=np.float32)[tail.argmax(axis=1)]
    tail_sums = favourite.T @ tail
    tokens = np.concatenate([heads, tail_sums[tail_sums.any(axis=1)]])
    return tokens[np.argsort(-tokens.sum(axis=1), kind="stable")]


def _start(
    tokens: RowArray, room: IntArray, rng: np.random.Generator, settings: CrossEntropySearch
) -> IntArray:
    """Ranks [E] of the start: experts that the same tokens choose share a rank, unless its load grows too
    large."""
    size = tokens.sum(axis=1, keepdims=True)
    pairs = (tokens / np.maximum(size, 1)).T.astype(np.float64) @ tokens
    loads = tokens.sum(axis=0, dtype=np.float64) / max(1.0, float(size.sum()))
    ranks = len(room)
    affinity = Affinity(
        pairs=2 * pairs / (pairs.sum() or 1.0),
        ranks=np.zeros((len(loads), ranks)),
        loads=loads * np.sqrt(settings.balance * ranks),
    )
    slots = np.repeat(np.arange(ranks), room)
    max_steps = 100 * len(loads)
    options = [
        swap_experts(affinity, rng.permutation(slots), rng, max_steps) for _ in range(settings.restarts)
    ]
    return options[int(scores(tokens, np.array(options), ranks, settings).argmax())]
