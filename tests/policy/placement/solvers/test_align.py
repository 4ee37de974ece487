"""Cluster numbers that mean the same in all layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from tests.support.planted_profiles import noise, planted, profile_of, same_clusters

from moesaic.core.profile import Profile
from moesaic.policy.placement.solvers.align import agreement, align, overlaps


def shuffled(seed: int, layers: int, size: int, ranks: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(np.arange(size) % ranks) for _ in range(layers)])


def aligned_agreement(profile: Profile, experts: np.ndarray, ranks: int) -> float:
    in_order = np.tile(np.arange(ranks), (len(experts), 1))
    return agreement(overlaps(profile, experts.astype(np.int64), ranks), in_order)


def test_worked_example() -> None:
    """Half of the requests choose 0, 1 and then 2, 3. The others choose 2, 3 and then 0, 1."""
    one, other = [[0, 1], [2, 3]], [[2, 3], [0, 1]]
    profile = profile_of(np.array([one, other] * 4), list(range(9)), np.arange(8) % 2, 2, 4)
    assert align(profile, np.array([[0, 0, 1, 1]] * 2), 2).tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("by_request", [True, False])
def test_every_topic_has_one_number(seed: int, by_request: bool) -> None:
    profile, topics = planted(seed, size=12, ranks=4, layers=5)
    if not by_request:
        profile = replace(profile, routes=profile.routes.select([]))
    rng = np.random.default_rng(seed)
    given = np.stack([rng.permutation(4)[row] for row in topics])
    found = align(profile, given, 4)
    of_topic = given[0][np.argsort(topics[0], kind="stable")[::3]]
    assert (found == of_topic[topics]).all()


@pytest.mark.parametrize("seed", range(10))
def test_as_good_as_every_numbering(seed: int) -> None:
    """The case is small enough to try every numbering."""
    profile = noise(seed, size=6, layers=4, k=2, requests=20)
    given = shuffled(seed, 4, 6, 3)
    overlap = overlaps(profile, given, 3)
    numberings = product([(0, 1, 2)], *[list(permutations(range(3)))] * 3)
    best = max(agreement(overlap, np.array(numbers)) for numbers in numberings)
    assert aligned_agreement(profile, align(profile, given, 3), 3) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(10))
def test_clusters_stay_and_agree_no_less(seed: int) -> None:
    profile = noise(seed, size=11, layers=6, k=3)
    given = shuffled(seed, 6, 11, 4)
    found = align(profile, given, 4)
    assert all(same_clusters(a, b) for a, b in zip(found, given, strict=True))
    assert (found[0] == given[0]).all()
    assert aligned_agreement(profile, found, 4) >= aligned_agreement(profile, given, 4) - 1e-9
    assert (align(profile, found, 4) == found).all()


def test_agreement_is_the_covariance_of_requests() -> None:
    """The covariance is counted request by request. The first eight requests are three times as long as the
    others."""
    even = noise(3, size=6, layers=3, k=2, requests=16)
    routes = replace(even.routes, starts=np.cumsum([0, *[12] * 8, *[4] * 8]))
    profile = even.with_routes(routes)
    experts, ranks = shuffled(3, 3, 6, 3), 3
    size = np.diff(routes.starts)[:, None, None] * 2.0
    shares = np.zeros((16, 3, ranks))
    for token, request in enumerate(profile.routes.owners):
        for layer in range(3):
            for expert in profile.routes.experts[token, layer]:
                shares[request, layer, experts[layer, expert]] += 1
    shares = (shares / size - shares.sum(axis=0) / size.sum()) * np.sqrt(size)
    everything = (shares.sum(axis=1) ** 2).sum()
    assert aligned_agreement(profile, experts, ranks) == pytest.approx(everything / (shares**2).sum())


def test_hot_clusters_do_not_attract_each_other() -> None:
    """Expert 0 is the hotter one in both layers. Requests that prefer it in one layer do not prefer it in the
    other."""
    leans = [([0, 0, 0, 1], [0, 0, 1, 1]), ([0, 0, 1, 1], [0, 0, 0, 1])] * 4
    experts = np.concatenate([np.array(lean).T for lean in leans])[:, :, None]
    profile = profile_of(experts, [4 * i for i in range(9)], np.zeros(32, dtype=np.int64), 1, 2)
    assert align(profile, np.array([[0, 1], [0, 1]]), 2).tolist() == [[0, 1], [1, 0]]


def test_nothing_to_align() -> None:
    profile = noise(0, size=4, layers=1, k=1)
    assert align(profile, np.array([[1, 0, 0, 1]]), 2).tolist() == [[1, 0, 0, 1]]
    assert align(profile, np.zeros((1, 4), dtype=np.int64), 1).tolist() == [[0, 0, 0, 0]]
    empty = Profile.from_routes("m", 20, 4, (), profile.routes.select([]))
    assert align(replace(empty, counts=()), np.zeros((0, 4), dtype=np.int64), 2).shape == (0, 4)
