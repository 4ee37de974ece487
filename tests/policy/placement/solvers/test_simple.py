"""The solvers that serve as baselines, and what all solvers have in common."""

from __future__ import annotations

from functools import partial
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.deepseek_eplb import eplb

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Counts, Profile, Routes
from moesaic.policy.placement.solvers import SOLVERS, annealing, metis
from moesaic.policy.placement.solvers.affinity import coactivation
from moesaic.policy.placement.solvers.eplb import packed
from moesaic.policy.placement.solvers.kmeans import _spread_within, clustered, unit
from moesaic.policy.placement.solvers.metis import fitted
from moesaic.policy.placement.solvers.solver import Solver, experts_per_rank
from moesaic.policy.placement.solvers.tokens import labelled, rank_choices

SIMPLE = ("vanilla", "eplb", "kmeans", "metis")
BRIEF = annealing.AnnealingSearch(steps=1_000, brief=500)
"""A short search. What all solvers have in common does not depend on its length."""


def profile_of(
    tokens: list[int], experts: object, vocab_size: int, size: int, nearest: list[int] | None = None
) -> Profile:
    """A profile of one request. experts: [t, layers, k]."""
    routes = Routes(
        np.array(tokens, dtype=np.int32),
        np.array([0, len(tokens)]),
        np.array([len(tokens)]),
        np.array([-1], dtype=np.int16),
        np.array(experts, dtype=np.int16),
    )
    found = None if nearest is None else np.array(nearest, dtype=np.int32)
    return Profile.from_routes("m", vocab_size, size, range(routes.experts.shape[1]), routes, nearest=found)


def grouped(size: int, ranks: int, seed: int, layers: int = 3) -> tuple[Profile, np.ndarray]:
    """A profile in which each token id chooses 2 experts of one group, and the groups [layers, E]."""
    rng = np.random.default_rng(seed)
    groups = np.stack([rng.permutation(np.arange(size) % ranks) for _ in range(layers)])
    tokens = np.arange(20 * ranks).repeat(5)
    experts = np.stack(
        [
            [rng.choice(np.flatnonzero(groups[layer] == token % ranks), 2, replace=False) for token in tokens]
            for layer in range(layers)
        ],
        axis=1,
    )
    return profile_of(tokens.tolist(), experts, 20 * ranks, size), groups


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    size, layers, vocab_size = draw(st.integers(2, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 12))
    k = draw(st.integers(1, min(3, size)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    tokens = rng.integers(vocab_size, size=draw(st.integers(1, 30)))
    experts = rng.random((len(tokens), layers, size)).argsort(axis=2)[:, :, :k]
    return profile_of(tokens.tolist(), experts, vocab_size, size)


# ---- what all have alike


def test_rooms_worked_example() -> None:
    assert experts_per_rank(8, 3).tolist() == [3, 3, 2]
    assert experts_per_rank(8, 4).tolist() == [2, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("solver", [name for name in SOLVERS if name != "ours"])
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_rank_has_its_share_of_the_experts(solver: str, data: st.DataObject) -> None:
    profile = data.draw(profiles())
    assert_conforms(solver, profile, data.draw(st.integers(1, profile.num_experts)))


@pytest.mark.parametrize(
    "solver", [pytest.param(name, marks=pytest.mark.slow if name == "ours" else ()) for name in SOLVERS]
)
def test_a_rank_may_hold_one_more(solver: str) -> None:
    profile, _ = grouped(size=8, ranks=4, seed=0, layers=1)
    assert_conforms(solver, profile, ranks=3)


def assert_conforms(solver: str, profile: Profile, ranks: int) -> None:
    calls: list[tuple[int, int]] = []
    solve: Solver = partial(annealing.solve, search=BRIEF) if solver == "ours" else SOLVERS[solver]
    found = solve(profile, ranks, 3, lambda done, total: calls.append((done, total)))
    layers = len(profile.layers)
    assert found.ranks == ranks
    assert found.experts.shape == (layers, profile.num_experts) and found.experts.dtype == np.int16
    assert found.tokens.shape == (layers, profile.vocab_size) and found.tokens.dtype == np.int16
    assert found.confidence.shape == found.tokens.shape and found.confidence.dtype == np.float32
    for row in found.experts:
        sizes = np.bincount(row, minlength=ranks)
        assert len(sizes) == ranks and sizes.max() - sizes.min() <= 1
    assert ((found.tokens >= 0) & (found.tokens < ranks)).all()
    seen = np.zeros(profile.vocab_size, dtype=bool)
    seen[profile.routes.tokens] = True
    assert ((found.confidence > 0) == seen).all() and (found.confidence <= 1).all()
    assert calls and calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len({total for _, total in calls}) == 1
    again = solve(profile, ranks, 3)
    assert (again.experts == found.experts).all() and (again.tokens == found.tokens).all()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("ranks", [-1, 0, 5])
def test_ranks_that_cannot_be(solver: str, ranks: int) -> None:
    profile = profile_of([0, 1], [[[0, 1]], [[2, 3]]], 2, 4)
    with pytest.raises(ConfigError, match=f"^--ranks: got {ranks}; allowed: 1 to 4"):
        SOLVERS[solver](profile, ranks)


# ---- tokens


def test_tokens_worked_example() -> None:
    profile = profile_of([5, 5, 2], [[[0, 1]], [[0, 2]], [[3, 2]]], 7, 4)
    found = labelled(profile, np.array([[0, 0, 1, 1]]))
    assert found.ranks == 2
    assert found.tokens[0, [5, 2]].tolist() == [0, 1]
    assert found.confidence[0, [5, 2]].tolist() == [0.75, 1.0]


def test_unseen_tokens_take_the_nearest_label_or_the_busiest_rank() -> None:
    """Ids 0 and 1 are known. Id 2 is near id 0. Id 3 is nearest to itself, so its best rank is unknown."""
    tokens, experts = [0, 1, 1], [[[0]], [[1]], [[1]]]
    placed = np.array([[0, 1]])
    with_nearest = labelled(profile_of(tokens, experts, 4, 2, [0, 1, 0, 3]), placed)
    assert with_nearest.tokens.tolist() == [[0, 1, 0, 1]]
    assert with_nearest.confidence.tolist() == [[1, 1, 0, 0]]
    assert labelled(profile_of(tokens, experts, 4, 2), placed).tokens.tolist() == [[0, 1, 1, 1]]


@given(profiles(), st.integers(0, 1000))
def test_labels_are_the_best_ranks(profile: Profile, seed: int) -> None:
    size = profile.num_experts
    placed = np.random.default_rng(seed).permutation(np.arange(size) % 2)[None].repeat(len(profile.layers), 0)
    found = labelled(profile, placed)
    routes = profile.routes
    for layer in range(len(profile.layers)):
        for token in set(routes.tokens.tolist()):
            choices = placed[layer][routes.experts[routes.tokens == token, layer]].ravel().tolist()
            best = max(range(2), key=lambda rank: (choices.count(rank), -rank))
            assert found.tokens[layer, token] == best
            assert found.confidence[layer, token] == pytest.approx(choices.count(best) / len(choices))


def test_choices_by_rank() -> None:
    counts = Counts.from_pairs(np.array([1, 1]), np.array([[0, 1], [0, 2]]), 3, 3)
    assert rank_choices(counts, np.array([0, 1, 1], dtype=np.int16), 2).tolist() == [[0, 0], [2, 2], [0, 0]]


# ---- affinity


def test_coactivation_worked_example() -> None:
    counts = Counts(np.array([0, 2]), np.array([0, 1], dtype=np.int16), np.array([2, 1], dtype=np.int32))
    assert coactivation(counts, 2, top_k=1) == pytest.approx(np.array([[4, 2], [2, 1]]) / 3)
    counts = Counts.from_pairs(np.array([0, 0]), np.array([[0, 1], [0, 2]]), 1, 3)
    assert coactivation(counts, 3, top_k=2) == pytest.approx(
        np.array([[2, 1, 1], [1, 0.5, 0.5], [1, 0.5, 0.5]])
    )


@pytest.mark.slow
@given(profiles())
def test_coactivation_is_what_it_says(profile: Profile) -> None:
    size, k = profile.num_experts, profile.top_k
    for counts in profile.counts:
        expected = np.zeros((size, size))
        for token in range(profile.vocab_size):
            row = np.zeros(size)
            mine = slice(counts.starts[token], counts.starts[token + 1])
            row[counts.experts[mine]] = counts.counts[mine]
            if row.any():
                expected += np.outer(row, row) / (row.sum() / k)
        assert coactivation(counts, size, k) == pytest.approx(expected)


# ---- one after the other


def test_vanilla_is_consecutive() -> None:
    profile = profile_of([0], [[[0], [3]]], 1, 5)
    assert SOLVERS["vanilla"](profile, 2).experts.tolist() == [[0, 0, 0, 1, 1]] * 2


def test_packing_worked_example() -> None:
    assert packed(np.array([9, 5, 4, 1]), np.array([2, 2])).tolist() == [0, 1, 1, 0]
    assert packed(np.array([9, 1, 1]), np.array([2, 1])).tolist() == [0, 1, 0]


def test_eplb_packs_the_loads_of_each_layer() -> None:
    """The loads are 9 1 5 4 in layer 0 and 4 5 1 9 in layer 1."""
    first = np.repeat([0, 1, 2, 3], [9, 1, 5, 4])
    experts = np.stack([first, 3 - first], axis=1)[:, :, None]
    found = SOLVERS["eplb"](profile_of([0] * len(first), experts, 1, 4), 2)
    assert found.experts.tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]
    assert found.tokens.tolist() == [[0], [0]]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_packing_is_that_of_eplb(ranks: int, each: int, seed: int) -> None:
    """The packing is that of EPLB. Only the numbers of the ranks may differ, where EPLB keeps the order of
    one expert each."""
    loads = np.random.default_rng(seed).integers(0, 50, ranks * each)
    found = packed(loads, experts_per_rank(len(loads), ranks))
    slots = eplb(loads[None].astype(np.float64), len(loads), 1, 1, ranks).phys_to_log[0]
    expected = {frozenset(row) for row in slots.reshape(ranks, each).tolist()}
    assert {frozenset(np.flatnonzero(found == rank).tolist()) for rank in range(ranks)} == expected


@pytest.mark.parametrize("solver", ["kmeans", "metis"])
@pytest.mark.parametrize("seed", range(3))
def test_groups_are_found(solver: str, seed: int) -> None:
    profile, groups = grouped(size=24, ranks=4, seed=seed)
    found = SOLVERS[solver](profile, 4, seed)
    same = found.experts[:, :, None] == found.experts[:, None, :]
    assert (same == (groups[:, :, None] == groups[:, None, :])).all()
    assert (found.confidence == 1).all()
    assert (found.tokens == found.tokens[0]).all(), "numbers mean the same in all layers"


def test_kmeans_worked_example() -> None:
    vectors = np.array([[1.0, 0], [0, 1], [1, 0], [0, 1]])
    found = clustered(vectors @ vectors.T, np.array([2, 2]), np.random.default_rng(0)).tolist()
    assert found in ([0, 1, 0, 1], [1, 0, 1, 0])


@pytest.mark.parametrize(
    "room", [(3, 3), (4, 2), (2, 2, 2), pytest.param((3, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_kmeans_comes_near_the_best_partition(room: tuple[int, ...]) -> None:
    """It is near in the mean. Sometimes it ends far from the best partition, as a heuristic may."""
    slots = np.repeat(np.arange(len(room)), room).tolist()
    partitions = [np.array(labels) for labels in sorted(set(permutations(slots)))]
    ratios = []
    for seed in range(50):
        rng = np.random.default_rng(seed)
        vectors = rng.random((sum(room), 3))
        products = unit(vectors @ vectors.T)
        scaled = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        labels = clustered(products, np.array(room), rng)
        assert sorted(labels.tolist()) == slots
        found, least = spread(scaled, labels), min(spread(scaled, other) for other in partitions)
        assert _spread_within(products, labels, np.array(room)) == pytest.approx(found)
        assert found >= least - 1e-9
        ratios.append(found / least)
    assert np.mean(ratios) < 1.02  # at most 1.001 when this was written


def spread(vectors: np.ndarray, labels: np.ndarray) -> float:
    """The sum of squared distances to the centres of the groups."""
    parts = [vectors[labels == rank] for rank in range(labels.max() + 1)]
    return float(sum(((part - part.mean(axis=0)) ** 2).sum() for part in parts))


def test_sizes_are_fitted_at_the_least_loss() -> None:
    weights = np.zeros((4, 4))
    weights[0, 1] = weights[1, 0] = weights[2, 3] = weights[3, 2] = 1
    assert fitted(weights, np.array([0, 0, 0, 1]), np.array([2, 2])).tolist() == [0, 0, 1, 1]
    weights = np.zeros((5, 5))
    weights[1, 3] = weights[3, 1] = weights[2, 4] = weights[4, 2] = 1
    assert fitted(weights, np.array([0, 0, 0, 1, 2]), np.array([1, 2, 2])).tolist() == [0, 1, 2, 1, 2]


def test_metis_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis, "pymetis", None)
    with pytest.raises(ConfigError, match=r"^--solver: got 'metis'; .*pip install 'moesaic\[metis\]'"):
        metis.solve(profile_of([0], [[[0]]], 1, 2), 2)
