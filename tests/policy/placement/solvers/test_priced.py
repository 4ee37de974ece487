"""Clusters on links with different prices."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.planted_profiles import noise, profile_of

from moesaic.core.profile import Profile
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.link_prices import worth_of
from moesaic.policy.placement.solvers import annealing, vanilla
from moesaic.policy.placement.solvers.align import overlaps
from moesaic.policy.placement.solvers.annealing import AnnealingSearch, Layer
from moesaic.policy.placement.solvers.priced import agreement, priced, renumbered

QUICK = AnnealingSearch(heads=64, sample=32, polish=128, brief=300)
FloatArray = npt.NDArray[np.float64]


def two_level(places: list[int], near: float = 1.0, far: float = 8.0) -> FloatArray:
    """Prices of ranks on hosts: `near` inside of a host, `far` between two."""
    host = np.array(places)
    prices = np.where(host[:, None] == host, near, far)
    np.fill_diagonal(prices, 0.0)
    return prices


def pairs_of_topics(seed: int) -> tuple[Profile, IntArray]:
    """Tokens that choose one expert of their own topic and one of its partner's: 0 and 2, 1 and 3.

    Returns the profile and the topics [E] of the 8 experts, which are those of every layer.
    """
    rng = np.random.default_rng(seed)
    topics = np.arange(8) % 4
    owners = np.repeat(rng.permutation(24) % 4, 10)
    partner = (owners + 2) % 4
    layers = [
        np.stack([owners + 4 * rng.integers(0, 2, 240), partner + 4 * rng.integers(0, 2, 240)], axis=1)
        for _ in range(3)
    ]
    tokens = owners * 4 + rng.integers(0, 4, 240)
    return profile_of(np.stack(layers, axis=1), list(range(0, 241, 10)), tokens, 16, 8), topics


def cost(profile: Profile, experts: npt.NDArray[np.integer], prices: FloatArray) -> float:
    """Price of all counted choices, each token id on its cheapest rank of the layer. The obvious loop."""
    total = 0.0
    for layer, counts in enumerate(profile.counts):
        for token in counts.known_tokens.tolist():
            at = counts.tokens == token
            spent = [
                sum(
                    count * prices[rank, experts[layer, expert]]
                    for expert, count in zip(counts.experts[at], counts.counts[at], strict=True)
                )
                for rank in range(len(prices))
            ]
            total += min(spent)
    return total


def test_partners_come_onto_one_host() -> None:
    profile, topics = pairs_of_topics(1)
    blind = vanilla.solve(profile, 4)
    blind = type(blind)(4, np.tile(topics, (3, 1)).astype(np.int16), blind.tokens, blind.confidence)
    prices = two_level([0, 0, 1, 1])
    found = priced(profile, blind, prices, search=QUICK)
    hosts_of = np.array([0, 0, 1, 1])[found.experts]
    for layer in range(3):
        assert len(set(hosts_of[layer, topics % 2 == 0].tolist())) == 1, "topics 0 and 2 share a host"
    assert cost(profile, found.experts, prices) < 0.5 * cost(profile, blind.experts, prices)
    assert (np.bincount(found.experts[0], minlength=4) == 2).all()


def test_equal_arguments_give_equal_clusters() -> None:
    profile = noise(3, 8, 2, 2)
    prices = two_level([0, 0, 1, 1])
    one, other = (priced(profile, vanilla.solve(profile, 4), prices, 5, search=QUICK) for _ in range(2))
    assert (one.experts == other.experts).all()
    assert (one.tokens == other.tokens).all()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_noise_gets_cheaper_too(seed: int) -> None:
    profile = noise(seed, 12, 2, 3)
    prices = two_level([0, 1, 0, 1])
    blind = vanilla.solve(profile, 4)
    found = priced(profile, blind, prices, search=QUICK)
    assert cost(profile, found.experts, prices) < cost(profile, blind.experts, prices)


def test_numbers_are_the_best_of_all_where_few_are_possible() -> None:
    profile = noise(7, 9, 2, 2, requests=30)
    experts = np.tile(np.arange(9) % 3, (2, 1))
    worth = worth_of(two_level([0, 0, 1]))
    found = renumbered(profile, experts, worth)
    overlap = overlaps(profile, experts, 3)
    best = max(
        agreement(overlap, np.array([one, other]), worth)
        for one in permutations(range(3))
        for other in permutations(range(3))
    )
    numbers = np.stack([found[layer][[0, 1, 2]] for layer in range(2)])
    assert agreement(overlap, numbers, worth) == pytest.approx(best)


def test_equal_links_leave_aligned_numbers_alone() -> None:
    profile, topics = pairs_of_topics(2)
    experts = np.tile(topics, (3, 1))
    assert (renumbered(profile, experts, worth_of(1 - np.eye(4))) == experts).all()


@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
@settings(max_examples=20)
def test_gains_are_those_of_the_value(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    size = 8
    rows = rng.integers(0, 9, (size, 15)).astype(np.float32)
    worth = worth_of(two_level(rng.integers(0, 2, ranks).tolist()))
    loads = rows.sum(axis=1, dtype=np.float64) + 1
    layer = Layer.of(rows, loads, ranks, AnnealingSearch(spare=0.05), worth)
    labels = rng.permutation(np.arange(size) % ranks)
    expert = int(rng.integers(size))
    there = (labels[expert] + 1) % ranks
    others = np.flatnonzero(labels == there)
    state = annealing._State(layer, labels)
    for other, gain in zip(others.tolist(), state.gains(expert, others).tolist(), strict=True):
        swapped = labels.copy()
        swapped[[expert, other]] = swapped[[other, expert]]
        assert gain == pytest.approx(layer.value(swapped) - layer.value(labels), abs=1e-3)
    state.exchange(expert, int(others[0]))
    fresh = annealing._State(layer, state.labels)
    assert np.allclose(state.values, fresh.values, atol=1e-3)
    assert state.local == pytest.approx(fresh.local, abs=1e-2)
