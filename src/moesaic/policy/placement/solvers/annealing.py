"""Co-clustering by annealing: exact exchanges of experts, annealed and recombined, with a cap on a rank's
load.

The objective of a layer is what a user measures. Every token id goes to the rank with most of its choices,
and the sum of these choices over all token ids is to be as large as possible. Other solvers maximise a
substitute (pairs of experts that are chosen together, distances to a centre), or alternate between tokens
and experts, which ends where neither side alone gains. Here two experts of two ranks are exchanged, and the
gain is that of the objective itself, with tokens choosing their ranks again:

 1. *Frequent token ids count individually.* A sample stands for the rarer ones, each weighted by its weight
    over its probability of being drawn, so that no assignment is favoured.
 2. *Annealing* (Kirkpatrick et al. 1983) from random assignments. An expert, another rank and a few of its
    experts are drawn; the heat bath takes one of these exchanges, or none. Runs end up to 2 % apart.
 3. *Offspring*: the best run and mixtures of two runs are annealed again, shortly and at a low temperature.
    The placement of speculative.py is one of the runs that are mixed.
 4. *Polishing* of the best assignment on more token ids: one expert after another takes its best exchange
    that gains, until there is none.

*Balance* is a cap, not a weight. A rank's load above its fair share plus `spare` of the layer's choices
costs `price` choices for each choice. A cap means the same in every model; a weight (theta in Speculative
MoE, whose value is not given) does not. How much balance the best placements cost differs between models.
So the cap is also kept below the result of cross-entropy (`evener`), the most local of the other solvers.
To compare with a solver of imbalance m (max over mean) on R ranks, give spare (m - 1) / R and no `evener`.

*Tried and dropped*, since held-out tokens were no more local with it: counting a token id that was seen n
times n / (n + prior) of its choices; and the posterior mean of a token id's choices in place of its counts,
in the objective or as labels (linear empirical Bayes over the experts of the layer, or of all layers).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Counts, Profile
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers import speculative
from moesaic.policy.placement.solvers.layers import each_alone
from moesaic.policy.placement.solvers.solver import Progress, rooms

FloatArray = npt.NDArray[np.float64]
RowArray = npt.NDArray[np.float32]

EXACT = 1e-6
"""A smaller gain, relative to all choices, is rounding."""


@dataclass(frozen=True)
class AnnealingSearch:
    """The settings of the search."""

    spare: float = 0.025
    """Share of a layer's choices that a rank may carry beyond its fair share, in the profile: 0.025 is 1.05
    times the mean on 2 ranks and 1.2 times on 8. A larger share gives more local placements."""
    evener: float | None = 0.9
    """The cap is also at most this multiple of the busiest rank's load in cross-entropy's placement; None:
    only `spare` counts."""
    price: float = 2.0
    """Choices that each choice above the cap costs."""
    heads: int = 2048
    """Number of the most frequent token ids, which count individually during annealing."""
    sample: int = 1024
    """Number of rarer token ids that stand for the rest."""
    runs: int = 4
    steps: int = 24_000
    """Steps of one run."""
    offspring: int = 8
    """Number of short runs that start from earlier results."""
    brief: int = 10_000
    """Steps of such a run."""
    warm: float = 1e-3
    """First temperature of a short run."""
    width: int = 4
    """Number of exchanges that a step compares."""
    hot: float = 3e-3
    cold: float = 1e-4
    """First and last temperature, as shares of all choices."""
    polish: int = 8192
    """Number of token ids, frequent ones and sample together, by which the last exchanges are judged."""


def solve(
    profile: Profile,
    ranks: int,
    seed: int = 0,
    progress: Progress | None = None,
    search: AnnealingSearch | None = None,
) -> Coclusters:
    """Cluster each layer, then number the clusters of all layers alike. Raises ConfigError: bad `ranks`."""
    chosen_search, size = search or AnnealingSearch(), profile.num_experts
    return each_alone(
        profile, ranks, seed, progress, lambda counts, rng: place(counts, size, ranks, rng, chosen_search)
    )


def place(
    counts: Counts, num_experts: int, ranks: int, rng: np.random.Generator, search: AnnealingSearch
) -> IntArray:
    """Ranks [E] of one layer's experts.

    Example: token ids that choose experts 0 and 2, and as many that choose 1 and 3: 0 and 2 share a rank.
    """
    labels = np.repeat(np.arange(ranks), rooms(num_experts, ranks))
    if ranks in (1, num_experts) or not len(counts.experts):
        return labels
    rows = dense(counts, num_experts)
    loads = rows.sum(axis=0, dtype=np.float64)
    rival = speculative.searched(rows, ranks, rng, speculative.CrossEntropySearch())
    if search.evener is not None:
        search = replace(search, spare=min(search.spare, search.evener * overload(rival, loads, ranks)))
    small = _Layer.of(chosen(rows, search.heads, search.sample, rng), loads, ranks, search)
    large = _Layer.of(chosen(rows, search.polish // 2, search.polish // 2, rng), loads, ranks, search)
    runs = [anneal(small, rng.permutation(labels), rng, search) for _ in range(search.runs)]
    return polish(large, crossed(small, [*runs, polish(small, rival)], rng, search))


def overload(labels: IntArray, loads: FloatArray, ranks: int) -> float:
    """Share of the load that the busiest rank carries beyond its fair share. Example: 5 and 3 -> 0.125."""
    return float(np.bincount(labels, loads, ranks).max() / loads.sum() - 1 / ranks)


def crossed(
    layer: _Layer, runs: list[IntArray], rng: np.random.Generator, search: AnnealingSearch
) -> IntArray:
    """The best assignment [E] of `runs` and their offspring: short runs, each of which replaces the worst.

    They start alternately from the best run and from a mixture of two. Worse results are dropped.
    """
    brief = replace(search, hot=search.warm, steps=search.brief)
    values = [layer.value(run) for run in runs]
    for turn in range(search.offspring):
        best, worst = int(np.argmax(values)), int(np.argmin(values))
        one, other = rng.choice(len(runs), 2, replace=False) if len(runs) > 1 else (best, best)
        start = mixed(layer, runs[one], runs[other], rng) if turn % 2 else runs[best]
        found = anneal(layer, start, rng, brief)
        if (value := layer.value(found)) > values[worst]:
            runs[worst], values[worst] = found, value
    return runs[int(np.argmax(values))]


def mixed(layer: _Layer, one: IntArray, other: IntArray, rng: np.random.Generator) -> IntArray:
    """[E] `one`, with a random part of the experts that `other` has on other ranks exchanged.

    Ranks of different runs are matched first: those of `other` are numbered so that most load agrees with
    `one`. Example: 0 0 0 1 1 1 and 1 1 0 0 0 1, which agree except for experts 2 and 5: these are
    exchanged, or not.
    """
    shared = np.zeros((layer.ranks, layer.ranks))
    np.add.at(shared, (other, one), layer.loads)
    numbers = linear_sum_assignment(shared, maximize=True)[1]
    free = (numbers[other] != one).nonzero()[0]
    found = one.copy()
    found[free] = rng.permutation(one[free])
    return found


# ---- which tokens count


def dense(counts: Counts, num_experts: int) -> RowArray:
    """[t, E] choices of each token id that was seen, in ascending order of ids."""
    found = np.zeros((len(counts.known), num_experts), dtype=np.float32)
    found[np.searchsorted(counts.known, counts.tokens), counts.experts] = counts.counts
    return found


def chosen(rows: RowArray, heads: int, sample: int, rng: np.random.Generator) -> RowArray:
    """[E, m] the heaviest `heads` rows and a sample of the others, each as heavy as all that it stands for.

    The sample is systematic: a row of weight w is drawn w / step times on average, and then weighs `step`.
    """
    size = rows.sum(axis=1, dtype=np.float64)
    order = np.argsort(-size, kind="stable")
    first, rest = order[:heads], order[heads:]
    if len(rest) <= sample:
        return np.ascontiguousarray(rows[order].T)
    step = size[rest].sum() / sample
    marks = (np.arange(sample) + rng.random()) * step
    drawn = rest[np.searchsorted(size[rest].cumsum(), marks).clip(max=len(rest) - 1)]
    scaled = rows[drawn] * (step / size[drawn])[:, None].astype(np.float32)
    return np.ascontiguousarray(np.concatenate([rows[first], scaled]).T)


# ---- exchanges


@dataclass(frozen=True)
class _Layer:
    rows: RowArray
    """[E, m] choices of each token."""
    loads: FloatArray
    """[E] all choices of the layer, scaled to the sum of `rows`."""
    cap: float
    """Load of a rank above which it has to pay."""
    ranks: int
    price: float

    @classmethod
    def of(cls, rows: RowArray, loads: FloatArray, ranks: int, search: AnnealingSearch) -> _Layer:
        total = float(rows.sum(dtype=np.float64))
        cap = (1 / ranks + search.spare) * total
        return cls(rows, loads * (total / loads.sum()), cap, ranks, search.price)

    def value(self, labels: IntArray) -> float:
        """Choices on the tokens' best ranks, minus the price of overloaded ranks."""
        state = _State(self, labels)
        return state.local - self.price * float(np.maximum(state.carried - self.cap, 0.0).sum())


class _State:
    """An assignment that is changed by exchanges."""

    def __init__(self, layer: _Layer, labels: IntArray) -> None:
        self.layer = layer
        self.labels = labels.copy()
        """[E] the rank of each expert."""
        self.choices = np.stack([layer.rows[labels == rank].sum(axis=0) for rank in range(layer.ranks)])
        """[R, m] choices of each token on each rank."""
        self.carried = np.bincount(labels, weights=layer.loads, minlength=layer.ranks)
        """[R] loads."""
        self.members = [np.flatnonzero(labels == rank) for rank in range(layer.ranks)]
        self.local = self._local()
        every = range(layer.ranks)
        self._rest = [[[r for r in every if r not in (here, there)] for there in every] for here in every]
        """The ranks other than two given ones."""

    def _local(self) -> float:
        return float(self.choices.max(axis=0).sum(dtype=np.float64))

    def gains(self, expert: int, others: IntArray) -> FloatArray:
        """[n] what exchanging `expert` with each of `others`, all on one other rank, adds to the value."""
        layer, here, there = self.layer, self.labels.item(expert), self.labels.item(others[0])
        own, given = layer.rows[expert], layer.rows.take(others, axis=0)
        best = np.subtract(self.choices[there] + own, given)
        given += self.choices[here] - own
        np.maximum(best, given, out=best)
        if layer.ranks > 2:
            np.maximum(best, self.choices.take(self._rest[here][there], axis=0).max(axis=0), out=best)
        more = layer.loads.take(others) - layer.loads.item(expert)
        gains: FloatArray = best.sum(axis=1, dtype=np.float64) - self.local
        return gains - layer.price * (self._over(here, more) + self._over(there, -more))

    def _over(self, rank: int, more: FloatArray) -> FloatArray:
        """[n] how much further above the cap `more` load takes a rank."""
        excess = self.carried.item(rank) - self.layer.cap
        change: FloatArray = np.maximum(excess + more, 0.0) - max(excess, 0.0)
        return change

    def exchange(self, one: int, other: int) -> None:
        rows, loads = self.layer.rows, self.layer.loads
        here, there = self.labels[one], self.labels[other]
        moved = rows[one] - rows[other]
        self.choices[here] -= moved
        self.choices[there] += moved
        self.carried[here] -= loads[one] - loads[other]
        self.carried[there] += loads[one] - loads[other]
        self.labels[one], self.labels[other] = there, here
        self.members[here], self.members[there] = (np.flatnonzero(self.labels == r) for r in (here, there))
        self.local = self._local()


def anneal(layer: _Layer, labels: IntArray, rng: np.random.Generator, search: AnnealingSearch) -> IntArray:
    """The best assignment [E] on the path of a run from `labels`."""
    state, value = _State(layer, labels), layer.value(labels)
    best, best_value = state.labels.copy(), value
    total, last = float(layer.loads.sum()), max(1, search.steps - 1)
    experts = rng.integers(len(labels), size=search.steps).tolist()
    heights = rng.random(search.steps).tolist()
    for step, expert in enumerate(experts):
        heat = total * search.hot * (search.cold / search.hot) ** (step / last)
        there = (state.labels.item(expert) + int(rng.integers(1, layer.ranks))) % layer.ranks
        others = rng.permutation(state.members[there])[: search.width]
        gains = [*state.gains(expert, others).tolist(), 0.0]
        likely = list(accumulate(np.exp([(gain - max(gains)) / heat for gain in gains]).tolist()))
        if (taken := bisect_right(likely, heights[step] * likely[-1])) < len(others):
            state.exchange(expert, int(others[taken]))
            value += gains[taken]
            if value > best_value:
                best, best_value = state.labels.copy(), value
    return best


def polish(layer: _Layer, labels: IntArray) -> IntArray:
    """`labels` [E] after exchanges that each gain, until none gains."""
    state = _State(layer, labels)
    least = EXACT * float(layer.loads.sum())
    idle, expert = 0, 0
    while idle < len(labels):
        best, other = least, -1
        for rank, others in enumerate(state.members):
            if rank != state.labels[expert]:
                gains = state.gains(expert, others)
                if gains.max() > best:
                    best, other = float(gains.max()), int(others[gains.argmax()])
        idle += 1
        if other >= 0:
            state.exchange(expert, other)
            idle = 0
        expert = (expert + 1) % len(labels)
    return state.labels
