"""Which worker computes a prompt, and which one generates."""

from __future__ import annotations

import pytest

from moesaic.policy.placement.dispatch import (
    SHORT_PROMPT,
    Places,
    RoundRobin,
    WorkerLoad,
    choose_apart,
    least_loaded,
)

WORKERS = {0: WorkerLoad(100, 50, 2), 1: WorkerLoad(100, 20, 1)}
PREFILL = {7: WorkerLoad(100, 40, 2), 8: WorkerLoad(100, 30, 3)}


def test_each_side_is_the_least_loaded_one() -> None:
    assert choose_apart(least_loaded, WORKERS, PREFILL, [1] * SHORT_PROMPT, 1) == Places(decode=1, prefill=8)


def test_a_short_prompt_stays_with_the_worker_that_generates() -> None:
    assert choose_apart(least_loaded, WORKERS, PREFILL, [1] * (SHORT_PROMPT - 1), 1) == Places(
        decode=1, prefill=None
    )


def test_without_prefill_workers_nothing_changes() -> None:
    assert choose_apart(least_loaded, WORKERS, {}, [1] * 100, 7) == Places(decode=1, prefill=None)


def test_the_dispatch_rule_sees_only_workers_that_generate_and_is_asked_once() -> None:
    turns = RoundRobin()
    found = [choose_apart(turns, WORKERS, PREFILL, [1] * 100, 7) for _ in range(3)]
    assert [one.decode for one in found if one] == [0, 1, 0]


def test_without_a_worker_that_generates_there_is_no_place() -> None:
    assert choose_apart(least_loaded, {}, PREFILL, [1] * 100, 7) is None
    with pytest.raises(ValueError, match="empty"):
        choose_apart(least_loaded, {}, {}, [1] * 100, 7)


def test_a_prompt_waits_until_a_worker_has_room_for_its_kv() -> None:
    full = {0: WorkerLoad(100, 60, 2), 1: WorkerLoad(100, 70, 1)}
    assert choose_apart(least_loaded, full, PREFILL, [1] * 100, 41) is None
    assert choose_apart(least_loaded, full, {}, [1] * 100, 41) == Places(decode=0, prefill=None)
    assert choose_apart(least_loaded, full, PREFILL, [1] * (SHORT_PROMPT - 1), 41) == Places(
        decode=0, prefill=None
    )
    assert choose_apart(RoundRobin(), full, PREFILL, [1] * 100, 35) == Places(decode=0, prefill=8)
    idle = full | {2: WorkerLoad(10, 0, 0)}
    assert choose_apart(least_loaded, idle, PREFILL, [1] * 100, 41) == Places(decode=2, prefill=8)
