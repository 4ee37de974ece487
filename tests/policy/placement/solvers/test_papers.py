"""Speculative MoE, Sem-MoE and MoETuner: their parts against plain versions, and small cases with a known
answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from tests.support.planted_profiles import noise, planted, same_clusters

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Profile
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers import moetuner, sem_moe, speculative
from moesaic.policy.placement.solvers.eplb import pack_by_load
from moesaic.policy.placement.solvers.solver import Solver, experts_per_rank
from moesaic.policy.placement.solvers.swaps import Affinity, FloatArray, swap_experts

PAPERS: dict[str, Solver] = {
    "speculative": speculative.solve,
    "sem-moe": sem_moe.solve,
    "moetuner": moetuner.solve,
}


def partitions(room: IntArray) -> Iterator[IntArray]:
    """Every way to divide the experts over ranks, up to the numbers of the ranks."""
    for labels in product(range(len(room)), repeat=int(room.sum())):
        if (np.bincount(labels, minlength=len(room)) == room).all():
            yield np.array(labels)


# ---- all three


@pytest.mark.slow
@pytest.mark.parametrize("solver", PAPERS)
@pytest.mark.parametrize(("size", "ranks"), [(8, 4), (7, 3), (5, 1), (5, 5)])
def test_rooms_are_exact_and_seeds_decide(solver: str, size: int, ranks: int) -> None:
    profile = noise(1, size, layers=3, k=2)
    said: list[tuple[int, int]] = []
    found = PAPERS[solver](profile, ranks, seed=4, progress=lambda done, total: said.append((done, total)))
    again = PAPERS[solver](profile, ranks, seed=4)
    for row in found.experts:
        assert sorted(np.bincount(row, minlength=ranks)) == sorted(experts_per_rank(size, ranks))
    assert (found.experts == again.experts).all() and (found.tokens == again.tokens).all()
    assert found.ranks == ranks and found.tokens.shape == (3, 20) and found.notes == ()
    assert said == [(i + 1, said[-1][1]) for i in range(len(said))]
    assert said[-1][0] == said[-1][1]


@pytest.mark.parametrize("solver", PAPERS)
@pytest.mark.parametrize("ranks", [0, 9])
def test_ranks_that_cannot_be(solver: str, ranks: int) -> None:
    with pytest.raises(ConfigError, match=r"--ranks: got \d; allowed: 1 to 8"):
        PAPERS[solver](noise(0, 8, layers=1, k=2), ranks)


@pytest.mark.parametrize("solver", ["speculative", "sem-moe"])
@pytest.mark.parametrize("requests", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_topics_are_found(solver: str, requests: bool, seed: int) -> None:
    profile, topics = planted(seed, size=12, ranks=4)
    if not requests:
        profile = replace(profile, routes=profile.routes.select([]))
    found = PAPERS[solver](profile, 4, seed=seed)
    number = found.experts[0][np.argsort(topics[0], kind="stable")[::3]]
    assert (found.experts == number[topics]).all()
    assert (found.tokens == number[np.arange(16) // 4]).all()
    assert (found.confidence == 1).all()


@pytest.mark.parametrize("solver", PAPERS)
def test_a_layer_that_nobody_used(solver: str) -> None:
    profile = noise(0, 6, layers=2, k=2)
    empty = Profile.from_routes("m", 20, 6, (0, 1), profile.routes.select([]))
    assert np.bincount(PAPERS[solver](empty, 3).experts[1]).tolist() == [2, 2, 2]


# ---- exchanges


def affinity_of(seed: int, size: int, ranks: int) -> Affinity:
    rng = np.random.default_rng(seed)
    half = rng.random((size, size))
    return Affinity(half + half.T, rng.random((size, ranks)), rng.random(size))


def test_swapped_worked_example() -> None:
    pairs = np.kron(np.eye(2), np.ones((2, 2))).astype(np.float64)
    affinity = Affinity(pairs, np.zeros((4, 2)), np.zeros(4))
    found = swap_experts(affinity, np.array([0, 1, 0, 1]), np.random.default_rng(0), 1)
    assert same_clusters(found, np.array([0, 0, 1, 1]))


@pytest.mark.parametrize("seed", range(5))
def test_gains_are_differences_of_values(seed: int) -> None:
    affinity, labels = affinity_of(seed, 7, 3), np.array([0, 1, 2, 0, 1, 2, 0])
    gains = affinity.gains(labels)
    for one, other in product(range(7), repeat=2):
        after = labels.copy()
        after[[one, other]] = labels[[other, one]]
        assert gains[one, other] == pytest.approx(affinity.value(after) - affinity.value(labels))


@pytest.mark.parametrize("seed", range(5))
def test_exchanges_end_where_none_gains(seed: int) -> None:
    affinity, labels = affinity_of(seed, 8, 3), np.array([0, 1, 2, 0, 1, 2, 0, 1])
    found = swap_experts(affinity, labels, np.random.default_rng(seed), 1000)
    assert affinity.gains(found).max() < 1e-9
    assert sorted(found) == sorted(labels)
    assert (swap_experts(affinity, labels, np.random.default_rng(seed), 0) == labels).all()


@pytest.mark.parametrize(("size", "ranks"), [(7, 3), (24, 2), (24, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_exchanges_are_those_of_gains_computed_anew(seed: int, size: int, ranks: int) -> None:
    affinity, labels = affinity_of(seed, size, ranks), np.resize(np.arange(ranks), size)
    found = swap_experts(affinity, labels, np.random.default_rng(seed), 1000)
    rng = np.random.default_rng(seed)
    while len(pairs := np.argwhere(np.triu(affinity.gains(labels) > 1e-9))):
        pair = pairs[rng.integers(len(pairs))]
        labels[pair] = labels[pair[::-1]]
    assert (found == labels).all()


# ---- Speculative MoE


def test_scores_worked_example() -> None:
    tokens = np.array([[3, 1], [3, 0]], dtype=np.float32)
    assert speculative.scores(tokens, np.array([[0, 1]]), 2, speculative.CrossEntropySearch()).tolist() == [
        3.0
    ]


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_one_token_after_the_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 5, (40, 6)).astype(np.float32)
    experts = np.stack([rng.permutation(np.arange(6) % 3) for _ in range(4)])
    settings = speculative.CrossEntropySearch(blocks=10**6)
    expected = []
    for labels in experts:
        carried, local = np.zeros(3), 0.0
        for token in tokens:
            there = np.bincount(labels, weights=token, minlength=3)
            rank = int(np.where(carried >= 1.1 * tokens.sum() / 3, -1, there).argmax())
            carried[rank] += token.sum()
            local += there[rank]
        expected.append(local)
    assert speculative.scores(tokens, experts, 3, settings).tolist() == expected


def test_blocks_worked_example() -> None:
    found = speculative._blocks(np.array([5.0, 1, 1, 1, 1]), 2.0)
    assert [(part.start, part.stop) for part in found] == [(0, 1), (1, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize("room", [[3, 3, 2], [1, 1, 6], [8]])
def test_draws_fill_the_rooms(room: list[int]) -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(len(room)), 8)
    drawn = speculative.draw(p, np.array(room), 50, rng)
    assert all(np.bincount(row, minlength=len(room)).tolist() == room for row in drawn)
    sure = np.eye(len(room))[np.repeat(np.arange(len(room)), room)]
    assert (speculative.draw(sure, np.array(room), 50, rng) == sure.argmax(axis=1)).all()


def test_draws_follow_p() -> None:
    """Expert 0 is drawn first half of the time. Then it is on rank 0 with probability 0.8, otherwise wherever
    expert 1 left room."""
    p = np.array([[0.8, 0.2], [0.5, 0.5]])
    drawn = np.concatenate(
        [speculative.draw(p, np.array([1, 1]), 500, np.random.default_rng(seed)) for seed in range(40)]
    )
    assert (drawn[:, 0] == 0).mean() == pytest.approx(0.65, abs=0.03)


def test_rare_tokens_are_summed_by_favourite() -> None:
    rows = np.array([[9, 0, 0], [2, 1, 0], [0, 1, 2], [3, 0, 1], [0, 0, 0]], dtype=np.float32)
    assert speculative._heads(rows, 1).tolist() == [[9, 0, 0], [5, 1, 1], [0, 1, 2]]
    assert speculative._heads(rows, 9)[:4].tolist() == rows[[0, 3, 1, 2]].tolist()


def test_search_worked_example() -> None:
    rows = np.array([[2, 0, 2, 0], [0, 3, 0, 3]], dtype=np.float32)
    found = speculative.search_layer(rows, 2, np.random.default_rng(0), speculative.CrossEntropySearch())
    assert same_clusters(found, np.array([0, 1, 0, 1]))


def token_rows(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.poisson(rng.gamma(0.5, 4.0, (30, 6))).astype(np.float32)


@pytest.mark.parametrize("room", [[3, 3], [2, 2, 2]])
@pytest.mark.parametrize("seed", range(5))
def test_search_comes_near_the_best_partition(seed: int, room: list[int]) -> None:
    rows, ranks, settings = token_rows(seed), len(room), speculative.CrossEntropySearch()
    tokens = speculative._heads(rows, settings.heads)
    every = np.array(list(partitions(np.array(room))))
    best = speculative.scores(tokens, every, ranks, settings).max()
    found = speculative.search_layer(rows, ranks, np.random.default_rng(seed), settings)
    assert speculative.scores(tokens, found[None], ranks, settings)[0] >= 0.99 * best


@pytest.mark.parametrize("seed", range(5))
def test_elites_lead_from_any_start(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchanges before it are left out, so the whole gain is that of the cross-entropy method."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.arange(16) % 4)
    rows = (groups == np.arange(40)[:, None] % 4) * rng.integers(1, 4, (40, 16)).astype(np.float32)
    start = np.sort(np.arange(16) % 4)
    monkeypatch.setattr(speculative, "_start", lambda *args: start)
    settings = speculative.CrossEntropySearch(stray=0.3, smoothing=0.3, samples=400)
    found = speculative.search_layer(rows, 4, np.random.default_rng(seed), settings)
    assert same_clusters(found, groups)
    assert (speculative.search_layer(rows, 4, rng, replace(settings, steps=0)) == start).all()


# ---- Sem-MoE


def test_sem_moe_worked_example() -> None:
    rows = np.array([[[1, 0, 1, 0]], [[0, 1, 0, 1]]], dtype=np.float32)
    inputs = sem_moe.Inputs(rows, np.zeros((1, 4, 4)), np.full((1, 4), 0.25), np.array([2, 2]))
    found = sem_moe.alternate(inputs, np.random.default_rng(0), sem_moe.Weights())
    assert same_clusters(found[0], np.array([0, 1, 0, 1]))


def test_shares_of_a_profile() -> None:
    profile = noise(2, 6, layers=2, k=2)
    inputs = sem_moe.inputs_of(profile, experts_per_rank(6, 3), sem_moe.Weights())
    assert inputs.rows.shape == (12, 2, 6) and (inputs.rows.sum(axis=2) == 16).all()
    assert inputs.loads.sum(axis=1) == pytest.approx([1, 1])
    assert inputs.pairs.sum(axis=(1, 2)) == pytest.approx([1, 1])
    assert np.einsum("lee->l", inputs.pairs).tolist() == [0, 0]
    tokens = sem_moe.inputs_of(
        replace(profile, routes=profile.routes.select([])), experts_per_rank(6, 3), sem_moe.Weights()
    )
    assert (tokens.rows.sum(axis=0) == profile.loads).all()
    assert (np.diff(tokens.rows.sum(axis=(1, 2))) <= 0).all()


@pytest.mark.parametrize("requests", [12, 13, 2])
def test_requests_fill_their_rooms(requests: int) -> None:
    profile = noise(requests, 6, layers=2, k=2, requests=requests)
    inputs = sem_moe.Inputs(
        sem_moe._request_rows(profile, 99), np.zeros((2, 6, 6)), np.zeros((2, 6)), experts_per_rank(6, 3)
    )
    room = [requests // 3 + (rank < requests % 3) for rank in range(3)]
    experts = np.tile(np.arange(6) % 3, (2, 1))
    assert (
        np.bincount(sem_moe.place_requests(inputs, experts, sem_moe.Weights()), minlength=3).tolist() == room
    )
    gathered = sem_moe.cluster_requests(inputs, np.random.default_rng(0))
    assert sorted(np.bincount(gathered, minlength=3)) == sorted(room)


def test_requests_go_where_their_experts_are() -> None:
    rows = np.array(
        [[[5, 0], [5, 0]], [[0, 4], [5, 0]], [[0, 3], [0, 3]], [[0, 2], [0, 2]]], dtype=np.float32
    )
    inputs = sem_moe.Inputs(rows, np.zeros((2, 2, 2)), np.zeros((2, 2)), np.array([1, 1]))
    experts, weights = np.array([[0, 1], [0, 1]]), sem_moe.Weights(alike=0.0)
    assert sem_moe.place_requests(inputs, experts, weights).tolist() == [0, 0, 1, 1]
    assert sem_moe.place_requests(inputs, 1 - experts, weights).tolist() == [1, 1, 0, 0]


def test_cost_worked_example() -> None:
    """Rank 0 carries 0.7, which is 1.4 times its fair share. 3 of 4 choices are local."""
    rows = np.array([[[2, 0]], [[1, 1]]], dtype=np.float32)
    inputs = sem_moe.Inputs(rows, np.zeros((1, 2, 2)), np.array([[0.7, 0.3]]), np.array([1, 1]))
    assert sem_moe.cost(inputs, np.array([[0, 1]]), np.array([0, 1])) == pytest.approx(1.4 + 0.25)


@pytest.mark.parametrize("seed", range(5))
def test_experts_are_placed_near_the_best(seed: int) -> None:
    """The result is compared with every placement of a layer's experts, for given requests."""
    profile, weights = noise(seed, 6, layers=1, k=2), sem_moe.Weights()
    inputs = sem_moe.inputs_of(profile, experts_per_rank(6, 3), weights)
    requests = np.arange(12) % 3
    found = sem_moe.place_experts(inputs, 0, requests, np.random.default_rng(seed), weights)
    affinity = sem_moe._affinity(inputs, 0, requests, weights)
    values = [affinity.value(labels) for labels in partitions(np.array([2, 2, 2]))]
    assert affinity.value(found) >= max(values) - 0.1 * (max(values) - min(values))


@pytest.mark.parametrize("seed", range(5))
def test_more_rounds_cost_no_more(seed: int) -> None:
    """The best round is kept, and the first rounds are the same."""
    profile, _ = planted(seed, 12, 4)
    mixed = noise(seed, 12, layers=3, k=3, requests=40)
    for inputs in (
        sem_moe.inputs_of(each, experts_per_rank(12, 4), sem_moe.Weights()) for each in (profile, mixed)
    ):
        costs = []
        for steps in (1, 2, 8):
            weights = sem_moe.Weights(steps=steps)
            found = sem_moe.alternate(inputs, np.random.default_rng(seed), weights)
            costs.append(sem_moe.cost(inputs, found, sem_moe.place_requests(inputs, found, weights)))
        assert costs[0] >= costs[1] - 1e-9 and costs[1] >= costs[2] - 1e-9


def test_exchanges_follow_the_greedy_pass() -> None:
    """The greedy pass puts 1 beside 0, before its companion 3 is placed. Nothing speaks against it at that
    moment."""
    pairs = np.zeros((1, 4, 4))
    pairs[0, 0, 3] = pairs[0, 3, 0] = 0.5
    rows = np.full((4, 1, 4), 1, dtype=np.float32)
    inputs = sem_moe.Inputs(rows, pairs, np.array([[0.4, 0.3, 0.2, 0.1]]), np.array([2, 2]))
    requests, rng = np.array([0, 0, 1, 1]), np.random.default_rng(0)
    greedy = sem_moe.place_experts(inputs, 0, requests, rng, sem_moe.Weights(load=0.0, swaps=0))
    assert same_clusters(greedy, np.array([0, 0, 1, 1]))
    best = sem_moe.place_experts(inputs, 0, requests, rng, sem_moe.Weights(load=0.0))
    assert same_clusters(best, np.array([0, 1, 1, 0]))
    loads = sem_moe.place_experts(inputs, 0, requests, rng, sem_moe.Weights(experts=0.0, load=9.0, swaps=0))
    assert same_clusters(loads, np.array([0, 1, 1, 0]))


def test_load_weighs() -> None:
    """Experts 0 and 1 are hot and chosen together. A high price of load separates them."""
    pairs = np.zeros((1, 4, 4))
    pairs[0, 0, 1] = pairs[0, 1, 0] = 0.5
    rows = np.full((4, 1, 4), 1, dtype=np.float32)
    inputs = sem_moe.Inputs(rows, pairs, np.array([[0.4, 0.4, 0.1, 0.1]]), np.array([2, 2]))
    together = sem_moe.alternate(inputs, np.random.default_rng(0), sem_moe.Weights(load=0.0))[0]
    apart = sem_moe.alternate(inputs, np.random.default_rng(0), sem_moe.Weights(load=9.0))[0]
    assert together[0] == together[1] and apart[0] != apart[1]


# ---- MoETuner


def test_balanced_worked_example() -> None:
    found, proven = moetuner.balance_clusters(
        np.array([5, 4, 3, 2]), np.array([2, 2]), moetuner.SolverLimits(gap=0.0)
    )
    assert same_clusters(found, np.array([0, 1, 1, 0])) and proven


@pytest.mark.slow
@pytest.mark.parametrize("room", [[4, 4], [2, 2, 2, 2], [3, 3, 2]])
@pytest.mark.parametrize("seed", range(4))
def test_balanced_is_the_best_of_all(seed: int, room: list[int]) -> None:
    load = (np.random.default_rng(seed).pareto(1.0, 8) * 100).astype(np.int64)
    ranks = len(room)
    found, proven = moetuner.balance_clusters(load, np.array(room), moetuner.SolverLimits(gap=0.0))
    best = min(moetuner.deviation(load, labels, ranks) for labels in partitions(np.array(room)))
    assert np.bincount(found, minlength=ranks).tolist() == room and proven
    assert moetuner.deviation(load, found, ranks) == pytest.approx(best, abs=1e-6 * load.sum())


HARD = np.array([50, 31, 27, 23, 19, 17, 13, 11, 7, 5, 3, 2])


def test_packing_answers_when_the_limit_passes() -> None:
    simple = pack_by_load(HARD, experts_per_rank(12, 4))
    found, proven = moetuner.balance_clusters(
        HARD, experts_per_rank(12, 4), moetuner.SolverLimits(gap=0.0, seconds=0.0)
    )
    assert not proven and (found == simple).all()
    better, proven = moetuner.balance_clusters(HARD, experts_per_rank(12, 4), moetuner.SolverLimits(gap=0.0))
    assert proven and moetuner.deviation(HARD, better, 4) < moetuner.deviation(HARD, found, 4)


@pytest.mark.slow
def test_an_answer_need_not_be_proven() -> None:
    load = np.random.default_rng(0).integers(10**6, 2 * 10**6, 32)
    found, proven = moetuner.balance_clusters(
        load, experts_per_rank(32, 8), moetuner.SolverLimits(gap=0.0, nodes=1)
    )
    assert not proven and np.bincount(found).tolist() == [4] * 8


def test_a_limit_that_passed_is_said() -> None:
    profile = noise(0, 12, layers=2, k=2)
    found = moetuner.solve(profile, 4, limits=moetuner.SolverLimits(gap=0.0, seconds=0.0))
    assert found.notes == (
        "moetuner: limits passed before loads were shown to be within 0.0% in layers 0, 1",
    )


@pytest.mark.parametrize("seed", range(5))
def test_bottleneck_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    most, total = rng.integers(0, 6, (5, 5)).astype(float), rng.integers(0, 9, (5, 5)).astype(float)
    own = np.arange(5)
    best = min(
        (most[own, list(columns)].max(), total[own, list(columns)].sum())
        for columns in permutations(range(5))
    )
    found = moetuner.bottleneck(most, total)
    assert (most[own, found].max(), total[own, found].sum()) == best
    assert moetuner.bottleneck(np.array([[3.0, 1], [2, 4]]), np.zeros((2, 2))).tolist() == [1, 0]


def test_traffic_between_clusters() -> None:
    """Clusters are 0, 1 | 2, 3, then 0, 2 | 1, 3. Of 10 choices 4 move from expert 1 to 3, and 6 from expert
    2 to 0."""
    moved = np.zeros((1, 4, 4), dtype=np.int64)
    moved[0, 1, 3], moved[0, 2, 0] = 4, 6
    found = moetuner.traffic(moved, np.array([[0, 0, 1, 1], [0, 1, 0, 1]]), 2)
    assert found.tolist() == [[[0, 0.4], [0.6, 0]]]


def test_mapped_worked_example() -> None:
    assert moetuner.map_clusters(np.array([[[0, 0.5], [0.5, 0]]])).tolist() == [[0, 1], [1, 0]]
    assert moetuner.map_clusters(np.zeros((0, 3, 3))).tolist() == [[0, 1, 2]]


def heaviest(moves: FloatArray, numbers: IntArray) -> tuple[float, float]:
    """The most choices that move between two ranks in any pair of layers, and the sum of all moves."""
    found = [
        [step[c, d] for c, d in product(range(3), repeat=2) if here[c] != there[d]]
        for step, here, there in zip(moves, numbers, numbers[1:], strict=False)
    ]
    return max(map(max, found)), sum(map(sum, found))


@pytest.mark.parametrize("seed", range(8))
def test_no_other_map_has_a_lower_maximum(seed: int) -> None:
    """The result is compared with all maps of three layers. For two layers it has the fewest moves of all
    equal maps."""
    moves = np.random.default_rng(seed).dirichlet(np.full(9, 0.5), 2).reshape(2, 3, 3)
    maps = [np.array(order) for order in permutations(range(3))]
    own = np.arange(3)
    two = min(heaviest(moves[:1], np.stack([own, a])) for a in maps)
    assert heaviest(moves[:1], moetuner.map_clusters(moves[:1])) == pytest.approx(two)
    three = min(heaviest(moves, np.stack([own, a, b]))[0] for a, b in product(maps, maps))
    assert heaviest(moves, moetuner.map_clusters(moves))[0] == three
