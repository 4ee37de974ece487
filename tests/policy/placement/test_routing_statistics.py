from __future__ import annotations

from collections import Counter, defaultdict
from itertools import permutations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.core.errors import ConfigError
from moesaic.core.profile import NO_TOPIC, Counts, Profile, Routes
from moesaic.policy.placement.request_map import map_requests
from moesaic.policy.placement.routing_prediction import examine, look_back, static_top
from moesaic.policy.placement.routing_statistics import (
    DISTANCES,
    Quartiles,
    co_activation,
    describe,
    hits,
    hotness,
    hottest,
    kurtosis,
    map_together,
    repeated,
    sample,
    together,
)

V, E, K = 7, 6, 2


def routes_of(
    lengths: list[int], experts: npt.ArrayLike, tokens: list[int], topics: list[int] | None = None
) -> Routes:
    """Routes of requests. experts: [t, layers, k]."""
    return Routes(
        np.array(tokens, dtype=np.int32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.array(lengths, dtype=np.int32),
        np.array([NO_TOPIC] * len(lengths) if topics is None else topics, dtype=np.int16),
        np.array(experts, dtype=np.int16),
    )


def at_random(seed: int, requests: int = 6, layers: int = 3) -> Profile:
    """Strategy for requests of 1 to 9 tokens. Half of the token ids have preferred experts."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 10, requests)
    tokens = rng.integers(0, V - 1, lengths.sum())
    liking = rng.random((V, layers, E)) * (np.arange(V) % 2)[:, None, None] * 2
    chosen = np.argsort(-(rng.random((len(tokens), layers, E)) + liking[tokens]), axis=2)[:, :, :K]
    topics = rng.integers(-1, 2, requests).tolist()
    routes = routes_of(lengths.tolist(), chosen, tokens.tolist(), topics)
    return Profile.from_routes("toy", V, E, range(1, layers + 1), routes, ("code", "prose"))


def counted(profile: Profile, layer: int) -> dict[int, Counter[int]]:
    """How often each token id chose each expert, by a plain loop: token id -> expert -> count."""
    found: dict[int, Counter[int]] = defaultdict(Counter)
    for token, experts in zip(profile.routes.tokens, profile.routes.experts[:, layer], strict=True):
        found[int(token)].update(experts.tolist())
    return found


def top(counts: Counter[int], k: int) -> list[int]:
    return sorted(counts, key=lambda expert: (-counts[expert], expert))[:k]


# ---- single tokens


def test_concentration_worked_example() -> None:
    """Token 3 chose experts 2, 0 and 5 five, three and two times. Token 4 chose only expert 1."""
    experts = np.array([[2]] * 5 + [[0]] * 3 + [[5]] * 2 + [[1]] * 4)
    counts = Counts.from_pairs(np.array([3] * 10 + [4] * 4), experts, V, E)
    assert hottest(counts, 2)[[3, 4, 5]].tolist() == [[2, 0], [1, -1], [-1, -1]]
    first, rest = hotness(counts, 2)
    assert first.tolist() == [0.8, 1.0] and rest.tolist() == [0.2, 0.0]
    assert hits(hottest(counts, 2)[[3, 3]], np.array([[0, 5], [1, 4]], dtype=np.int16)).tolist() == [0.5, 0.0]


def test_kurtosis_worked_examples() -> None:
    """6 of 64 experts, each chosen once, give the value of the docstring. Equal loads of all experts have no
    spread."""
    counts = Counts.from_pairs(np.array([0, 1, 1]), np.array([range(6), range(6), range(6)]), 2, 64)
    p = 6 / 64
    assert kurtosis(counts, 64).tolist() == pytest.approx([(1 - 3 * p * (1 - p)) / (p * (1 - p))] * 2)
    even = Counts.from_pairs(np.array([0, 0, 0]), np.array([range(6)] * 3), 1, 6)
    assert kurtosis(even, 6).tolist() == [0.0]


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_tokens_by_counting(seed: int, k: int) -> None:
    profile = at_random(seed)
    counts, slow = profile.counts[1], counted(profile, 1)
    fast = hottest(counts, k)
    first, rest = hotness(counts, k)
    tails = kurtosis(counts, E)
    assert counts.known_tokens.tolist() == sorted(slow)
    for place, token in enumerate(sorted(slow)):
        best = top(slow[token], k)
        assert fast[token].tolist() == best + [-1] * (k - len(best))
        total = slow[token].total()
        ranked = [slow[token][expert] for expert in top(slow[token], E)]
        assert first[place] == pytest.approx(sum(ranked[:k]) / total)
        assert rest[place] == pytest.approx((ranked[k : k + 1] or [0])[0] / total)
        dense = np.array([slow[token][expert] for expert in range(E)], dtype=np.float64)
        away = dense - dense.mean()
        expected = (away**4).mean() / (away**2).mean() ** 2 if away.any() else 0.0
        assert tails[place] == pytest.approx(expected)


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_layers_by_counting(seed: int) -> None:
    profile = at_random(seed)
    statistics = describe(profile, profile.routes)
    for index, found in enumerate(statistics.layers):
        slow = counted(profile, index)
        rows = profile.routes.experts[:, index].tolist()
        tokens = profile.routes.tokens.tolist()
        shares = [
            len(set(row) & set(top(slow[token], K))) / K for token, row in zip(tokens, rows, strict=True)
        ]
        assert found.f1 == Quartiles(*(float(np.quantile(shares, q)) for q in (0.25, 0.5, 0.75)))
        loads = Counter(expert for row in rows for expert in row)
        assert found.loads[0] == pytest.approx(max(loads.values()) / (len(rows) * K / E))
        assert list(found.loads) == sorted(found.loads, reverse=True) and len(found.loads) == E
        assert found.layer == index + 1
        longest = int(np.diff(profile.routes.starts).max())
        assert len(found.repeated) == sum(distance < longest for distance in DISTANCES)
        for distance, share in zip(DISTANCES, found.repeated, strict=False):
            owners = profile.routes.owners.tolist()
            pairs = [
                (row, row - distance)
                for row in range(distance, len(rows))
                if owners[row] == owners[row - distance]
            ]
            expected = [len(set(rows[one]) & set(rows[other])) / K for one, other in pairs]
            assert share == pytest.approx(np.mean(expected) if expected else 0.0)
        both = [len(set(one) & set(other)) / K for one in rows for other in rows]
        assert found.repeated_by_chance == pytest.approx(np.mean(both))


# ---- what goes together


def test_co_activation_worked_example() -> None:
    pairs = together(np.array([[0, 1], [1, 0], [3, 2], [2, 3]], dtype=np.int16), 4)
    assert pairs.tolist() == [[0, 2, 0, 0], [2, 0, 0, 0], [0, 0, 0, 2], [0, 0, 2, 0]]
    found, chance = co_activation(pairs, np.array([2, 2, 2, 2]), 2)
    assert found == 1.0 and chance == pytest.approx(1 / 3)
    assert co_activation(pairs, np.array([2, 2, 2, 2]), 1) == (0.0, 0.0)
    assert co_activation(np.zeros((4, 4), dtype=np.int64), np.zeros(4, dtype=np.int64), 2) == (0.0, 0.0)


@given(st.integers(0, 10**6))
def test_together_by_counting(seed: int) -> None:
    experts = at_random(seed).routes.experts[:, 0]
    slow = Counter(pair for row in experts.tolist() for pair in permutations(row, 2))
    fast = together(experts, E)
    assert all(fast[i, j] == slow[i, j] for i in range(E) for j in range(E))
    tokens = Counter(experts.ravel().tolist())
    shown = map_together(at_random(seed).routes, 0, E)
    assert all(shown[i][j] == slow[i, j] / max(tokens[i], 1) for i in range(E) for j in range(E))


def test_temporal_locality_stays_within_a_request() -> None:
    """Requests have 3 and 2 tokens. The pairs are (0, 1), (1, 2) and (3, 4), but not (2, 3)."""
    routes = routes_of([3, 2], [[[0, 1]], [[1, 0]], [[2, 0]], [[2, 0]], [[3, 4]]], [0] * 5)
    assert repeated(routes, 0, 1) == pytest.approx((1 + 0.5 + 0) / 3)
    assert repeated(routes, 0, 2) == 0.5
    assert repeated(routes, 0, 8) == 0.0


# ---- requests


def test_topics_lie_apart() -> None:
    """Requests of topic 0 use experts 0 and 1, and those of topic 1 use experts 4 and 5. One request has no
    topic."""
    rows = [[[0, 1]], [[1, 0]], [[4, 5]], [[5, 4]], [[4, 5]], [[2, 3]]]
    found = map_requests(routes_of([1] * 6, rows, [0] * 6, [0, 0, 1, 1, 1, NO_TOPIC]), E)
    assert found is not None and found.topics == (0, 0, 1, 1, 1, NO_TOPIC)
    assert found.points[0] == pytest.approx(found.points[1], abs=1e-9)
    assert found.points[2] == pytest.approx(found.points[4], abs=1e-9)
    assert np.hypot(*np.subtract(found.points[0], found.points[2])) == pytest.approx(1.0, abs=1e-2)
    assert found.neighbours == 1.0
    assert found.neighbours_by_chance == pytest.approx((2 / 5) * (1 / 4) + (3 / 5) * (2 / 4))


def test_nobody_is_its_own_neighbour() -> None:
    found = map_requests(routes_of([1] * 2, [[[0, 1]], [[0, 1]]], [0] * 2, [0, 1]), E)
    assert found is not None and (found.neighbours, found.neighbours_by_chance) == (0.0, 0.0)


def test_the_map_keeps_distances() -> None:
    """Two dimensions keep the requests' own shape."""
    rows = [[[0, 1]], [[2, 3]], [[0, 3]]]
    found = map_requests(routes_of([1] * 3, rows, [0] * 3), E)
    assert found is not None and found.neighbours is None
    one, other, between = (np.array(point) for point in found.points)
    assert np.linalg.norm(one - other) == pytest.approx(1.0)  # four shares of 1/2 differ
    assert np.linalg.norm(one - between) == pytest.approx(np.sqrt(0.5))


def test_many_requests_are_thinned_out_and_empty_ones_left_out() -> None:
    routes = routes_of([1, 0] * 40, [[[i % E, (i + 1) % E]] for i in range(40)], [0] * 40, [0, 1] * 40)
    found = map_requests(routes, E, most=10)
    assert found is not None and len(found.points) == 10 and set(found.topics) == {0}
    assert map_requests(routes_of([0, 0], np.zeros((0, 1, 2)), []), E) is None
    alone = map_requests(routes_of([1], [[[0, 1]]], [0], [0]), E)
    assert alone is not None and alone.points == ((0.0, 0.0),) and alone.neighbours is None


def test_sample_takes_whole_requests() -> None:
    routes = at_random(3, requests=20).routes
    some = sample(routes, 30, seed=1)
    assert 0 < some.requests < 20 and len(some.tokens) <= 30
    assert sample(routes, 30, seed=1).tokens.tolist() == some.tokens.tolist()
    assert sample(routes, 10**6, seed=1).tokens.tolist() == routes.tokens.tolist()
    assert sample(routes, len(routes.tokens), seed=1).requests == 20
    assert sample(routes, len(routes.tokens) - 1, seed=1).requests < 20
    assert sample(routes, 0, seed=1).requests == 1


# ---- held out


def test_static_top_worked_example() -> None:
    counts = Counts.from_pairs(np.array([7, 2]), np.array([[0, 1], [4, 5]]), 9, E)
    found = static_top(
        counts, np.array([7, 7], dtype=np.int32), np.array([[0, 2], [3, 0]], dtype=np.int16), E
    )
    assert (found.precision, found.f1, found.hits) == pytest.approx((0.5, 0.4, 0.5))


def test_a_token_id_that_was_not_learned_is_a_miss() -> None:
    counts = Counts.from_pairs(np.array([7]), np.array([[0, 1]]), 9, E)
    later = np.array([[0, 1], [0, 1]], dtype=np.int16)
    found = static_top(counts, np.array([7, 8], dtype=np.int32), later, E)
    assert (found.precision, found.f1, found.hits) == (1.0, 1.0, 0.5)


def test_looking_back_worked_example() -> None:
    """Layer 2 repeats layer 0's expert. Layer 1 says nothing about it. A path that was never seen is cut."""
    learned = np.array([[[0], [2], [0]], [[0], [3], [0]], [[1], [2], [1]], [[0], [2], [0]]], dtype=np.int16)
    asked = np.array([[[0], [2], [0]], [[1], [2], [1]], [[1], [3], [1]]], dtype=np.int16)
    assert look_back(learned, asked, 2, E) == pytest.approx((1 / 3, 1 / 3, 2 / 3))
    assert look_back(learned, asked, 0, E) == pytest.approx((1 / 3,))


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 6))
def test_looking_back_by_counting(seed: int, layer: int) -> None:
    experts = at_random(seed, requests=8, layers=7).routes.experts
    learned, asked = experts[::2], experts[1::2]
    expected = []
    for back in range(min(5, layer) + 1):
        right = []
        for row in asked.tolist():
            for cut in range(back, -1, -1):
                past = [row[layer - step][0] for step in range(1, cut + 1)]
                after = Counter(
                    expert
                    for other in learned.tolist()
                    if [other[layer - step][0] for step in range(1, cut + 1)] == past
                    for expert in other[layer]
                )
                if after:
                    break
            right.append(len(set(top(after, K)) & set(row[layer])) / K)
        expected.append(float(np.mean(right)) if right else 0.0)
    assert look_back(learned, asked, layer, E) == pytest.approx(expected)


def test_what_can_be_predicted_is_predicted() -> None:
    """Four experts on two ranks and four token ids. Layers 0 and 3 follow the token, and layer 1 follows
    nothing. Layers 2 and 4 are on rank 0 if both layers before were on the same rank."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, 800)
    first, second, fourth = tokens, rng.integers(0, 4, 800), 2 * (tokens % 2)
    third = 2 * ((first >= 2) != (second >= 2)) + rng.integers(0, 2, 800)
    fifth = 2 * ((third >= 2) != (fourth >= 2))
    experts = np.stack([first, second, third, fourth, fifth], axis=1)[:, :, None]
    routes = routes_of([20] * 40, experts, tokens.tolist())
    found = examine(Profile.from_routes("toy", 4, 4, range(5), routes), routes, 0.2, ranks=2, seed=0)
    assert found is not None and (found.learned_requests, found.asked_requests) == (8, 32)
    ranks = [layer.ranks for layer in found.layers]
    for index in (0, 3):
        assert ranks[index].token == ranks[index].both == ranks[index].most == 1.0
        assert ranks[index].guess < 0.6
    assert ranks[0].two_gram == 1.0 and ranks[3].two_gram < 0.65
    for index in (2, 4):
        assert ranks[index].two_gram == ranks[index].both == 1.0 and ranks[index].token < 0.65
    assert found.layers[0].static.hits == 1.0
    assert [len(layer.look_back) for layer in found.layers] == [1, 2, 3, 4, 5]


def test_uniform_routing_cannot_be_predicted() -> None:
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((4000, 3, 8)), axis=2)[:, :, :2]
    routes = routes_of([100] * 40, experts, rng.integers(0, 5, 4000).tolist())
    found = examine(Profile.from_routes("toy", 5, 8, range(3), routes), routes, 0.2, ranks=4, seed=0)
    assert found is not None
    for layer in found.layers:
        shares = (layer.ranks.guess, layer.ranks.token, layer.ranks.two_gram, layer.ranks.both)
        assert shares == pytest.approx([0.25] * 4, abs=0.02)
        assert layer.look_back == pytest.approx([0.25] * len(layer.look_back), abs=0.03)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, E), st.integers(2, 6))
def test_no_prediction_beats_the_best_rank(seed: int, ranks: int, requests: int) -> None:
    profile = at_random(seed, requests)
    found = examine(profile, profile.routes, 0.5, ranks, seed)
    assert found is not None and found.learned_requests + found.asked_requests == requests
    for layer in found.layers:
        assert all(share <= layer.ranks.most + 1e-9 for share in vars(layer.ranks).values())
        assert ranks > 1 or layer.ranks.guess == 1.0


def test_too_few_requests_and_too_many_ranks() -> None:
    profile = at_random(0, requests=1)
    assert examine(profile, profile.routes, 0.2, 2, 0) is None
    with pytest.raises(ConfigError, match=f"--ranks: got {E + 1}"):
        profile = at_random(0)
        examine(profile, profile.routes, 0.2, E + 1, 0)


def test_a_profile_without_routes() -> None:
    profile = at_random(0)
    none = routes_of([], np.zeros((0, 3, K)), [])
    statistics = describe(profile, sample(none, 100, 0))
    assert statistics.requests == 0 and statistics.requests_map is None
    assert statistics.tokens == profile.tokens and statistics.layers[0].repeated == ()
    assert statistics.layers[0].f1 == Quartiles(0, 0, 0) and statistics.layers[0].top_hotness.p50 > 0
    assert examine(profile, none, 0.2, 2, 0) is None
