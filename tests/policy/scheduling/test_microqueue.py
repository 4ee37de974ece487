from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.core.errors import ConfigError
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.microqueue import (
    POLICIES,
    Defrag,
    DefragWithHistory,
    FirstLayerFirst,
    FloatArray,
    MostTokensFirst,
    Queue,
    QueuePolicy,
    defrag_plain,
    make_policy,
)


def column(*rows: int) -> IntArray:
    """One queue for each layer, [B, 1]."""
    return np.array(rows, dtype=np.int64)[:, None]


def grid(*layers: list[int]) -> IntArray:
    return np.array(layers, dtype=np.int64)


def chosen(policy: QueuePolicy, tokens: IntArray) -> Queue | None:
    return policy.choose(tokens, np.zeros(tokens.shape))


def test_worked_example() -> None:
    """The three policies give three different answers."""
    tokens = column(1, 6, 0, 5, 5)
    defrag = Defrag(lookahead=2, decay=0.5)
    assert defrag.scores(tokens)[[0, 1, 3, 4], 0].tolist() == [4, 7.25, 7.75, 7]
    assert chosen(defrag, tokens) == (3, 0)
    assert chosen(MostTokensFirst(), tokens) == (1, 0)
    assert chosen(FirstLayerFirst(), tokens) == (0, 0)


def test_defaults_are_those_of_the_public_code() -> None:
    assert Defrag() == Defrag(lookahead=7, decay=0.8, own_weight=1.0, urgency=None, cap=None)


def test_experts_of_a_layer_share_its_lookahead() -> None:
    """Own queues count fully, other layers by their mean: 2 + 0.5 * 9 / 3 is more than 3 + 0.5 * 3 / 3."""
    tokens = grid([1, 2, 0], [3, 3, 3])
    assert Defrag(lookahead=1, decay=0.5).scores(tokens).tolist() == [[2.5, 3.5, 1.5], [3.5, 3.5, 3.5]]
    assert chosen(Defrag(lookahead=1, decay=0.5), tokens) == (0, 1)


def test_the_last_layer_looks_ahead_to_the_first() -> None:
    assert chosen(Defrag(lookahead=1), column(4, 3, 0, 3)) == (0, 0)
    assert chosen(Defrag(lookahead=1), column(4, 0, 3, 3)) == (3, 0)


def test_each_weight_is_a_switch() -> None:
    tokens = column(0, 4, 0, 3, 9, 0, 10)
    assert chosen(Defrag(lookahead=0), tokens) == (6, 0)
    assert chosen(Defrag(lookahead=1), tokens) == (3, 0)
    assert chosen(Defrag(lookahead=3, decay=1.0), tokens) == (3, 0)
    assert chosen(Defrag(lookahead=3, decay=1.0, own_weight=0.0), column(0, 1, 0, 3, 9, 0, 20)) == (3, 0)
    assert chosen(Defrag(lookahead=1, own_weight=0.0), column(0, 5, 0, 4, 0)) == (1, 0)


def test_cap_keeps_a_long_chunk_from_winning() -> None:
    tokens = column(0, 2048, 0, 30, 30, 0)
    assert chosen(Defrag(), tokens) == (1, 0)
    assert Defrag(lookahead=1, decay=0.5, cap=32).scores(tokens)[:, 0].tolist() == [16, 32, 15, 45, 30, 0]
    assert chosen(Defrag(lookahead=1, decay=0.5, cap=32), tokens) == (3, 0)
    assert chosen(MostTokensFirst(cap=8), grid([0, 7, 8], [9, 0, 0])) == (0, 2)
    assert chosen(FirstLayerFirst(cap=8), grid([0, 8, 9], [9, 0, 0])) == (0, 1)


def test_first_layer_first_takes_its_fullest_expert() -> None:
    assert chosen(FirstLayerFirst(), grid([0, 0], [1, 2], [9, 9])) == (1, 1)


@pytest.mark.parametrize("name", POLICIES)
def test_the_queue_that_waited_too_long_goes_first(name: str) -> None:
    tokens = grid([9, 0, 0], [0, 9, 1], [0, 1, 1])
    waited = np.array([[0.0, 7.0, 0.0], [0.0, 0.1, 0.2], [0.0, 0.3, 0.3]])
    assert make_policy(name, urgency=0.1).choose(tokens, waited) == (2, 1)
    assert make_policy(name, urgency=0.3).choose(tokens, waited) == chosen(make_policy(name), tokens)
    assert make_policy(name).choose(tokens, waited) == chosen(make_policy(name), tokens)


def rounds_until_served(policy: QueuePolicy, limit: int) -> int | None:
    """10 rows arrive at layer 0 every 30 ms, and one row waits in layer 1. Returns the round that runs layer
    1."""
    for done in range(limit):
        queue = policy.choose(column(10, 1), np.array([[0.03], [0.03 * done]]))
        if queue == (1, 0):
            return done
    return None


@pytest.mark.parametrize("name", POLICIES)
def test_urgency_ends_starvation(name: str) -> None:
    assert rounds_until_served(make_policy(name), 100) is None
    assert rounds_until_served(make_policy(name, urgency=0.1), 100) == 4


def test_history_worked_example() -> None:
    settings = Defrag(lookahead=1, decay=0.5)
    tokens = column(4, 0, 5)
    assert chosen(DefragWithHistory(settings, 10), tokens) == (2, 0)
    policy = DefragWithHistory(settings, 10)
    assert chosen(policy, column(0, 8, 0)) == (1, 0)
    assert chosen(policy, tokens) == (0, 0)


def test_history_forgets_and_skips_idle_calls() -> None:
    policy = DefragWithHistory(Defrag(lookahead=1, decay=0.5), 1)
    tokens = column(4, 0, 5)
    chosen(policy, column(0, 100, 0))
    assert chosen(policy, column(0, 0, 0)) is None
    assert chosen(policy, tokens) == (0, 0)  # after [0, 100, 0]
    assert chosen(policy, tokens) == (2, 0)  # after [4, 0, 5]


QUEUES = st.integers(1, 6).flatmap(
    lambda experts: st.lists(
        st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 40, 2048]), min_size=experts, max_size=experts),
        min_size=1,
        max_size=9,
    )
)
SETTINGS = st.builds(
    Defrag,
    lookahead=st.integers(0, 20),
    decay=st.floats(0.01, 1),
    own_weight=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    cap=st.sampled_from([None, 1, 5, 64]),
)


@pytest.mark.slow
@settings(max_examples=300, derandomize=True)
@given(SETTINGS, QUEUES, st.data())
def test_defrag_is_algorithm_1(policy: Defrag, rows: list[list[int]], data: st.DataObject) -> None:
    tokens = np.array(rows, dtype=np.int64)
    assert chosen(policy, tokens) == defrag_plain(policy, tokens)
    added = data.draw(st.lists(st.floats(0, 50), min_size=len(rows), max_size=len(rows)))
    past = np.array(added)
    assert policy.choose(tokens, np.zeros(tokens.shape), past) == defrag_plain(policy, tokens, past)


@settings(max_examples=100, derandomize=True)
@given(
    SETTINGS, st.integers(1, 4), st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), max_size=12)
)
def test_history_is_the_mean_of_the_last_choices(
    policy: Defrag, history: int, calls: list[list[int]]
) -> None:
    remembering = DefragWithHistory(policy, history)
    seen: list[list[int]] = []
    for rows in calls:
        last = [policy.clip_rows(column(*earlier))[:, 0].tolist() for earlier in seen[-history:]]
        past = np.array([sum(layer) / len(last) for layer in zip(*last, strict=True)]) if last else None
        assert chosen(remembering, column(*rows)) == defrag_plain(policy, column(*rows), past)
        if any(rows):
            seen.append(rows)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=80, derandomize=True)
@given(rows=QUEUES, urgency=st.sampled_from([None, 0.0, 0.1]), age=st.sampled_from([0.0, 0.05, 3.0]))
def test_a_queue_with_rows_or_none(
    name: str, rows: list[list[int]], urgency: float | None, age: float
) -> None:
    tokens = np.array(rows, dtype=np.int64)
    waited: FloatArray = np.full(tokens.shape, age)
    queue = make_policy(name, urgency).choose(tokens, waited)
    if tokens.any():
        assert queue is not None and tokens[queue] > 0
        assert all(type(index) is int for index in queue)
    else:
        assert queue is None


def test_names_are_checked() -> None:
    assert make_policy("defrag", cap=3) == Defrag(cap=3)
    remembering = make_policy("defrag", 0.5, history=4)
    assert isinstance(remembering, DefragWithHistory)
    assert remembering.settings == Defrag(urgency=0.5)
    assert remembering._totals.maxlen == 4
    with pytest.raises(
        ConfigError, match="^--queue-policy: got 'mtfs'; allowed: defrag with --queue-history"
    ):
        make_policy("mtfs", history=4)
    with pytest.raises(ConfigError, match="--queue-policy: got 'fifo'; allowed: defrag, mtfs, flfs"):
        make_policy("fifo")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("lookahead", -1), ("decay", 0.0), ("decay", 1.1), ("decay", math.nan), ("own_weight", -1.0)),
        *(("own_weight", math.inf), ("urgency", -0.1), ("urgency", math.nan), ("cap", 0)),
    ],
)
def test_settings_are_checked(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field}: got {value}; allowed: "):
        Defrag(**{field: value})  # type: ignore[arg-type]


def test_history_is_checked() -> None:
    with pytest.raises(ConfigError, match="history: got 0; allowed: at least 1"):
        DefragWithHistory(Defrag(), 0)
