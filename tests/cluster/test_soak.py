"""A short soak: seeded rounds of real clusters whose processes are killed and frozen; and its own parts."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import combinations, islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from scripts.soak.answers import difference, spanning_gap
from scripts.soak.faults import Saboteur
from scripts.soak.leaks import Leaks, grown, held_by, holdings
from scripts.soak.leaks import difference as leaked
from scripts.soak.models import CHECKPOINTS, Models
from scripts.soak.plan import (
    KILL,
    KINDS,
    MOST_TOKENS,
    RESIZE,
    SEVERAL,
    SHARED,
    Fault,
    Order,
    orders,
    plan_round,
    pool,
    shapes,
)
from scripts.soak.report import BAD, by_kind, show
from scripts.soak.rounds import Outcome, Pause, run_rounds
from scripts.soak.shapes import FACTORS, MODELS, PREFILL, WORKER, Shape, allowed, made, pairs_of

from moesaic.core.cluster_status import ClusterCounters, ProcessStatus
from moesaic.core.errors import ScalingError
from tests.support import pairs
from tests.support.cluster_driver import Answer
from tests.support.forked_workers import Forking

CLUSTERS = 12
"""Of the plan "ci". The first of them have most settings between them."""
FEW = (1, 2)
"""Those that `make test` starts."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For temporary files; its path is short, as those of sockets have to be."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.mark.parametrize("number", pairs.some(range(CLUSTERS), FEW))
def test_nothing_is_different_and_nothing_leaks(
    number: int, models: Models, folder: Path, forking: Forking
) -> None:
    """Two rounds of a cluster, with two faults each."""
    forking.start()
    rounds = [plan_round("ci", SHARED * number + index) for index in range(2)]
    short = [replace(plan, faults=plan.faults[:2], requests=4, together=4) for plan in rounds]
    outcomes = list(run_rounds(short, models, folder))
    assert [one.seed for one in outcomes] == [plan.seed for plan in rounds]
    for outcome in outcomes:
        assert outcome.good, outcome
        assert outcome.completed > 0
        assert len(outcome.pauses) == 2


def test_a_plan_comes_from_its_seed_alone() -> None:
    assert plan_round("0", 5) == plan_round("0", 5)
    assert plan_round("0", 5) != plan_round("1", 5)
    assert plan_round("0", SHARED).shape == plan_round("0", 2 * SHARED - 1).shape
    assert plan_round("0", SHARED).shape != plan_round("0", SHARED - 1).shape
    assert list(islice(orders("0/5", 32), 9)) == list(islice(orders("0/5", 32), 9))


@pytest.mark.parametrize("seed", ["0", "1"])
def test_every_pair_of_settings_that_goes_together_meets_in_a_cluster(seed: str) -> None:
    """What one setting forbids of another is known here too, pair by pair."""
    met = set().union(*(pairs_of(choices(one)) for one in shapes(seed)))
    every = {
        frozenset({(one, a), (other, b)})
        for one, other in combinations(FACTORS, 2)
        for a, b in product(FACTORS[one], FACTORS[other])
    }
    crowded = [size for size in FACTORS["size"] if not size[1] > size[2] == 1]  # type: ignore[index]
    never = {frozenset({("size", size), ("redundant_experts", 3)}) for size in crowded}
    never.add(frozenset({("kernels", "reference"), ("small_memory", True)}))
    assert every - met == never
    assert 40 < len(shapes(seed)) < 60
    assert set(CHECKPOINTS) | {"demo"} == set(MODELS)


def choices(shape: Shape) -> tuple[object, ...]:
    """The choices of each factor that make this shape."""
    first = (shape.schedule, shape.inflight_batches, shape.queue_policy)
    size = (shape.attention_workers, shape.expert_servers, shape.min_replicas)
    found = (first, size, *(getattr(shape, name) for name in list(FACTORS)[2:]))
    assert made(found) == shape and allowed(found)
    return found


def test_a_fault_of_prefill_workers_hits_others_where_there_are_none() -> None:
    for plan in (plan_round("0", number) for number in range(200)):
        assert plan.shape.prefill_workers or all(fault.role != PREFILL for fault in plan.faults)


def test_faults_are_of_one_kind_or_of_several() -> None:
    kinds = [plan_round("0", number).kind for number in range(210)]
    assert set(kinds) == {f"{kind}, {role}" for kind, role in KINDS} | {SEVERAL}
    assert min(kinds.count(kind) for kind in set(kinds)) >= 5


def test_a_process_that_never_has_work_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three workers the last is chosen; with few requests only the first ever has one."""
    struck: list[int] = []
    monkeypatch.setattr("scripts.soak.faults._signal", lambda pid, number: struck.append(pid) or True)
    workers = [
        ProcessStatus(f"{WORKER} {number}", WORKER, number, "serving", 100 + number, 1, 0, None, 0.0)
        for number in range(3)
    ]
    served = SimpleNamespace(supervisor=SimpleNamespace(status=lambda: workers))
    router = SimpleNamespace(is_drained=lambda number: number > 0)
    fault = Fault(KILL, WORKER, 0, 0.99, 0.0, False)
    saboteur = Saboteur(served, router, [fault], plan_round("0", 0).shape)  # type: ignore[arg-type]
    for now in range(100):
        saboteur.look(1, float(now))
    assert struck == [100] and saboteur.done


def test_a_process_is_added_and_then_removed() -> None:
    """One change after the other, each told once it is done; one that another fault broke off is no error."""
    shape = next(one for one in shapes("0") if one.attention_workers == 1)
    status = [ProcessStatus(f"{WORKER} 0", WORKER, 0, "serving", 100, 1, 0, None, 0.0)]
    asked: list[dict[str, int]] = []
    futures: list[Future[None]] = []

    def scale(**numbers: int) -> Future[None]:
        asked.append(numbers)
        futures.append(Future())
        return futures[-1]

    served = SimpleNamespace(supervisor=SimpleNamespace(status=lambda: status, scale=scale))
    faults = [Fault(RESIZE, WORKER, 1, 0.0, 0.0, False)] * 2
    saboteur = Saboteur(served, SimpleNamespace(), faults, shape)  # type: ignore[arg-type]
    for now in range(3):
        saboteur.look(now, float(now))
    assert asked == [{"attention_workers": 2}]
    status.append(ProcessStatus(f"{WORKER} 1", WORKER, 1, "serving", 101, 1, 0, None, 0.0))
    futures[0].set_result(None)
    saboteur.look(3, 3.0)
    assert asked[1:] == [{"attention_workers": 1}] and not saboteur.done
    futures[1].set_exception(ScalingError("attention worker 1 died"))
    saboteur.look(3, 3.0)
    assert saboteur.done
    assert (saboteur.resized, saboteur.not_resized) == (1, ["attention worker 1 died"])


@pytest.mark.parametrize("transfers", [[], [(1, 0)]])
def test_a_prefill_worker_is_killed_during_a_transfer(
    transfers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none is seen for long it is killed while it has work."""
    struck: list[float] = []
    monkeypatch.setattr("scripts.soak.faults._signal", lambda pid, number: struck.append(clock) or True)
    workers = [
        ProcessStatus(f"{PREFILL} 0", PREFILL, 0, "serving", 100, 1, 0, None, 0.0),
        ProcessStatus(f"{WORKER} 0", WORKER, 0, "serving", 101, 1, 0, None, 0.0),
    ]
    served = SimpleNamespace(supervisor=SimpleNamespace(status=lambda: workers))
    router = SimpleNamespace(is_drained=lambda number: False, transfers=transfers)
    shape = next(one for one in shapes("0") if one.prefill_workers)
    saboteur = Saboteur(served, router, [Fault(KILL, PREFILL, 0, 0.5, 0.0, False)], shape)  # type: ignore[arg-type]
    for clock in map(float, range(60)):
        saboteur.look(1, clock)
    assert len(struck) == 1 and (struck[0] < 5) == bool(transfers)
    assert saboteur.in_transfer == len(transfers)
    assert [one.victim for one in saboteur.strikes] == [f"{PREFILL} 0"]


def test_rounds_are_told_by_kind_of_fault() -> None:
    pause = Pause("kill", "expert server", "expert server 0", 1, 0.5, True)
    outcomes = [
        Outcome("0/0", "a", "kill, expert server", requests=6, completed=5, cancelled=1, tokens=90,
                pauses=[pause, pause], longest_gap=0.5, counters=ClusterCounters(resent_pairs=8)),
        Outcome("0/1", "b", "kill, expert server", requests=4, completed=4, tokens=10, longest_gap=0.75,
                counters=ClusterCounters(moved_requests=2), leaks=Leaks({"threads": ["a", "b"]})),
        Outcome("0/2", "c", "kill, expert server", bad_connections=True, requests=9, different=["token 1"]),
        Outcome("0/3", "d", error="AssertionError"),
    ]  # fmt: skip
    found = by_kind(outcomes)
    assert found["kill, expert server"] == {
        "rounds": 2, "faults": 2, "sent": 10, "completed": 9, "cancelled": 1, "tokens": 100, "different": 0,
        "pairs again": 8, "requests again": 2, "longest gap s": 0.75, "leaks": 2, "broke off": 0,
    }  # fmt: skip
    assert (found[BAD]["sent"], found[BAD]["different"]) == (9, 1)
    assert (found[SEVERAL]["rounds"], found[SEVERAL]["broke off"]) == (1, 1)
    assert found["freeze, attention worker"]["rounds"] == 0
    assert found["all"]["rounds"] == sum(row["rounds"] for name, row in found.items() if name != "all") == 4
    shown = Console(width=80, record=True, file=io.StringIO())
    show(outcomes, shown)
    assert re.search(r"longest gap s +0.75 +0.00 ", shown.export_text())


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


@pytest.mark.slow
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
    [process] = found["processes"]
    assert process.split()[0] == str(child.pid)
    assert found["temporary files"] == [str(folder / "server-0")]
    assert any("memfd:moesaic-calls" in one for one in found["file descriptors"])
    assert [one.split()[0] for one in found["threads"]] == ["forgotten"]


def test_an_ended_rank_that_this_process_adopted_is_no_leak(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else waits for it. An ended process with another name is one."""
    before = holdings(folder)["processes"]
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    [left] = holdings(folder)["processes"] - before
    number, _, name = left.partition(" ")
    assert number == str(child.pid)
    monkeypatch.setattr("scripts.soak.leaks.RANK", name)
    assert holdings(folder)["processes"] == before
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
    child.wait()


LEAKING = """
import mmap, os, socket, sys
kept = [socket.socketpair()]
sys.stdout.write("ready\\n"), sys.stdout.flush(), sys.stdin.readline()
descriptor = os.memfd_create("moesaic-calls")
os.ftruncate(descriptor, 4096)
kept += [socket.socketpair(), mmap.mmap(descriptor, 4096)]
os.close(descriptor)
sys.stdout.write("ready\\n"), sys.stdout.flush(), sys.stdin.readline()
"""


def test_what_a_process_that_goes_on_did_not_give_back_is_found() -> None:
    """A segment that only its mapping keeps, too."""
    command = [sys.executable, "-c", LEAKING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        folder = Path(f"/proc/{process.pid}")
        process.stdout.readline()
        before = {"worker 0": held_by(folder), "gone": held_by(folder)}
        assert not grown(before, before)
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        after = {"worker 0": held_by(folder), "new": held_by(folder)}
        process.communicate("\n")
    assert before["worker 0"] == {"sockets": 2, "segments": 0}
    assert grown(before, after).found == {
        "sockets of processes": ["worker 0: 4, 2 before"],
        "segments of processes": ["worker 0: 1, 0 before"],
    }
    assert held_by(folder) == {"sockets": 0, "segments": 0}, "it has ended"


@pytest.mark.slow
def test_leaks_are_true_only_when_something_is_left() -> None:
    assert not Leaks({"threads": []})
    assert leaked({"threads": frozenset("a")}, {"threads": frozenset("ab")}) == Leaks({"threads": ["b"]})
