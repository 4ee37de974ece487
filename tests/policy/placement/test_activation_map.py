from __future__ import annotations

import numpy as np
import pytest

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import NO_TOPIC, Profile, Routes
from moesaic.policy.placement.activation_map import activation_map, commonest, dealt


def profile(tokens: list[int], experts: list[list[int]], vocab_size: int = 9) -> Profile:
    """A profile of one request and one layer of three experts."""
    routes = Routes(
        np.array(tokens, dtype=np.int32),
        np.array([0, len(tokens)]),
        np.array([len(tokens)]),
        np.full(1, NO_TOPIC, dtype=np.int16),
        np.array(experts, dtype=np.int16)[:, None],
    )
    return Profile.from_routes("moe", vocab_size, 3, (1,), routes)


def clusters(experts: list[int], tokens: dict[int, int], vocab_size: int = 9) -> Coclusters:
    labels = np.zeros((1, vocab_size), dtype=np.int16)
    labels[0, list(tokens)] = list(tokens.values())
    sure = np.ones((1, vocab_size), dtype=np.float32)
    return Coclusters(max(experts) + 1, np.array([experts], dtype=np.int16), labels, sure)


def test_the_worked_example() -> None:
    made = profile([5] * 4 + [6] * 4, [[2]] * 4 + [[0], [0], [2], [0]])
    found = activation_map(made, clusters([1, 1, 0], {5: 0, 6: 1}), 0, np.array([5, 6]))
    assert (found.tokens, found.experts) == ((5, 6), (2, 0, 1))
    assert found.shares == ((1.0, 0.0, 0.0), (0.25, 0.75, 0.0))
    assert (found.tokens_of, found.experts_of, found.local) == ((1, 1), (1, 2), 7 / 8)


def test_of_one_rank_the_surest_token_comes_first_and_of_equal_ones_the_lower() -> None:
    made = profile([4, 4, 7, 3, 5], [[0], [1], [0], [0], [1]])
    found = activation_map(made, clusters([0, 1, 1], {5: 1}), 0, np.array([3, 4, 5, 7]))
    assert found.tokens == (3, 7, 4, 5) and found.tokens_of == (3, 1)


def test_a_share_is_of_the_tokens_not_of_their_pairs() -> None:
    made = profile([1, 1], [[0, 1], [0, 2]])
    found = activation_map(made, clusters([0, 0, 1], {}), 0, np.array([1]))
    assert found.shares == ((1.0, 0.5, 0.5),) and found.local == pytest.approx(3 / 4)


def test_a_rank_without_tokens_is_there() -> None:
    made = profile([1], [[2]])
    assert activation_map(made, clusters([0, 1, 2], {1: 2}), 0, np.array([1])).tokens_of == (0, 0, 1)


def test_the_commonest_ids_are_known_ones_in_their_order() -> None:
    made = profile([8, 8, 2, 4, 4, 6], [[0]] * 6)
    assert commonest(made, 0, 3).tolist() == [2, 4, 8]
    assert commonest(made, 0, 100).tolist() == [2, 4, 6, 8]


def test_dealt_out_whatever_they_choose() -> None:
    before = clusters([0, 1, 1], {3: 1})
    found = dealt(before, np.array([5, 6, 7, 8]))
    assert found.tokens[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 1]
    assert before.tokens[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert (found.experts == before.experts).all()
