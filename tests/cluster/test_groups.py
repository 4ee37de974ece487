"""Workers that are groups of processes: the tokens of one, through kills of any rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.driven import Answer, Cluster, cluster
from tests.cluster.test_identity import alone, workload

GROUP = {"expert_servers": 0, "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(8, 48))


def ranks(served: Cluster) -> list[int]:
    """Process ids of the worker's group, the first rank first."""
    [status] = served.supervisor.status()
    assert status.pid is not None
    children = Path(f"/proc/{status.pid}/task/{status.pid}/children").read_text().split()
    return [status.pid, *map(int, children)]


def gone(pid: int) -> bool:
    """Whether it ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def soon(true: object) -> bool:
    end = time.monotonic() + 20
    while not true():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def same(found: list[Answer], expected: list[Answer]) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_group_dies_and_restarts_as_one(victim: int, expected: list[Answer]) -> None:
    """One rank is killed in the middle of the answers; nobody of its group stays."""
    with cluster(**GROUP) as served:  # type: ignore[arg-type]
        before: list[int] = []

        def disturb(tokens: int) -> None:
            if tokens > 60 and not before:
                before.extend(ranks(served))
                os.kill(before[victim], signal.SIGKILL)

        served.submit(*workload(8, 48))
        same(served.finish(disturb), expected)
        assert before and soon(lambda: all(map(gone, before)))
        assert served.supervisor.report().counters.process_deaths == 1
        after = ranks(served)
    assert soon(lambda: all(map(gone, after)))


@pytest.mark.slow
def test_a_frozen_rank_is_replaced_with_its_group(expected: list[Answer]) -> None:
    """The first rank waits for it and says that it lives: what it waits for is bounded."""
    with cluster(**GROUP) as served:  # type: ignore[arg-type]
        before: list[int] = []

        def disturb(tokens: int) -> None:
            if tokens > 60 and not before:
                before.extend(ranks(served))
                os.kill(before[1], signal.SIGSTOP)

        served.submit(*workload(8, 48))
        same(served.finish(disturb), expected)
        assert soon(lambda: all(map(gone, before)))


@pytest.mark.slow
def test_two_groups_of_two(expected: list[Answer]) -> None:
    with cluster(attention_workers=2, moe_collectives="deepspeed", **GROUP) as served:  # type: ignore[arg-type]
        served.submit(*workload(8, 48))
        same(served.finish(), expected)
        counted = served._launched.engine.stats().worker.experts.group
        assert counted.pairs > counted.local_pairs > 0 < counted.all_to_all_bytes
