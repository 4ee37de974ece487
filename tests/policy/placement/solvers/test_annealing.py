"""Our solver: the gains of its exchanges, what it finds, and the load of a rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.planted_profiles import noise, planted, same_clusters

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Counts, Profile, SmallArray
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers import annealing, kmeans, speculative
from moesaic.policy.placement.solvers.annealing import (
    AnnealingSearch,
    anneal,
    dense,
    mix,
    overload,
    place,
    polish,
    recombine,
    sample_rows,
)
from moesaic.policy.placement.solvers.solver import experts_per_rank
from moesaic.policy.placement.solvers.tokens import rank_choices

pytestmark = pytest.mark.slow
QUICK = AnnealingSearch(runs=3, steps=600, hot=0.02, cold=1e-3, offspring=2, brief=200)


def local(profile: Profile, experts: SmallArray, ranks: int) -> float:
    """The number of choices that are on their token id's best rank, over all layers of the profile."""
    layers = zip(profile.counts, experts, strict=True)
    return sum(float(rank_choices(counts, row, ranks).max(axis=1).sum()) for counts, row in layers)


def carried(profile: Profile, experts: SmallArray, ranks: int) -> IntArray:
    """The load of each rank in each layer, [layers, R]."""
    layers = zip(experts, profile.loads, strict=True)
    return np.array([np.bincount(row, loads, minlength=ranks) for row, loads in layers]).astype(np.int64)


def test_worked_example() -> None:
    counts = Counts.from_pairs(np.array([5, 6]), np.array([[0, 2], [1, 3]]), 8, 4)
    assert same_clusters(place(counts, 4, 2, np.random.default_rng(0), QUICK), np.array([0, 1, 0, 1]))


def test_dense_worked_example() -> None:
    counts = Counts.from_pairs(np.array([5, 5, 2]), np.array([[1, 0], [1, 2], [0, 2]]), 8, 3)
    assert dense(counts, 3).tolist() == [[1, 0, 1], [1, 2, 1]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_planted_clusters_are_found_and_numbered_alike(seed: int, ranks: int) -> None:
    profile, topics = planted(seed, 12, ranks)
    found = annealing.solve(profile, ranks, seed=seed, search=QUICK)
    assert same_clusters(found.experts.astype(np.int64).ravel(), topics.ravel())
    assert local(profile, found.experts, ranks) == profile.loads.sum()


@pytest.mark.parametrize("seed", range(5))
def test_as_good_as_every_placement(seed: int) -> None:
    """The case is small enough to try every placement. The load is unlimited."""
    profile = noise(seed, size=7, layers=1, k=2)
    room = experts_per_rank(7, 3)
    every = {tuple(row) for row in permutations(np.repeat(np.arange(3), room).tolist())}
    best = max(local(profile, np.array([row], dtype=np.int16), 3) for row in every)
    search = replace(QUICK, spare=1.0, evener=None, steps=3000)
    assert local(profile, annealing.solve(profile, 3, search=search).experts, 3) == best


@pytest.mark.parametrize("seed", [0, 1, 2, 4])
def test_more_local_than_k_means(seed: int) -> None:
    """24 experts on 4 ranks without planted order, with the balance that k-means reached."""
    profile = noise(seed, size=24, layers=1, k=4, requests=60)
    rival = kmeans.solve(profile, 4, seed)
    most = carried(profile, rival.experts, 4).max()
    spare = float(most / profile.loads.sum()) - 1 / 4
    search = AnnealingSearch(spare, evener=None, runs=2, steps=4000, hot=0.01, offspring=4, brief=1000)
    found = annealing.solve(profile, 4, seed, search=search)
    assert local(profile, found.experts, 4) > 1.01 * local(profile, rival.experts, 4)
    assert carried(profile, found.experts, 4).max() <= 1.005 * most


def test_a_rank_carries_no_more_than_its_cap() -> None:
    """Hot experts are chosen together. On one rank they are local, on several they are balanced."""
    rng = np.random.default_rng(0)
    tokens = np.arange(400) % 40
    scores = rng.random((400, 8)) + np.where(tokens[:, None] % 4 == 0, 0.0, 1.0) * (np.arange(8) < 4)
    counts = Counts.from_pairs(tokens, np.argsort(-scores, axis=1)[:, :2], 40, 8)
    loads = counts.loads(8)

    def most(spare: float) -> tuple[float, float]:
        found = place(
            counts, 8, 2, np.random.default_rng(1), replace(QUICK, spare=spare, evener=None, steps=2000)
        )
        choices = rank_choices(counts, found.astype(np.int16), 2)
        return np.bincount(found, loads).max() / loads.sum(), choices.max(axis=1).sum() / loads.sum()

    (free, free_rate), (capped, capped_rate) = most(1.0), most(0.01)
    assert free > 0.8
    assert capped <= 0.51
    assert free_rate > capped_rate > 0.5


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 9), st.data())
def test_gains_are_what_an_exchange_adds(seed: int, size: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, size))
    spare = data.draw(st.sampled_from([0.0, 0.05, 1.0]))
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 5, (size, 12)).astype(np.float32) + np.float32(0.01)
    layer = annealing.Layer.from_rows(
        rows, rows.sum(axis=1, dtype=np.float64), ranks, AnnealingSearch(spare=spare)
    )
    state = annealing._State(
        layer, rng.permutation(np.repeat(np.arange(ranks), experts_per_rank(size, ranks)))
    )
    for _ in range(5):
        expert = int(rng.integers(size))
        there = (state.labels[expert] + rng.integers(1, ranks)) % ranks
        others = np.flatnonzero(state.labels == there)
        gains, before = state.gains(expert, others), layer.value(state.labels)
        taken = int(rng.integers(len(others)))
        state.exchange(expert, int(others[taken]))
        assert layer.value(state.labels) - before == pytest.approx(gains[taken], abs=1e-3)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 3), st.data())
def test_every_rank_has_its_share_of_the_experts(
    seed: int, size: int, layers: int, data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(1, size))
    profile = noise(seed, size, layers, k=min(2, size))
    steps: list[tuple[int, int]] = []
    search = AnnealingSearch(steps=40, runs=1, heads=4, sample=3, polish=6, offspring=2, brief=20)
    found = annealing.solve(profile, ranks, seed, lambda *step: steps.append(step), search)
    again = annealing.solve(profile, ranks, seed, search=search)
    for row in found.experts:
        assert sorted(np.bincount(row, minlength=ranks)) == sorted(experts_per_rank(size, ranks))
    assert (found.experts == again.experts).all() and (found.tokens == again.tokens).all()
    assert found.ranks == ranks
    parts, totals = zip(*steps, strict=True)
    assert set(totals) == {parts[-1]} and parts[-1] % layers == 0
    searched = ranks not in (1, size)  # otherwise there is nothing to search, and a layer is done at once
    assert list(parts) == [
        part + 1 for part in range(parts[-1]) if searched or (part + 1) % (parts[-1] // layers) == 0
    ]


def test_polish_ends_where_no_exchange_gains() -> None:
    rng = np.random.default_rng(0)
    rows = rng.gamma(0.3, size=(12, 50)).astype(np.float32)
    layer = annealing.Layer.from_rows(rows, rows.sum(axis=1, dtype=np.float64), 3, AnnealingSearch())
    start = rng.permutation(np.arange(12) % 3)
    found = polish(layer, start)
    assert layer.value(found) > layer.value(start)
    state = annealing._State(layer, found)
    for expert in range(12):
        for rank in {0, 1, 2} - {int(found[expert])}:
            assert state.gains(expert, np.flatnonzero(found == rank)).max() <= 1e-6 * rows.sum() + 1e-9


def test_anneal_returns_the_best_that_it_saw() -> None:
    """The temperature is so high that the search only gets worse. The start was best."""
    rows = np.kron(np.eye(3), np.ones((4, 5))).astype(np.float32)
    layer = annealing.Layer.from_rows(rows, rows.sum(axis=1, dtype=np.float64), 3, AnnealingSearch())
    start = np.arange(12) // 4
    found = anneal(layer, start, np.random.default_rng(0), AnnealingSearch(steps=50, hot=1e3, cold=1e3))
    assert same_clusters(found, start)


def test_more_local_and_evener_than_cross_entropy() -> None:
    """The result is more local and more even for every `spare`."""
    counts = noise(0, size=24, layers=1, k=4, requests=60).counts[0]
    rows, loads = dense(counts, 24), counts.loads(24).astype(np.float64)
    rival = speculative.search_layer(rows, 4, np.random.default_rng(3), speculative.CrossEntropySearch())
    search = AnnealingSearch(spare=1.0, runs=2, steps=4000, hot=0.01, offspring=4, brief=1000)
    found = place(counts, 24, 4, np.random.default_rng(3), search)
    rates = [float((rows @ np.eye(4)[labels]).max(axis=1).sum()) for labels in (found, rival)]
    assert rates[0] > rates[1]
    assert overload(found, loads, 4) <= 0.9 * overload(rival, loads, 4) + 0.001


def test_overload_worked_example() -> None:
    assert overload(np.array([0, 1]), np.array([5.0, 3.0]), 2) == 0.125


def test_mixtures_keep_what_both_agree_on() -> None:
    rows = np.ones((6, 4), dtype=np.float32)
    layer = annealing.Layer.from_rows(rows, rows.sum(axis=1, dtype=np.float64), 2, AnnealingSearch())
    one, other = np.array([0, 0, 0, 1, 1, 1]), np.array([1, 1, 0, 0, 0, 1])
    found = {tuple(mix(layer, one, other, np.random.default_rng(seed)).tolist()) for seed in range(20)}
    assert found == {(0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 1, 0)}


def test_offspring_is_at_least_as_good_as_its_parents() -> None:
    rng = np.random.default_rng(0)
    rows = rng.gamma(0.2, size=(16, 80)).astype(np.float32)
    layer = annealing.Layer.from_rows(
        rows, rows.sum(axis=1, dtype=np.float64), 4, AnnealingSearch(spare=0.05)
    )
    runs = [rng.permutation(np.arange(16) % 4) for _ in range(3)]
    best = max(layer.value(run) for run in runs)
    kept = recombine(layer, list(runs), rng, AnnealingSearch(offspring=0))
    assert layer.value(kept) == best
    found = recombine(layer, list(runs), rng, AnnealingSearch(offspring=4, brief=300, warm=0.01))
    assert layer.value(found) > best
    assert np.bincount(found).tolist() == [4, 4, 4, 4]


def test_a_sample_weighs_what_it_stands_for() -> None:
    rng = np.random.default_rng(0)
    rows = rng.gamma(0.2, size=(500, 6)).astype(np.float32) + np.float32(1e-3)
    some = sample_rows(rows, 20, 60, rng)
    assert some.shape == (6, 80)
    assert some.sum() == pytest.approx(rows.sum(), rel=1e-4)
    order = np.argsort(-rows.sum(axis=1))
    assert np.array_equal(some[:, :20], rows[order[:20]].T)
    means = np.mean([sample_rows(rows, 20, 60, rng).sum(axis=1) for _ in range(300)], axis=0)
    assert means == pytest.approx(rows.sum(axis=0), rel=0.03)
    assert sample_rows(rows, 400, 100, rng).shape == (6, 500)


def test_layers_without_counts_are_placed_all_the_same() -> None:
    empty = Counts.from_pairs(np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.int64), 4, 5)
    found = place(empty, 5, 2, np.random.default_rng(0), AnnealingSearch())
    assert np.bincount(found).tolist() == [3, 2]


def test_each_run_is_progress() -> None:
    said: list[tuple[int, int]] = []
    search = replace(QUICK, runs=2, offspring=3, steps=50, brief=20)
    annealing.solve(noise(0, 6, layers=2, k=2), 2, 0, lambda done, total: said.append((done, total)), search)
    assert said == [(done, 12) for done in range(1, 13)]


@pytest.mark.parametrize("ranks", [0, 5, -1])
def test_refuses_ranks_without_experts(ranks: int) -> None:
    with pytest.raises(ConfigError, match="--ranks"):
        annealing.solve(noise(0, 4, 1, 2), ranks)
