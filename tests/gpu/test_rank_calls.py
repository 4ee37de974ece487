"""Ranks that share an attention worker, whose rows stay on the sanitizer's device on their way to servers.

The first rank asks the servers. Ranks and servers are real processes, or ranks are threads in place of NCCL.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu import test_device_calls, test_rows, test_servers
from tests.support import gpu_cases, pairs
from tests.support.gpu_clusters import (
    RANKS,
    SCHEDULES,
    SERVERS,
    TWO,
    WORKERS,
    Cards,
    Strike,
    Tokens,
    cards,
    of_one_process,
)
from tests.support.gpu_forks import forks
from tests.support.gpu_sanitizer import in_thread
from tests.support.gpu_server_process import servers
from tests.support.processes import children, gone
from tests.support.thread_groups import ranks_of_threads

from moesaic.config import ParallelConfig
from moesaic.runtime.model_loading import read_expert_layout

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    with forks():
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    gpu_cases.write("deepseek-lite-yarn", folder)
    return folder


@pytest.fixture(scope="module")
def expected(path: Path) -> Tokens:
    return of_one_process(path)


CASES = list(product(SCHEDULES, ("exact", "partial")))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("schedule", "combine"), pairs.some(CASES, [("lockstep", "exact"), ("async", "partial")])
)
def test_a_server_that_is_killed_changes_no_token(
    path: Path, expected: Tokens, schedule: str, combine: str
) -> None:
    with cards(path, **RANKS, **SCHEDULES[schedule], combine=combine) as found:
        served = found.served
        [second] = children(served.pid(WORKERS[0]))
        strike = Strike(served.pid(SERVERS[0]), signal.SIGKILL)
        assert found.tokens(strike) == expected and strike.sent
        assert found.exported(WORKERS[0]) & found.opened()
        found.restarted(1)
        found.check_counts(expected)
        assert not found.mapped(second), "the second rank shares no memory with servers"
        served.until(lambda: served.stats.experts.group.all_gather_bytes > 0)


def second_rank(found: Cards) -> int:
    [rank] = children(found.served.pid(WORKERS[0]))
    return rank


def first_rank(found: Cards) -> int:
    return found.served.pid(WORKERS[0])


DEATHS: list[tuple[Callable[[Cards], int], str, str]] = list(
    product((first_rank, second_rank), ("SIGKILL", "SIGSTOP"), SCHEDULES)
)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("rank", "send", "schedule"),
    pairs.some(DEATHS, [(first_rank, "SIGKILL", "two in flight"), (second_rank, "SIGKILL", "async")]),
)
def test_a_rank_ends_in_the_middle(
    path: Path, expected: Tokens, rank: Callable[[Cards], int], send: str, schedule: str
) -> None:
    """Servers leave the memory of its group. Another group gets the same tokens."""
    with cards(path, **RANKS, **SCHEDULES[schedule]) as found:
        served, lost = found.served, found.exported(WORKERS[0])
        group = [first_rank(found), second_rank(found)]
        strike = Strike(rank(found), signal.Signals[send], lambda: lost.update(found.exported(WORKERS[0])))
        assert found.tokens(strike) == expected and strike.sent and lost
        served.until(lambda: all(map(gone, group)))
        served.until(lambda: not lost & found.opened())
        found.restarted(1)
        assert served.broken_off == 0, "no server was lost"
        found.check_counts(expected)
        assert not lost & found.exported(WORKERS[0]) & found.opened()


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_another_group_goes_on(path: Path, expected: Tokens) -> None:
    with cards(path, **RANKS | TWO) as found:
        lost: set[int] = set()
        before = first_rank(found)
        strike = Strike(before, signal.SIGKILL, lambda: lost.update(found.exported(WORKERS[0])))
        assert found.tokens(strike) == expected and strike.sent
        found.served.until(lambda: not lost & found.opened())
        found.restarted(1)
        found.check_counts(expected)


@pytest.mark.parametrize(
    "scheduler",
    [pytest.param({"inflight_batches": 2}, marks=pairs.REST), {"schedule": "async", "combine": "partial"}],
)
def test_no_row_goes_to_the_host(path: Path, scheduler: dict[str, Any]) -> None:
    """Neither between the ranks, nor on the way to servers. Tokens are those of a worker without ranks."""
    layout = read_expert_layout(test_servers.config(path, "cpu").model)
    every = dict.fromkeys(layout.layers, range(layout.num_experts))
    alone = test_device_calls.config(path, **scheduler)
    found = []
    with servers(path, layout, [every, every]) as running:
        for settings in (alone, replace(alone, parallel=ParallelConfig(2))):
            with (
                test_device_calls.on_device(),
                test_device_calls.counted() as copies,
                ranks_of_threads(in_thread),
                test_rows.on_device(2),
            ):
                tokens = test_device_calls.generated(settings, running.directory)
                found.append(tokens)
    assert found[0] == found[1] and copies.requests > 0
    assert copies.of[torch.int64, layout.top_k] == copies.requests, "the gate's choice"
    assert not any(size == layout.hidden for _, size in copies.of), copies.of
