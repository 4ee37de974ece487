"""A short soak: seeded rounds of real clusters whose processes are killed and frozen; and its own parts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from scripts.soak.answers import alone, difference, spanning_gap
from scripts.soak.leaks import Leaks, holdings
from scripts.soak.leaks import difference as leaked
from scripts.soak.plan import MOST_TOKENS, Order, orders, plan_round, pool
from scripts.soak.rounds import run_round

from tests.cluster.driven import Answer

KERNELS = ("auto", "reference")


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Answer]]:
    return {kernels: alone(kernels) for kernels in KERNELS}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For temporary files; its path is short, as those of sockets have to be."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_nothing_is_different_and_nothing_leaks(
    number: int, expected: dict[str, list[Answer]], folder: Path
) -> None:
    plan = plan_round("ci", number)
    outcome = run_round(replace(plan, faults=plan.faults[:2], requests=4, together=4), expected, folder)
    assert outcome.good, outcome
    assert outcome.completed > 0
    assert len(outcome.pauses) == 2


def test_a_plan_comes_from_its_seed_alone() -> None:
    assert plan_round("0", 5) == plan_round("0", 5)
    assert plan_round("0", 5) != plan_round("1", 5)
    assert list(islice(orders("0/5", 32), 9)) == list(islice(orders("0/5", 32), 9))


def test_all_schedules_meet_all_sizes_and_both_transports_and_kernels() -> None:
    shapes = [plan_round("0", number).shape for number in range(42)]
    schedules = {(one.schedule, one.inflight_batches, one.queue_policy) for one in shapes}
    sizes = {(one.attention_workers, one.expert_servers, one.min_replicas) for one in shapes}
    assert (len(schedules), len(sizes)) == (6, 7)
    assert len({one.name for one in shapes}) == 42
    assert {one.transport for one in shapes} == {"shm", "stream"}
    assert {one.kernels for one in shapes} == set(KERNELS)


def test_orders_stay_within_the_pool() -> None:
    drawn: list[Order] = list(islice(orders("0/0", 32), 500))
    assert {order.number for order in drawn} == set(range(len(pool(greedy=False))))
    assert max(order.max_tokens for order in drawn) == MOST_TOKENS
    cancelled = [order for order in drawn if order.cancel_after is not None]
    assert 25 < len(cancelled) < 150
    assert all(order.cancel_after < order.max_tokens for order in cancelled if order.cancel_after is not None)


SHOULD: Answer = ([5, 6, 7], [-1.0, -0.5, -0.25])


@pytest.mark.parametrize(
    ("got", "length", "exact", "wrong"),
    [
        (SHOULD, 3, True, None),
        (([5, 6], [-1.0, -0.5]), 2, True, None),
        (([5, 6], [-1.0, -0.5]), None, True, None),
        (([], []), None, True, None),
        (([5, 6], [-1.0, -0.5]), 3, True, "2 tokens in place of 3"),
        (([5, 6], [-1.0]), 2, True, "2 tokens with 1 log-probabilities"),
        (([5, 6, 7, 8], [-1.0, -0.5, -0.25, -1.0]), None, True, "4 tokens, more than there are: 3"),
        (([5, 7], [-1.0, -0.5]), 2, True, "token 1: 7 in place of 6"),
        (([5, 6], [-1.0, -0.5000001]), 2, True, "log-probability 1: -0.5000001 in place of -0.5"),
        (([5, 6], [-1.0, -0.5000001]), 2, False, None),
        (([5, 6], [-1.0, -0.6]), 2, False, "log-probability 1: -0.6 in place of -0.5"),
        (([5, 9, 1], [-1.0, -0.5000001, -3.0]), 3, False, None),  # behind a near-tie all may differ
        (([5, 9], [-1.0, -0.7]), 2, False, "token 1: 9 in place of 6"),
    ],
)
def test_answers_are_compared(got: Answer, length: int | None, exact: bool, wrong: str | None) -> None:
    assert difference(SHOULD, got, length, exact) == wrong


def test_the_gap_that_a_fault_fell_into() -> None:
    assert spanning_gap([1.0, 2.0, 5.0], 3.0) == 3.0
    assert spanning_gap([1.0, 2.0, 5.0], 1.0) == 1.0
    assert spanning_gap([1.0, 2.0, 5.0], 6.0) == 0.0


def test_what_was_not_given_back_is_found(folder: Path) -> None:
    before = holdings(folder)
    assert not leaked(before, holdings(folder))
    (folder / "server-0").touch()
    descriptor = os.memfd_create("moesaic-calls")
    wait = threading.Event()
    thread = threading.Thread(target=wait.wait, name="forgotten")
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = leaked(before, holdings(folder)).found
    finally:
        wait.set()
        child.communicate()
        os.close(descriptor)
    assert found["processes"] == [str(child.pid)]
    assert found["temporary files"] == [str(folder / "server-0")]
    assert any("memfd:moesaic-calls" in one for one in found["file descriptors"])
    assert [one.split()[0] for one in found["threads"]] == ["forgotten"]


def test_leaks_are_true_only_when_something_is_left() -> None:
    assert not Leaks({"threads": []})
    assert leaked({"threads": frozenset("a")}, {"threads": frozenset("ab")}) == Leaks({"threads": ["b"]})
