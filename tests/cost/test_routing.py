"""The number of distinct experts of rows that choose alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Profile, Routes
from moesaic.cost import ops
from moesaic.cost.ranks import model_of_rank
from moesaic.cost.routing import LAST, REQUESTS, Routing, _left
from moesaic.cost.sizes import GroupedQuery, ModelSizes

MODEL = ModelSizes("tiny", 2, 16, 100, GroupedQuery(2, 2, 8), 2, 8, 2, 10)


def test_worked_example() -> None:
    assert _left(np.array([0.5, 0.0])).tolist() == [1.0, 0.25, 0.0]


def test_misses_are_means_over_all_sets_of_requests() -> None:
    missed = np.random.default_rng(0).random((5, 3))
    for count, found in enumerate(_left(missed)):
        sets = [missed[list(chosen)].prod(axis=0) for chosen in combinations(range(5), count)]
        assert found == pytest.approx(np.mean(sets, axis=0))


def even(requests: int, experts: int, layers: int = 2) -> list[np.ndarray]:
    """A routing in which each row chooses two experts for itself."""
    rng = np.random.default_rng(1)
    ids = rng.permuted(np.tile(np.arange(experts), (requests * 6 * layers, 1)), axis=1)[:, :2]
    return list(ids.reshape(requests, 6, layers, 2))


@pytest.mark.parametrize("rows", [1, 2, 7, 30, 60, 200])
def test_even_routing_is_what_is_expected_of_it(rows: int) -> None:
    found = Routing.seen(even(60, 16), 16)
    assert 16 * found.share(rows) == pytest.approx(ops.touched(16, 2, rows), rel=0.04)


def test_rows_of_one_request_are_no_others() -> None:
    """Each of four requests has an expert of its own, which all of its rows choose."""
    found = Routing.seen([np.full((50, 1, 1), request) for request in range(4)], 8)
    assert [8 * found.share(rows) for rows in (1, 2, 3, 4, 100)] == pytest.approx([1, 2, 3, 4, 4])
    assert found.share(0.5) == pytest.approx(1 / 16)


def test_a_model_with_routing_reads_fewer_experts() -> None:
    """All rows choose the same two experts."""
    same = Routing.seen([np.tile([3, 5], (4, 2, 1)) for _ in range(6)], 8)
    model = replace(MODEL, routing=same)
    assert ops.distinct(model, 1) == ops.distinct(MODEL, 1) == ops.distinct(model, 500) == 2
    assert ops.routed(model, 9).weights == 2 * model.expert * model.number < ops.routed(MODEL, 9).weights
    assert ops.routed(model, 9).flops == ops.routed(MODEL, 9).flops
    assert ops.rows_each(model, 9) == 9 and ops.rows_each(MODEL, 1) == 1
    rank = model_of_rank(model, 2, 4)
    assert ops.distinct(rank, 9) == 1, "a rank has half of the experts"


def profile(lengths: list[int], seed: int = 0) -> Profile:
    """A profile in which the last tokens choose experts 0 and 1, and all tokens before them 2 and 3."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    experts = np.full((starts[-1], 2, 2), [2, 3], np.int16)
    for begin, end in pairwise(starts):
        experts[max(begin, end - LAST) : end] = [0, 1]
    count = len(lengths)
    none = np.full(count, -1, np.int16)
    tokens = np.zeros(starts[-1], np.int32)
    routes = Routes(tokens, starts, np.array(lengths, np.int64), none, experts)
    return Profile.from_routes("tiny", 100, 8, (0, 1), routes)


def test_a_profile_tells_by_its_requests_last_tokens() -> None:
    found = Routing.of(profile([LAST, 3 * LAST, 0, LAST + 1, 2]), 8, 2)
    assert found.shares == (0.25,) * len(found.shares) and found.rows[:4] == (1, 2, 3, 4)
    many = Routing.of(profile([2] * (3 * REQUESTS)), 8, 2)
    assert many.rows[REQUESTS - 1 : REQUESTS + 1] == (REQUESTS, 2 * REQUESTS)


@pytest.mark.parametrize(("experts", "top_k", "lengths"), [(9, 2, [3]), (8, 3, [3]), (8, 2, [])])
def test_what_is_no_profile_of_the_model_is_refused(experts: int, top_k: int, lengths: list[int]) -> None:
    with pytest.raises(
        ConfigError, match=f"^profile: got .*; allowed: routes of requests with {experts} exp"
    ):
        Routing.of(profile(lengths), experts, top_k)
