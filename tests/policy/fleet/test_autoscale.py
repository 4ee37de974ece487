from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moesaic.core.errors import ConfigError
from moesaic.policy.fleet.autoscale import Autoscaler, AutoscaleRule

RULE = AutoscaleRule(1, 4, up_seconds=5.0, down_seconds=60.0, cooldown=30.0)


def decide(
    scaler: Autoscaler, now: float, busy: float = 0.6, queue: int = 0, missed: int = 0, servers: int = 2
) -> int:
    return scaler.decide(now, queue, busy, missed, servers)


def test_worked_example() -> None:
    scaler = Autoscaler(AutoscaleRule.parse("1:4"))
    assert decide(scaler, 0.0, busy=0.9) == 2
    assert decide(scaler, 4.9, busy=0.9) == 2
    assert decide(scaler, 5.0, busy=0.9) == 3
    assert decide(scaler, 34.9, busy=1.0, servers=3) == 3
    assert decide(scaler, 35.0, busy=1.0, servers=3) == 3  # measured from here on
    assert decide(scaler, 40.0, busy=1.0, servers=3) == 4
    assert decide(scaler, 90.0, busy=1.0, servers=4) == 4
    assert decide(scaler, 99.0, busy=1.0, servers=4) == 4


@pytest.mark.parametrize(("busy", "queue", "missed"), [(0.86, 0, 0), (0.6, 9, 0), (0.6, 0, 1), (0.1, 9, 0)])
def test_each_sign_of_pressure_adds_a_server(busy: float, queue: int, missed: int) -> None:
    scaler = Autoscaler(RULE)
    assert decide(scaler, 0.0, busy, queue, missed) == 2
    assert decide(scaler, 5.0, busy, queue, missed) == 3


def test_a_long_queue_adds_what_it_takes_at_most_twice_as_many() -> None:
    for queue, target in [(12, 3), (13, 4), (100, 4)]:
        scaler = Autoscaler(AutoscaleRule(1, 9))
        decide(scaler, 0.0, queue=queue)
        assert decide(scaler, 5.0, queue=queue) == target


def test_pressure_that_pauses_begins_anew() -> None:
    scaler = Autoscaler(RULE)
    decide(scaler, 0.0, busy=0.9)
    decide(scaler, 4.0, busy=0.8)
    assert decide(scaler, 6.0, busy=0.9) == 2
    assert decide(scaler, 10.9, busy=0.9) == 2
    assert decide(scaler, 11.0, busy=0.9) == 3


def test_between_the_marks_nothing_changes() -> None:
    scaler = Autoscaler(RULE)
    assert [decide(scaler, 10.0 * step, busy=0.4 + 0.02 * step) for step in range(22)] == [2] * 22


def test_idle_servers_leave_one_at_a_time() -> None:
    scaler, servers, seen = Autoscaler(RULE), 4, []
    for second in range(0, 400, 10):
        servers = decide(scaler, float(second), busy=0.05, servers=servers)
        seen.append(servers)
    changes = [(10 * i, n) for i, n in enumerate(seen) if i and n != seen[i - 1]]
    assert changes == [(60, 3), (150, 2), (240, 1)]  # 60 s low, then 30 s of cool-down and 60 s low again


@pytest.mark.parametrize(("busy", "queue", "missed"), [(0.3, 5, 0), (0.3, 0, 1), (0.4, 0, 0)])
def test_who_is_needed_stays(busy: float, queue: int, missed: int) -> None:
    scaler = Autoscaler(AutoscaleRule(1, 2, high=0.9))
    for second in range(0, 1000, 10):
        assert decide(scaler, float(second), busy, queue, missed) == 2


def test_nobody_leaves_if_the_rest_would_be_too_busy() -> None:
    scaler = Autoscaler(AutoscaleRule(1, 4, high=0.7, low=0.4))
    for second in range(0, 1000, 10):
        assert decide(scaler, float(second), busy=0.36) == 2  # one server would be busy 72 % of the time


def test_bounds_hold_at_once() -> None:
    scaler = Autoscaler(AutoscaleRule(2, 3))
    assert decide(scaler, 0.0, servers=0) == 2
    assert decide(scaler, 0.0, servers=7) == 3


def test_a_time_out_of_bounds_is_no_measurement() -> None:
    scaler = Autoscaler(AutoscaleRule(2, 4))
    decide(scaler, 0.0, busy=0.9)
    assert decide(scaler, 3.0, busy=0.9, servers=1) == 2
    assert decide(scaler, 6.0, busy=0.9) == 2
    assert decide(scaler, 11.0, busy=0.9) == 3


@given(
    st.lists(
        st.tuples(
            st.floats(0, 90), st.integers(0, 99), st.floats(0, 1), st.integers(0, 2), st.integers(0, 8)
        ),
        max_size=60,
    )
)
def test_never_outside_the_bounds_and_calm_after_a_change(
    steps: list[tuple[float, int, float, int, int]],
) -> None:
    scaler, now, changed = Autoscaler(AutoscaleRule(2, 6)), 0.0, float("-inf")
    for pause, queue, busy, missed, servers in steps:
        now += pause
        target = scaler.decide(now, queue, busy, missed, servers)
        assert 2 <= target <= 6
        if 2 <= servers <= 6 and target != servers:
            assert target >= servers - 1
            assert now - changed >= 30.0
            changed = now


@given(
    flips=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 119)), min_size=2, max_size=6),
    loads=st.tuples(st.floats(3.0, 12.0), st.floats(0.0, 1.0)),
    missed=st.integers(0, 2),
)
@example(flips=[(6, 4)] * 300, loads=(9.0, 0.1), missed=1)
def test_a_load_that_flips_adds_servers_and_removes_none(
    flips: list[tuple[int, int]], loads: tuple[float, float], missed: int
) -> None:
    """flips: seconds of the high load and of the low one, which is shorter than `down_seconds`.

    loads: what the requests of each take, in servers that have work all the time. The high one is no low
    load of six servers.
    """
    rule = AutoscaleRule(1, 6)
    scaler, now, servers, counts = Autoscaler(rule), 0.0, 2, [2]
    for durations in flips:
        for seconds, load, late in zip(durations, loads, (missed, 0), strict=True):
            for _ in range(seconds):
                waiting = max(0, round(4 * (load - servers)))
                servers = scaler.decide(now, waiting, min(1.0, load / servers), late, servers)
                counts.append(servers)
                now += 1.0
    assert counts == sorted(counts)
    assert len(set(counts)) - 1 <= rule.maximum - 2, "scaling calls"


def test_a_load_that_flips_each_few_seconds_changes_nothing() -> None:
    """High for less than `up_seconds`."""
    scaler = Autoscaler(AutoscaleRule(1, 6))
    for second in range(7200):
        busy = 1.0 if second % 8 < 4 else 0.0
        assert decide(scaler, float(second), busy, queue=round(30 * busy), missed=round(busy)) == 2


@pytest.mark.parametrize(
    "text", ["", "3", "0:2", "3:2", "a:b", "1:2:3", "-1:2", "1:", "1.5:2", "1:9999999", "١:٢"]
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--autoscale: got .*; allowed: MIN:MAX with 1 <= MIN <= MAX"):
        AutoscaleRule.parse(text)


def test_bounds_are_read() -> None:
    assert AutoscaleRule.parse("2:6") == AutoscaleRule(2, 6)
    assert AutoscaleRule.parse(" 3:3 ") == AutoscaleRule(3, 3)


@pytest.mark.parametrize(
    "marks",
    [
        {"low": 0.9},
        {"low": 0.0},
        {"high": 1.5},
        {"queue": -1.0},
        {"up_seconds": float("nan")},
        {"cooldown": -1},
    ],
)
def test_marks_are_checked(marks: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="allowed: 0 "):
        AutoscaleRule(1, 2, **marks)
