from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import NO_TOPIC, Profile, Routes
from moesaic.policy.placement.predict import build, device, predict, shares


def profile_of(
    tokens: list[int],
    experts: npt.ArrayLike,
    vocab_size: int,
    num_experts: int,
    nearest: list[int] | None = None,
) -> Profile:
    """A profile of one request. experts: [t, layers, k]."""
    chosen = np.array(experts, dtype=np.int16)
    routes = Routes(
        np.array(tokens, dtype=np.int32),
        np.array([0, len(tokens)]),
        np.array([len(tokens)], dtype=np.int32),
        np.array([NO_TOPIC], dtype=np.int16),
        chosen,
    )
    near = None if nearest is None else np.array(nearest, dtype=np.int32)
    return Profile.from_routes("toy", vocab_size, num_experts, range(chosen.shape[1]), routes, (), near)


def clusters_of(experts: npt.ArrayLike, tokens: npt.ArrayLike) -> Coclusters:
    labels = np.array(tokens, dtype=np.int16)
    owners = np.array(experts, dtype=np.int16)
    return Coclusters(int(owners.max()) + 1, owners, labels, np.zeros(labels.shape, dtype=np.float32))


ONE_LAYER = profile_of([0, 0, 0, 0], [[[0]], [[0]], [[0]], [[1]]], 3, 2)


def test_worked_example() -> None:
    tables = build(ONE_LAYER, clusters_of([[0, 1]], [[0, 1, 1]]))
    assert tables.labels.tolist() == [[0], [1], [1]]
    assert tables.confidence.tolist() == [[0.75], [0.25], [0.25]]
    assert tables.scores.tolist() == [[0.75, 0.25]] * 3
    assert (tables.model, tables.layers, tables.experts.tolist()) == ("toy", (0,), [[0, 1]])
    assert tables.after_confidence.tolist() == [[0.0] * 4]


def test_an_unseen_token_takes_the_place_of_the_nearest_known_one() -> None:
    known = profile_of([0, 1, 1], [[[0]], [[1]], [[1]]], 3, 2, nearest=[0, 1, 1])
    tables = build(known, clusters_of([[0, 1]], [[0, 1, 0]]))
    assert tables.labels[:, 0].tolist() == [0, 1, 1]
    assert tables.confidence[:, 0].tolist() == [1.0, 1.0, 1.0]
    assert tables.scores.tolist() == [[1, 0], [0, 1], [0, 1]]


def test_scores_are_summed_over_layers_and_choices() -> None:
    """Two layers and k = 2, so a token has four pairs."""
    known = profile_of([0, 0], [[[0, 1], [2, 3]], [[0, 2], [3, 2]]], 1, 4)
    tables = build(known, clusters_of([[0, 0, 1, 1], [0, 0, 1, 1]], [[0], [1]]))
    assert tables.scores.tolist() == [[1.5, 2.5]]
    assert tables.labels.tolist() == [[0, 1]] and tables.confidence.tolist() == [[0.75, 1.0]]


def test_a_profile_that_counts_nothing() -> None:
    empty = profile_of([], np.zeros((0, 3, 1)), 2, 2)
    tables = build(empty, clusters_of([[0, 1]] * 3, [[0, 1]] * 3))
    assert (tables.confidence == 0.5).all() and (tables.scores == 1.5).all()
    assert (tables.after_confidence == 0).all()


def test_device_worked_example() -> None:
    owners = np.array([0, 0, 1, 1])
    assert device(np.array([[3, 0, 1], [3, 0, 2]]), owners, 2).tolist() == [0, 1]
    assert device(np.array([[3, 0], [0, 3]]), owners, 2).tolist() == [1, 0]
    assert device(np.zeros((0, 2), dtype=np.int64), owners, 2).tolist() == []


@given(st.lists(st.permutations(range(6)), min_size=1, max_size=6), st.integers(1, 6), st.data())
def test_device_by_counting(rows: list[list[int]], k: int, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, 3), min_size=6, max_size=6))
    expected = []
    for row in rows:
        homes = [owners[expert] for expert in row[:k]]
        most = max(Counter(homes).values())
        expected.append(next(home for home in homes if homes.count(home) == most))
    assert device(np.array(rows)[:, :k], np.array(owners), 4).tolist() == expected


THREE_LAYERS = profile_of(
    [0, 1, 2, 3],
    [[[0], [1], [0]], [[0], [1], [0]], [[0], [1], [1]], [[1], [1], [1]]],
    5,
    2,
)
"""Experts 0 and 1 are on ranks 0 and 1 in all layers. After ranks 0, 1 come 0, 0, 1. After ranks 1, 1 comes
1.
"""


def test_table_a_worked_example() -> None:
    tables = build(THREE_LAYERS, clusters_of([[0, 1]] * 3, [[0] * 5] * 3))
    assert tables.after[2, [1, 3]].tolist() == [0, 1]
    assert tables.after_confidence[2, [1, 3]].tolist() == pytest.approx([2 / 3, 1], abs=1e-3)
    assert tables.after_confidence[2, [0, 2]].tolist() == [0.5, 0.5]  # a past never seen: the average
    assert (tables.after_confidence[:2] == 0).all()


def test_the_surer_table_is_believed() -> None:
    """Token 4 was never seen, and in layer 2 it is equally likely on rank 0 or 1. Token 3 was on rank 1 every
    time."""
    tables = build(THREE_LAYERS, clusters_of([[0, 1]] * 3, [[1] * 5] * 3))
    tokens = np.array([4, 4, 3, 3])
    history = np.array([[0, 1], [0, 0], [0, 1], [1, 1]])
    ranks, sure = predict(tables, 2, tokens, history)
    assert ranks.tolist() == [0, 1, 1, 1]  # A, then T as both are 1/2 sure, then T, then both
    assert sure.tolist() == pytest.approx([2 / 3, 0.5, 1, 1], abs=1e-3)
    ranks, sure = predict(tables, 2, tokens)
    assert ranks.tolist() == [1, 1, 1, 1] and sure.tolist() == [0.5, 0.5, 1, 1]
    assert ranks.dtype == np.int64 and sure.dtype == np.float32


def test_no_past_in_the_first_two_layers() -> None:
    tables = build(THREE_LAYERS, clusters_of([[0, 1]] * 3, [[0, 0, 1, 1, 0]] * 3))
    tokens = np.arange(5)
    for layer in (0, 1):
        alone = predict(tables, layer, tokens)
        both = predict(tables, layer, tokens, np.zeros((5, 2), dtype=np.int64))
        assert np.array_equal(alone, both)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3))
def test_tables_by_counting(seed: int, ranks: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    vocab_size, layers, size, t = 6, 4, 5, 12
    tokens = rng.integers(0, vocab_size - 1, t)
    experts = np.argsort(rng.random((t, layers, size)), axis=2)[:, :, :k]
    owners = np.sort(np.arange(size) % ranks)[rng.permuted(np.tile(np.arange(size), (layers, 1)), axis=1)]
    labels = rng.integers(0, ranks, (layers, vocab_size))
    known = profile_of(tokens.tolist(), experts, vocab_size, size)
    unsure = np.zeros((layers, vocab_size), dtype=np.float32)
    clusters = Coclusters(ranks, owners.astype(np.int16), labels.astype(np.int16), unsure)
    tables = build(known, clusters)
    homes = np.stack([owners[layer][experts[:, layer]] for layer in range(layers)], axis=1)
    devices = [[slow_device(homes[token, layer].tolist()) for layer in range(layers)] for token in range(t)]
    for layer in range(layers):
        average = slow_share(homes[:, layer], ranks)
        for token in range(vocab_size):
            mine = homes[tokens == token, layer]
            share = slow_share(mine, ranks) if mine.size else average
            found = shares(known.counts[layer], owners[layer], ranks)[token]
            assert found.tolist() == pytest.approx(share)
            assert tables.confidence[token, layer] == pytest.approx(share[labels[layer, token]], abs=1e-3)
        for i in range(ranks):
            for j in range(ranks):
                after = [row for row in range(t) if layer >= 2 and devices[row][layer - 2 : layer] == [i, j]]
                share = slow_share(homes[after, layer], ranks) if after else average
                sure = max(share) if layer >= 2 else 0.0
                assert tables.after_confidence[layer, i * ranks + j] == pytest.approx(sure, abs=1e-3)
                if layer >= 2:
                    assert share[tables.after[layer, i * ranks + j]] == pytest.approx(max(share))
    assert tables.scores.sum(axis=1).tolist() == pytest.approx([layers * k] * vocab_size, rel=1e-5)


def slow_device(homes: list[int]) -> int:
    return max(homes, key=lambda home: (homes.count(home), -homes.index(home)))


def slow_share(homes: npt.NDArray[np.int16], ranks: int) -> list[float]:
    return [float((homes == rank).mean()) for rank in range(ranks)]
