"""Faults happen as often as asked, and the same ones each time. Without any, test_calls.py passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.call_pairs import Silent, ask, incoming, pair
from tests.support.faulty_transport import Faults, FaultyCaller, fate

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.transport.calls import Answerer, Caller
from moesaic.transport.waiting import wait

CALLS, ROWS = 20, 50
News = list[tuple[int, list[int]]]
Run = Callable[[Faults, int], list[News]]


def run(faults: Faults, seed: int, ends: tuple[Caller, Answerer]) -> list[News]:
    """What each of many polls reports after CALLS calls of ROWS rows, whose answers are there at once."""
    inner, answerer = ends
    caller = FaultyCaller(inner, faults, seed)
    calls = [ask(caller, b"", ROWS, 1) for _ in range(CALLS)]
    reached = sum(fate(faults, seed, call.number, ROWS).reaches for call in calls)
    for one in incoming(Silent(), answerer, reached) if reached else []:
        one.publish(np.arange(ROWS))
    polls = [[(call.number, rows.tolist()) for call, rows in caller.poll()] for _ in range(20)]
    for call in calls:
        caller.release(call)
    return polls


def rows_in(polls: list[News]) -> list[tuple[int, int]]:
    return [(number, row) for news in polls for number, rows in news for row in rows]


@pytest.fixture
def make(tmp_path: Path) -> Run:
    """Runs with fresh ends: call numbers begin at 1."""

    def fresh(faults: Faults, seed: int) -> list[News]:
        with pair("shm", tmp_path) as ends:
            return run(faults, seed, ends)

    return fresh


EVERYTHING = Faults(drop_request=0.2, drop=0.1, duplicate=0.3, delay=0.5, reorder=True)


def test_a_seed_is_a_run(make: Run) -> None:
    assert make(EVERYTHING, 5) == make(EVERYTHING, 5)
    assert make(EVERYTHING, 5) != make(EVERYTHING, 6)


def test_no_faults(make: Run) -> None:
    polls = make(Faults(), 1)
    assert polls == [[(number, list(range(ROWS))) for number in range(1, CALLS + 1)]] + [[]] * 19


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_dropped_rows(make: Run, share: float) -> None:
    rows = rows_in(make(Faults(drop=share), 1))
    assert len(set(rows)) == len(rows)
    assert abs(len(rows) / (CALLS * ROWS) - (1 - share)) < 0.05


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_duplicated_rows(make: Run, share: float) -> None:
    rows = rows_in(make(Faults(duplicate=share), 1))
    assert len(set(rows)) == CALLS * ROWS
    assert abs(len(rows) / (CALLS * ROWS) - (1 + share)) < 0.05


def test_dropped_requests(make: Run) -> None:
    rows = rows_in(make(Faults(drop_request=0.5), 1))
    numbers = {number for number, _ in rows}
    assert 0 < len(numbers) < CALLS and len(rows) == len(numbers) * ROWS


def test_delayed_rows(make: Run) -> None:
    polls = make(Faults(delay=0.5, max_delay=4), 1)
    assert [bool(news) for news in polls[:6]] == [True] * 5 + [False]
    assert sorted(rows_in(polls)) == [(c, r) for c in range(1, CALLS + 1) for r in range(ROWS)]
    assert abs(len(rows_in(polls[:1])) / (CALLS * ROWS) - 0.5) < 0.05


def test_reordered_rows(make: Run) -> None:
    rows = rows_in(make(Faults(reorder=True), 1))
    assert rows != sorted(rows)
    assert sorted(rows) == [(c, r) for c in range(1, CALLS + 1) for r in range(ROWS)]


def test_what_is_held_back_keeps_the_waiting_short(tmp_path: Path) -> None:
    with pair("shm", tmp_path) as (inner, answerer):
        caller = FaultyCaller(inner, Faults(delay=1.0, max_delay=1), seed=0)
        call = ask(caller, b"", 1, 1)
        incoming(Silent(), answerer)[0].publish(np.array([0]))
        assert caller.poll() == []
        assert wait([caller])
        assert [(found, rows.tolist()) for found, rows in caller.poll()] == [(call, [0])]
        assert not caller.ready()


def test_a_call_given_up_takes_its_late_rows_along(tmp_path: Path) -> None:
    with pair("shm", tmp_path) as (inner, answerer):
        caller = FaultyCaller(inner, Faults(delay=1.0, max_delay=3), seed=0)
        call = ask(caller, b"", 4, 1)
        incoming(Silent(), answerer)[0].publish(np.arange(4))
        assert caller.poll() == []
        caller.release(call)
        assert [caller.poll() for _ in range(5)] == [[]] * 5


def test_the_connection_is_cut(tmp_path: Path) -> None:
    with pair("shm", tmp_path) as (inner, _):
        caller = FaultyCaller(inner, Faults(cut_after=2), seed=0)
        for _ in range(2):
            ask(caller, b"", 1, 1)
        with pytest.raises(ConnectionLost, match="cut"):
            ask(caller, b"", 1, 1)
        assert wait([caller])
        for use in (caller.poll, lambda: caller.open(1, 1, 1)):
            with pytest.raises(ConnectionLost, match="cut"):
                use()


@pytest.mark.parametrize(
    "wrong", [{"drop": 1.5}, {"delay": -0.1}, {"max_delay": 0}, {"cut_after": -1}, {"drop_request": 2.0}]
)
def test_bad_faults(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: got"):
        Faults(**wrong)
