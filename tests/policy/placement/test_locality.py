from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.coclusters import Coclusters
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile, Routes
from moesaic.policy.placement.locality import (
    balancedness,
    homes_in,
    homes_of,
    hosts,
    local_activation_rate,
    max_over_median,
    measure,
    rank_loads,
    remote_ranks,
    request_level,
    request_ranks,
    request_scores,
    token_level,
    token_ranks,
    token_scores,
)
from moesaic.policy.placement.solvers.tokens import labelled

HOMES = np.array([[0, 0, 1, 2]], dtype=np.int16)[:, :, None]
"""One layer of four experts on three ranks."""


def small(*rows: object) -> np.ndarray:
    return np.array(rows, dtype=np.int16)


def routes_of(tokens: list[int], lengths: list[int], prompts: list[int], experts: np.ndarray) -> Routes:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    topics = np.full(len(lengths), -1, dtype=np.int16)
    return Routes(np.array(tokens, dtype=np.int32), starts, np.array(prompts), topics, experts)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Strategy for (experts [t, layers, k], homes [layers, E, copies], own [t, layers], ranks)."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    size, ranks, layers = draw(st.integers(2, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    tokens, k = draw(st.integers(1, 9)), draw(st.integers(1, 2))
    experts = rng.random((tokens, layers, size)).argsort(axis=2)[:, :, :k].astype(np.int16)
    copies = draw(st.integers(1, ranks))
    homes = rng.random((layers, size, ranks)).argsort(axis=2)[:, :, :copies].astype(np.int16)
    behind = rng.integers(1, copies + 1, size=(layers, size, 1))
    homes[np.arange(copies) >= behind] = -1
    return experts, homes, rng.integers(ranks, size=(tokens, layers)).astype(np.int16), ranks


# ---- where


def test_a_pair_stays_where_it_can_and_copies_take_turns() -> None:
    homes = small([[0, -1], [1, 2]])
    experts = small([[0, 1]], [[0, 1]], [[0, 1]], [[0, 1]])
    own = small([0], [0], [1], [2])
    assert hosts(experts, homes, own)[:, 0].tolist() == [[0, 1], [0, 2], [0, 1], [0, 2]]


def test_homes_of_a_placement_with_copies() -> None:
    placement = Placement(0, 3, {2: {0: [0, 1], 1: [2]}, 5: {0: [0, 1, 2], 1: [2]}})
    assert homes_in(placement, (2, 5)).tolist() == [[[0, -1], [0, -1], [1, -1]], [[0, -1], [0, -1], [0, 1]]]


@given(cases())
def test_hosts_hold_their_experts(case: tuple[np.ndarray, np.ndarray, np.ndarray, int]) -> None:
    experts, homes, own, _ = case
    found = hosts(experts, homes, own)
    for token, layer, place in np.ndindex(*experts.shape):
        held = [rank for rank in homes[layer, experts[token, layer, place]].tolist() if rank >= 0]
        mine = own[token, layer]
        assert found[token, layer, place] == (mine if mine in held else held[token % len(held)])


# ---- measures


def test_rate_worked_example() -> None:
    assert local_activation_rate(small([[1, 1, 0, 0]]), small([1])).tolist() == [0.5]
    assert local_activation_rate(small([[1, 1], [0, 0]]), small([1, 1])).tolist() == [1.0, 0.0]


def test_no_tokens_have_no_rate() -> None:
    with pytest.raises(ConfigError, match="^requests to measure on: got 0; allowed: 1 or more"):
        measure(np.zeros((0, 1, 2), np.int16), HOMES, np.zeros((0, 1), np.int16), 3)


def test_remote_ranks_worked_example() -> None:
    assert remote_ranks(small([[1, 0, 0, 2]]), small([1])).tolist() == [2.0]
    assert remote_ranks(small([[1, 1]], [[0, 0]]), small([1], [1])).tolist() == [0.5]


def test_balance_worked_examples() -> None:
    assert balancedness(np.array([[3, 1], [2, 2], [0, 0]])) == pytest.approx([2 / 3, 1, 1])
    assert max_over_median(np.array([[6, 2, 1], [2, 2, 2], [0, 0, 0]])).tolist() == [3, 1, 1]
    assert max_over_median(np.array([[5, 0, 0]])).tolist() == [np.inf]


def test_a_whole_example() -> None:
    """The ranks hold experts 0 1 | 2 | 3. Token 0 on rank 0 chooses 0 1 2, and token 1 on rank 2 chooses 0 1
    3."""
    found = measure(small([[0, 1, 2]], [[0, 1, 3]]), HOMES, small([0], [2]), 3)
    assert found.rate == pytest.approx(3 / 6)
    assert found.loads.tolist() == [[4, 1, 1]] and found.tokens.tolist() == [[1, 0, 1]]
    assert found.balancedness == pytest.approx(2 / 4) and found.max_over_median == 4
    assert found.distinct.tolist() == [1.0]
    assert found.remote_bytes(8, 4) == pytest.approx((1.5 + 1.5) * 32)
    assert found.remote_bytes(8, 4, deduplicate=True) == pytest.approx((1.0 + 1.5) * 32)
    assert found.remote_bytes(8, 4, deduplicate=True, partial=True) == pytest.approx((1.0 + 1.0) * 32)


@given(cases())
def test_measures_are_counts(case: tuple[np.ndarray, np.ndarray, np.ndarray, int]) -> None:
    experts, homes, own, ranks = case
    found = measure(experts, homes, own, ranks)
    where = hosts(experts, homes, own)
    tokens, layers, k = experts.shape
    pairs, reached = 0, 0
    for layer in range(layers):
        local, load = 0, [0] * ranks
        for token in range(tokens):
            ranks_of = where[token, layer].tolist()
            local += ranks_of.count(own[token, layer])
            reached += len(set(ranks_of) - {int(own[token, layer])})
            pairs += k - ranks_of.count(own[token, layer])
            for rank in ranks_of:
                load[rank] += 1
        assert found.activation[layer] == pytest.approx(local / (tokens * k))
        assert found.loads[layer].tolist() == load
    assert found.remote_bytes(16, 2) == pytest.approx(2 * pairs / tokens * 32)
    assert found.remote_bytes(16, 2, deduplicate=True) == pytest.approx((pairs + reached) / tokens * 32)
    assert found.remote_bytes(16, 2, True, True) == pytest.approx(2 * reached / tokens * 32)


@given(cases())
def test_the_name_of_a_rank_does_not_matter(case: tuple[np.ndarray, np.ndarray, np.ndarray, int]) -> None:
    experts, homes, own, ranks = case
    names = np.append(np.roll(np.arange(ranks), 1), -1).astype(np.int16)
    one, other = measure(experts, homes, own, ranks), measure(experts, names[homes], names[own], ranks)
    assert one.rate == other.rate and one.remote_bytes(1, 1, True) == other.remote_bytes(1, 1, True)
    assert np.roll(one.loads, 1, axis=1).sum() == other.loads.sum()
    assert one.balancedness == pytest.approx(other.balancedness) or homes.shape[2] > 1


@given(cases())
def test_one_rank_has_everything(case: tuple[np.ndarray, np.ndarray, np.ndarray, int]) -> None:
    experts, homes, own, _ = case
    found = measure(experts, np.zeros_like(homes), np.zeros_like(own), 1)
    assert found.rate == 1.0 and found.remote_bytes(8, 4) == 0 and found.balancedness == 1.0


def test_loads_of_all_ranks() -> None:
    assert rank_loads(small([[0, 2]], [[0, 0]]), 4).tolist() == [[3, 0, 1, 0]]


# ---- token level


def clusters_of(tokens: np.ndarray, confidence: list[list[float]]) -> Coclusters:
    return Coclusters(3, HOMES[:, :, 0], tokens, np.array(confidence, dtype=np.float32))


def test_unseen_tokens_are_looked_up_as_their_nearest() -> None:
    """Ids 0 and 1 are known. Id 2 is near 1. Id 3 is near 2, which is unknown too."""
    found = clusters_of(small([0, 1, 2, 0]), [[0.5, 1.0, 0, 0]])
    nearest, tokens = np.array([0, 1, 1, 2], dtype=np.int32), np.array([0, 1, 2, 3, 1], dtype=np.int32)
    assert token_ranks(found, tokens)[:, 0].tolist() == [0, 1, 2, 0, 1]
    assert token_ranks(found, tokens, nearest)[:, 0].tolist() == [0, 1, 1, 0, 1]


def test_token_level() -> None:
    """Two layers. Id 0 chooses experts 0 1 in both. Its labels are ranks 0 and 1."""
    placed = small([0, 0, 1, 1], [1, 1, 0, 0])
    found = Coclusters(2, placed, small([0, 1], [1, 1]), np.ones((2, 2), dtype=np.float32))
    routes = routes_of([0, 1], [2], [2], small([[0, 1], [0, 1]], [[0, 2], [1, 0]]))
    measured = token_level(found, routes)
    assert measured.activation.tolist() == [0.75, 1.0]
    assert measured.loads.tolist() == [[3, 1], [0, 4]]


# ---- request level


def request_profile(nearest: list[int] | None = None) -> Profile:
    """Two layers of experts 0 1 2. Id 0 was seen twice. It chose experts 0 and 1 in layer 0 and always 2 in
    layer 1."""
    routes = routes_of([0, 0, 1], [3], [3], small([[0], [2]], [[1], [2]], [[1], [0]]))
    found = None if nearest is None else np.array(nearest, dtype=np.int32)
    return Profile.from_routes("m", 4, 3, (0, 1), routes, nearest=found)


def test_scores_sum_the_shares_over_layers() -> None:
    homes = homes_of(labelled(request_profile(), small([0, 1, 1], [0, 1, 1])))
    assert token_scores(request_profile(), homes, 2).tolist() == [[0.5, 1.5], [1, 1], [0, 0], [0, 0]]
    assert token_scores(request_profile([0, 1, 1, 2]), homes, 2).tolist()[2:] == [[1, 1], [0, 0]]


def test_copies_count_on_each_of_their_ranks() -> None:
    homes = small([[0, 1], [1, -1], [1, -1]], [[0, -1], [1, -1], [1, 0]])
    assert token_scores(request_profile(), homes, 2)[:2].tolist() == [[1.5, 2], [1, 1]]


def test_a_request_is_scored_by_its_prompt() -> None:
    routes = routes_of([0, 1, 1, 2, 0, 0], [3, 1, 2], [2, 0, 2], np.zeros((6, 1, 1), dtype=np.int16))
    scores = np.array([[1.0, 0], [0, 2], [5, 5]])
    assert request_scores(scores, routes).tolist() == [[1, 2], [0, 0], [2, 0]]


def test_requests_take_turns() -> None:
    scores = np.array([[9.0, 1], [8, 2], [7, 3], [1, 5]])
    lengths = np.array([1, 1, 1, 1])
    assert request_ranks(scores, lengths, "rounds").tolist() == [0, 1, 0, 1]
    assert request_ranks(scores, lengths, "best").tolist() == [0, 0, 0, 1]
    assert request_ranks(scores, lengths, "affinity").tolist() == [0, 0, 1, 1]


def test_ties_go_to_the_rank_with_fewer_tokens() -> None:
    scores = np.zeros((5, 2))
    assert request_ranks(scores, np.array([9, 2, 2, 2, 1]), "best").tolist() == [0, 1, 1, 1, 1]
    assert request_ranks(scores, np.array([9, 2, 2, 2, 1]), "rounds").tolist() == [0, 1, 1, 0, 1]


@given(st.integers(1, 5), st.integers(0, 23), st.integers(0, 1000))
def test_each_round_serves_every_rank_once(ranks: int, requests: int, seed: int) -> None:
    scores = np.random.default_rng(seed).random((requests, ranks))
    found = request_ranks(scores, np.ones(requests, dtype=np.int64), "rounds").tolist()
    for start in range(0, requests - ranks + 1, ranks):
        assert sorted(found[start : start + ranks]) == list(range(ranks))
        assert found[start] == scores[start].argmax()


def test_request_level() -> None:
    """Two ranks and two ids, one for each rank. Answers count in the rate, but do not decide which rank gets
    a request."""
    experts = small([[0]], [[1]], [[1]], [[1]], [[0]], [[0]])
    routes = routes_of([0, 1, 1, 1, 0, 0], [3, 3], [1, 2], experts)
    profile = Profile.from_routes("m", 2, 2, (0,), routes)
    homes = small([[0], [1]])
    found = request_level(profile, homes, 2, routes)
    assert found.tokens.tolist() == [[3, 3]]
    assert found.rate == pytest.approx((1 + 1) / 6)
