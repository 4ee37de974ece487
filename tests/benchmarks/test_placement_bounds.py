"""Every placement <= the integer program = the best placement <= the bound."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_bounds import choices
from placement_bounds.bounds import bound, upper_bound
from placement_bounds.choices import Tokens
from placement_bounds.exact import exact

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Counts
from moesaic.policy.placement.solvers.annealing import dense
from moesaic.policy.placement.solvers.solver import experts_per_rank
from tests.support.planted_profiles import noise, planted, same_clusters

pytestmark = pytest.mark.slow


def layer(seed: int, size: int, k: int, tokens: int = 60, vocab_size: int = 12) -> Counts:
    """Token ids with habits."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab_size, tokens)
    habits = 1.5 * rng.gumbel(size=(vocab_size, size))
    experts = np.argsort(-(habits[ids] + rng.gumbel(size=(tokens, size))), axis=1)[:, :k]
    return Counts.from_pairs(ids, experts, vocab_size, size)


def rate(rows: np.ndarray, labels: np.ndarray, ranks: int) -> float:
    return float((rows @ np.eye(ranks)[labels]).max(axis=1).sum() / rows.sum())


def placements(size: int, ranks: int) -> list[np.ndarray]:
    labels = np.repeat(np.arange(ranks), experts_per_rank(size, ranks)).tolist()
    return [np.array(row) for row in {tuple(row) for row in permutations(labels)}]


def test_worked_example() -> None:
    counts = Counts.from_pairs(np.array([5, 6]), np.array([[0, 2], [1, 3]]), 8, 4)
    best, labels = exact(counts, 4, 2)
    assert best == pytest.approx(1.0)
    assert same_clusters(labels, np.array([0, 1, 0, 1]))


@pytest.mark.parametrize(("size", "ranks"), [(4, 2), (5, 2), (6, 2), (6, 3), (7, 3), (8, 4), (5, 5), (4, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_exact_is_the_best_of_all_placements(size: int, ranks: int, seed: int) -> None:
    counts = layer(seed, size, 2)
    rows = dense(counts, size)
    best, labels = exact(counts, size, ranks)
    assert best == pytest.approx(max(rate(rows, row, ranks) for row in placements(size, ranks)))
    assert rate(rows, labels, ranks) == pytest.approx(best)
    assert sorted(np.bincount(labels, minlength=ranks)) == sorted(experts_per_rank(size, ranks))


@pytest.mark.parametrize(
    ("size", "ranks", "most"),
    [(6, 2, 1.04), (8, 2, 1.03), (9, 3, 1.06), (8, 4, 1.07), (12, 4, 1.05), (7, 3, 1.13)],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_above_the_optimum_and_near(size: int, ranks: int, most: float, seed: int) -> None:
    counts = layer(seed, size, 3)
    best, _ = exact(counts, size, ranks)
    found = bound(dense(counts, size).astype(np.float64), ranks, 100)
    assert best - 1e-9 <= found <= most * best


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("spare", [1.0, 0.02])
def test_of_tokens_with_one_expert_each_all_is_local(ranks: int, spare: float) -> None:
    ids = np.repeat(np.arange(6), [1, 3, 5, 7, 2, 4])
    counts = Counts.from_pairs(ids, ids[:, None], 6, 6)
    assert bound(dense(counts, 6).astype(np.float64), ranks, 50, spare) == pytest.approx(1.0)
    assert exact(counts, 6, ranks)[0] == pytest.approx(1.0)


@pytest.mark.parametrize("often", [1, 10**6])
def test_hardly_any_token_with_two_experts(often: int) -> None:
    """Choices of one token in a million may go to another rank."""
    ids = np.arange(6)
    experts = np.stack([ids, ids], axis=1)
    experts[0, 1] = 1
    rows = dense(Counts.from_pairs(ids, experts, 6, 6), 6).astype(np.float64)
    rows[1:] *= often
    found = bound(rows, 3, 50)
    assert 1 - 1 / rows.sum() <= found <= 1 + 1e-9


@pytest.mark.parametrize("ranks", [2, 4])
def test_more_rounds_never_raise_it(ranks: int) -> None:
    rows = dense(layer(0, 8, 3), 8).astype(np.float64)
    found = [bound(rows.copy(), ranks, rounds) for rounds in (10, 40, 160, 400)]
    assert found == sorted(found, reverse=True) and found[-1] < 0.99 * found[0]


@pytest.mark.parametrize("rounds", [1, 2, 5, 20])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_is_true_before_it_converges(rounds: int, seed: int) -> None:
    counts = layer(seed, 8, 2)
    best, _ = exact(counts, 8, 2)
    assert bound(dense(counts, 8).astype(np.float64), 2, rounds) >= best - 1e-9


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 7), st.sampled_from([0.0, 0.02, 0.1, 1.0]), st.data())
def test_no_placement_is_above_it(seed: int, size: int, spare: float, data: st.DataObject) -> None:
    """With a cap on loads: no placement that keeps to it."""
    ranks = data.draw(st.integers(2, size))
    rows = dense(layer(seed, size, min(2, size), tokens=20), size).astype(np.float64)
    found = bound(rows, ranks, 30, spare)
    for row in placements(size, ranks):
        if np.bincount(row, rows.sum(axis=0)).max() <= (1 / ranks + spare) * rows.sum() + 1e-9:
            assert rate(rows, row, ranks) <= found + 1e-9


def test_a_cap_on_loads_lowers_it() -> None:
    rng = np.random.default_rng(0)
    ids = np.arange(600) % 60
    scores = rng.random((600, 8)) + np.where(ids[:, None] % 4 == 0, 0.0, 0.6) * (np.arange(8) < 4)
    rows = dense(Counts.from_pairs(ids, np.argsort(-scores, axis=1)[:, :2], 60, 8), 8).astype(np.float64)
    assert bound(rows, 2, 100, spare=0.01) < 0.95 * bound(rows, 2, 100)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(1, 4))
def test_what_tokens_pay_bounds_every_placement(seed: int, ranks: int, size: int) -> None:
    """With any a, N and l, whatever U they were meant for."""
    experts, rng = ranks * size, np.random.default_rng(seed)
    rows = rng.random((20, experts)) * (rng.random((20, experts)) < 0.6) + 0.01
    tokens = Tokens(rows, ranks)
    tokens.taken[:] = rng.normal(size=tokens.taken.shape) / 3
    fines = tokens.taken[:, tokens.places :]
    np.maximum(fines, 0, out=fines)
    tokens.raised[:] = rng.random(tokens.raised.shape) * rng.integers(0, 2, tokens.raised.shape)
    shared = rng.random((experts, experts))
    constant, pairs = tokens.bound(shared @ shared.T)
    for _ in range(10):
        held = np.eye(ranks)[rng.permutation(np.arange(experts) % ranks)]
        local = (rows @ held).max(axis=1).sum()
        assert local <= constant + (pairs * (held @ held.T)).sum() + 1e-9


@pytest.mark.parametrize(("size", "ranks", "seed"), [(8, 2, 0), (9, 3, 2), (12, 4, 2)])
def test_subsets_lower_it(size: int, ranks: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dense(layer(seed, size, 3), size).astype(np.float64)
    found = bound(rows.copy(), ranks, 100)
    monkeypatch.setattr(choices, "MOST", 1)
    assert found < 0.985 * bound(rows.copy(), ranks, 100)


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_does_not_depend_on_how_many_tokens_are_taken_at_a_time(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = dense(layer(0, 8, 3, tokens=200, vocab_size=60), 8).astype(np.float64)
    whole = bound(rows.copy(), ranks, 100)
    monkeypatch.setattr(choices, "CHUNK", 7)
    assert bound(rows.copy(), ranks, 100) == pytest.approx(whole, rel=5e-3)


def test_planted_clusters_can_be_local_to_the_last() -> None:
    profile, _ = planted(0, 12, 3)
    steps: list[tuple[int, int]] = []
    found = upper_bound(profile, 3, 20, progress=lambda *step: steps.append(step))
    assert found.tolist() == [1.0] * 3
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_one_rank_and_one_expert_a_rank() -> None:
    profile = noise(0, 5, 2, 2)
    assert upper_bound(profile, 1).tolist() == [1.0, 1.0]
    rows = [dense(counts, 5) for counts in profile.counts]
    assert upper_bound(profile, 5) == pytest.approx([row.max(axis=1).sum() / row.sum() for row in rows])


def test_an_optimum_that_takes_too_long() -> None:
    with pytest.raises(TimeoutError, match="0.0 seconds"):
        exact(layer(0, 8, 3), 8, 4, seconds=0.0)


def test_refusals() -> None:
    profile = noise(0, 4, 1, 2)
    for ranks in (0, 5):
        with pytest.raises(ConfigError, match="--ranks"):
            upper_bound(profile, ranks)
        with pytest.raises(ConfigError, match="--ranks"):
            exact(profile.counts[0], 4, ranks)
    with pytest.raises(ConfigError, match="experts: got 16; allowed: 1000 ways"):
        exact(layer(0, 16, 2), 16, 2)
