"""Co-clusters by simulated annealing: exact exchanges of experts, recombined results, and a cap on a rank's
load.

The objective of a layer is the measure that users see. Every token id goes to the rank with most of its
choices. The sum of these choices over all token ids should be as large as possible. Other solvers maximise
a substitute, such as pairs of experts that are chosen together, or distances to a centre. Or they alternate
between tokens and experts, and stop where neither side alone gains. Here a step exchanges two experts of
two ranks. Its gain is that of the objective itself, with tokens choosing their ranks again:

 1. *Token ids.* Frequent token ids count individually. A sample represents the rarer ones. Each sampled id
    is weighted by its weight over its probability of being drawn, so that no assignment is favoured.
 2. *Annealing* (Kirkpatrick et al. 1983) from random assignments. A step draws an expert, another rank and
    a few experts of that rank. The heat bath takes one of these exchanges, or none. Runs end up to 2 %
    apart.
 3. *Offspring.* The best run and mixtures of two runs are annealed again, for fewer steps and at a low
    temperature. The placement of speculative.py is one of the runs that are mixed.
 4. *Polishing* of the best assignment on more token ids. Each expert in turn makes the exchange that gains
    most, until no exchange gains.

*Balance* is a cap, not a weight. A rank's load above its fair share plus `spare` of the layer's choices
costs `price` choices for each choice. A cap means the same in every model. A weight does not (theta in
Speculative MoE, which gives no value for it). The best placements of different models cost different
amounts of balance. So the cap also stays below the result of cross-entropy (`evener`), the most local of
the other solvers. To compare with a solver of imbalance m (max over mean) on R ranks, give spare (m - 1) /
R and no `evener`.

*Tried and dropped*, since held-out tokens were no more local with it:

 - Counting only n / (n + prior) of the choices of a token id that was seen n times.
 - Replacing a token id's counts by the posterior mean of its choices, in the objective or as labels. The
   estimate was linear empirical Bayes over the experts of the layer, or of all layers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Counts, Profile
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers import speculative
from moesaic.policy.placement.solvers.assignment import assign
from moesaic.policy.placement.solvers.layers import Report, no_report, solve_layers
from moesaic.policy.placement.solvers.solver import Progress, experts_per_rank

FloatArray = npt.NDArray[np.float64]
RowArray = npt.NDArray[np.float32]

EXACT = 1e-6
"""Smaller gains, relative to all choices, count as rounding errors."""


@dataclass(frozen=True)
class AnnealingSearch:
    """The settings of the annealing search."""

    spare: float = 0.025
    """Share of a layer's choices that a rank may carry beyond its fair share, in the profile.

    0.025 is 1.05 times the mean on 2 ranks and 1.2 times on 8. A larger share gives more local placements.
    """
    evener: float | None = 0.9
    """`spare` is at most this multiple of what the busiest rank of cross-entropy's placement has beyond its
    fair share. None: no such limit."""
    price: float = 2.0
    """Price of each choice above the cap, in choices."""
    heads: int = 2048
    """Number of the most frequent token ids, which count individually during annealing."""
    sample: int = 1024
    """Number of sampled token ids that represent the rarer ones."""
    runs: int = 4
    steps: int = 24_000
    """Number of steps of one run."""
    offspring: int = 8
    """Number of short runs, which start from earlier results."""
    brief: int = 10_000
    """Number of steps of a short run."""
    warm: float = 1e-3
    """First temperature of a short run, as a share of all choices."""
    width: int = 4
    """Number of exchanges among which a step chooses."""
    hot: float = 3e-3
    cold: float = 1e-4
    """First (`hot`) and last (`cold`) temperature of a run, as shares of all choices."""
    polish: int = 8192
    """Number of token ids, half of them frequent and half sampled, for the polishing."""


def solve(
    profile: Profile,
    ranks: int,
    seed: int = 0,
    progress: Progress | None = None,
    search: AnnealingSearch | None = None,
) -> Coclusters:
    """Cluster each layer, then number the clusters of all layers alike.

    Raises ConfigError unless `ranks` is 1 to the number of experts.
    """
    chosen_search, size = search or AnnealingSearch(), profile.num_experts
    return solve_layers(
        profile,
        ranks,
        seed,
        progress,
        lambda counts, rng, report: place(counts, size, ranks, rng, chosen_search, report),
        parts=chosen_search.runs + chosen_search.offspring + 1,
    )


def place(
    counts: Counts,
    num_experts: int,
    ranks: int,
    rng: np.random.Generator,
    search: AnnealingSearch,
    report: Report = no_report,
) -> IntArray:
    """Find the ranks [E] of one layer's experts. report: is called after each run.

    Example: some token ids choose experts 0 and 2, and as many choose 1 and 3. Then 0 and 2 share a rank.
    """
    labels = np.repeat(np.arange(ranks), experts_per_rank(num_experts, ranks))
    if ranks in (1, num_experts) or not len(counts.experts):
        return labels
    rows = dense(counts, num_experts)
    loads = rows.sum(axis=0, dtype=np.float64)
    rival = speculative.search_layer(rows, ranks, rng, speculative.CrossEntropySearch())
    if search.evener is not None:
        search = replace(search, spare=min(search.spare, search.evener * overload(rival, loads, ranks)))
    small = Layer.from_rows(sample_rows(rows, search.heads, search.sample, rng), loads, ranks, search)
    large = Layer.from_rows(
        sample_rows(rows, search.polish // 2, search.polish // 2, rng), loads, ranks, search
    )
    runs = []
    for number in range(search.runs):
        runs.append(anneal(small, rng.permutation(labels), rng, search))
        report(number + 1)
    runs.append(polish(small, rival))
    return polish(large, recombine(small, runs, rng, search, lambda turn: report(search.runs + turn)))


def overload(labels: IntArray, loads: FloatArray, ranks: int) -> float:
    """Share of the load that the busiest rank carries beyond its fair share. Example: 5 and 3 -> 0.125."""
    return float(np.bincount(labels, loads, ranks).max() / loads.sum() - 1 / ranks)


def recombine(
    layer: Layer,
    runs: list[IntArray],
    rng: np.random.Generator,
    search: AnnealingSearch,
    report: Report = no_report,
) -> IntArray:
    """The best assignment [E] among `runs` and their offspring. report: is called after each offspring.

    Offspring are short runs. They start alternately from the best run and from a mixture of two. Each
    replaces the worst run if it is better, and is dropped otherwise.
    """
    brief = replace(search, hot=search.warm, steps=search.brief)
    values = [layer.value(run) for run in runs]
    for turn in range(search.offspring):
        best, worst = int(np.argmax(values)), int(np.argmin(values))
        first, second = rng.choice(len(runs), 2, replace=False) if len(runs) > 1 else (best, best)
        start = mix(layer, runs[first], runs[second], rng) if turn % 2 else runs[best]
        labels = anneal(layer, start, rng, brief)
        if (value := layer.value(labels)) > values[worst]:
            runs[worst], values[worst] = labels, value
        report(turn + 1)
    return runs[int(np.argmax(values))]


def mix(layer: Layer, labels: IntArray, other_labels: IntArray, rng: np.random.Generator) -> IntArray:
    """[E] the assignment `labels`, in which some experts that `other_labels` has on another rank are
    exchanged at random.

    First the ranks of `other_labels` are renumbered so that most load agrees with `labels`. Example: 0 0 0
    1 1 1 and 1 1 0 0 0 1 then agree except for experts 2 and 5. These two are exchanged, or not.
    """
    shared_load = np.zeros((layer.ranks, layer.ranks))
    np.add.at(shared_load, (other_labels, labels), layer.loads)
    numbers = assign(shared_load)[1]
    free = (numbers[other_labels] != labels).nonzero()[0]
    mixed_labels = labels.copy()
    mixed_labels[free] = rng.permutation(labels[free])
    return mixed_labels


# ---- which tokens count


def dense(counts: Counts, num_experts: int) -> RowArray:
    """[t, E] how often each token id that was seen chose each expert, in ascending order of ids."""
    rows = np.zeros((len(counts.known_tokens), num_experts), dtype=np.float32)
    rows[np.searchsorted(counts.known_tokens, counts.tokens), counts.experts] = counts.counts
    return rows


def sample_rows(rows: RowArray, heads: int, sample: int, rng: np.random.Generator) -> RowArray:
    """[E, m] the heaviest `heads` rows and a sample of the others.

    Sampled rows are scaled to the weight that they represent. The sample is systematic. A row of weight w
    is drawn w / step times on average, and then weighs `step`.
    """
    size = rows.sum(axis=1, dtype=np.float64)
    order = np.argsort(-size, kind="stable")
    first, rare_rows = order[:heads], order[heads:]
    if len(rare_rows) <= sample:
        return np.ascontiguousarray(rows[order].T)
    step = size[rare_rows].sum() / sample
    marks = (np.arange(sample) + rng.random()) * step
    sampled_rows = rare_rows[np.searchsorted(size[rare_rows].cumsum(), marks).clip(max=len(rare_rows) - 1)]
    scaled = rows[sampled_rows] * (step / size[sampled_rows])[:, None].astype(np.float32)
    return np.ascontiguousarray(np.concatenate([rows[first], scaled]).T)


# ---- exchanges


@dataclass(frozen=True)
class Layer:
    """A layer's token ids, as exchanges see them."""

    rows: RowArray
    """[E, m] how often each token chose each expert."""
    loads: FloatArray
    """[E] load of each expert over all choices of the layer, scaled to the sum of `rows`."""
    cap: float
    """Load of a rank above which it pays the price."""
    ranks: int
    price: float
    worth: RowArray | None = None
    """[R, R] what a choice on each rank counts for a token on each rank. None: 1 on its own rank, else 0."""

    @classmethod
    def from_rows(
        cls,
        rows: RowArray,
        loads: FloatArray,
        ranks: int,
        search: AnnealingSearch,
        worth: FloatArray | None = None,
    ) -> Layer:
        """The layer of token ids that `chosen` took. loads: [E], in any unit. worth: see `link_prices`."""
        total = float(rows.sum(dtype=np.float64))
        cap = (1 / ranks + search.spare) * total
        rank_worth = None if worth is None else worth.astype(np.float32)
        return cls(rows, loads * (total / loads.sum()), cap, ranks, search.price, rank_worth)

    def value(self, labels: IntArray) -> float:
        """Worth of the choices on the tokens' best ranks, minus the price of overloaded ranks."""
        state = _State(self, labels)
        return state.local - self.price * float(np.maximum(state.rank_loads - self.cap, 0.0).sum())


class _State:
    """An assignment of experts to ranks, with what exchanges need to know."""

    def __init__(self, layer: Layer, labels: IntArray) -> None:
        self.layer = layer
        self.labels = labels.copy()
        """[E] the rank of each expert."""
        self.choices = np.stack([layer.rows[labels == rank].sum(axis=0) for rank in range(layer.ranks)])
        """[R, m] how often each token chose experts of each rank."""
        self.rank_loads = np.bincount(labels, weights=layer.loads, minlength=layer.ranks)
        """[R] load of each rank."""
        self.members = [np.flatnonzero(labels == rank) for rank in range(layer.ranks)]
        self.values = self.choices if layer.worth is None else layer.worth.T @ self.choices
        """[R, m] worth of each token's choices, if the token is on each rank."""
        self.local = self._local()
        every = range(layer.ranks)
        self._other_ranks = [
            [[r for r in every if r not in (here, there)] for there in every] for here in every
        ]
        """The list of all other ranks, for each two ranks."""

    def _local(self) -> float:
        return float(self.values.max(axis=0).sum(dtype=np.float64))

    def gains(self, expert: int, partners: IntArray) -> FloatArray:
        """[n] gain in value from exchanging `expert` with each of `partners`, which are all on one other
        rank."""
        layer, expert_rank, partner_rank = self.layer, self.labels.item(expert), self.labels.item(partners[0])
        expert_rows, partner_rows = layer.rows[expert], layer.rows.take(partners, axis=0)
        if layer.worth is not None:
            best = self._best(
                expert_rows - partner_rows, layer.worth[partner_rank] - layer.worth[expert_rank]
            )
        else:
            best = np.subtract(self.choices[partner_rank] + expert_rows, partner_rows)
            partner_rows += self.choices[expert_rank] - expert_rows
            np.maximum(best, partner_rows, out=best)
            if layer.ranks > 2:
                np.maximum(
                    best,
                    self.choices.take(self._other_ranks[expert_rank][partner_rank], axis=0).max(axis=0),
                    out=best,
                )
        added_load = layer.loads.take(partners) - layer.loads.item(expert)
        gains: FloatArray = best.sum(axis=1, dtype=np.float64) - self.local
        return gains - layer.price * (
            self._excess_change(expert_rank, added_load) + self._excess_change(partner_rank, -added_load)
        )

    def _best(self, moved_choices: RowArray, change: RowArray) -> RowArray:
        """[n, m] worth of each token's best rank, if the choices `moved_choices` [n, m] change ranks.

        change: [R] how much more such a choice counts then, for a token on each rank.
        """
        is_unchanged = change == 0
        start = self.values[is_unchanged].max(axis=0) if is_unchanged.any() else np.float32(-np.inf)
        best: RowArray = np.broadcast_to(start, moved_choices.shape).astype(np.float32)
        for rank in np.flatnonzero(~is_unchanged).tolist():
            np.maximum(best, self.values[rank] + change[rank] * moved_choices, out=best)
        return best

    def _excess_change(self, rank: int, added_load: FloatArray) -> FloatArray:
        """[n] how much further above the cap a rank gets by `added_load` load."""
        excess = self.rank_loads.item(rank) - self.layer.cap
        change: FloatArray = np.maximum(excess + added_load, 0.0) - max(excess, 0.0)
        return change

    def exchange(self, expert: int, partner: int) -> None:
        rows, loads = self.layer.rows, self.layer.loads
        expert_rank, partner_rank = self.labels[expert], self.labels[partner]
        moved_choices = rows[expert] - rows[partner]
        self.choices[expert_rank] -= moved_choices
        self.choices[partner_rank] += moved_choices
        if self.layer.worth is not None:
            self.values += np.outer(
                self.layer.worth[partner_rank] - self.layer.worth[expert_rank], moved_choices
            )
        self.rank_loads[expert_rank] -= loads[expert] - loads[partner]
        self.rank_loads[partner_rank] += loads[expert] - loads[partner]
        self.labels[expert], self.labels[partner] = partner_rank, expert_rank
        self.members[expert_rank], self.members[partner_rank] = (
            np.flatnonzero(self.labels == r) for r in (expert_rank, partner_rank)
        )
        self.local = self._local()


def anneal(layer: Layer, labels: IntArray, rng: np.random.Generator, search: AnnealingSearch) -> IntArray:
    """The best assignment [E] on the path of an annealing run that starts from `labels`."""
    state, value = _State(layer, labels), layer.value(labels)
    best, best_value = state.labels.copy(), value
    total, last = float(layer.loads.sum()), max(1, search.steps - 1)
    experts = rng.integers(len(labels), size=search.steps).tolist()
    heights = rng.random(search.steps).tolist()
    for step, expert in enumerate(experts):
        heat = total * search.hot * (search.cold / search.hot) ** (step / last)
        partner_rank = (state.labels.item(expert) + int(rng.integers(1, layer.ranks))) % layer.ranks
        partners = rng.permutation(state.members[partner_rank])[: search.width]
        gains = [*state.gains(expert, partners).tolist(), 0.0]
        likely = list(accumulate(np.exp([(gain - max(gains)) / heat for gain in gains]).tolist()))
        if (choice := bisect_right(likely, heights[step] * likely[-1])) < len(partners):
            state.exchange(expert, int(partners[choice]))
            value += gains[choice]
            if value > best_value:
                best, best_value = state.labels.copy(), value
    return best


def polish(layer: Layer, labels: IntArray) -> IntArray:
    """Exchange experts as long as an exchange gains. Returns the changed `labels` [E]."""
    state = _State(layer, labels)
    min_gain = EXACT * float(layer.loads.sum())
    idle, expert = 0, 0
    while idle < len(labels):
        best, best_partner = min_gain, -1
        for rank, others in enumerate(state.members):
            if rank != state.labels[expert]:
                gains = state.gains(expert, others)
                if gains.max() > best:
                    best, best_partner = float(gains.max()), int(others[gains.argmax()])
        idle += 1
        if best_partner >= 0:
            state.exchange(expert, best_partner)
            idle = 0
        expert = (expert + 1) % len(labels)
    return state.labels
