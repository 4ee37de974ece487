"""Expert servers that hold more experts than their memory: the same tokens, also when one is killed."""

from __future__ import annotations

import signal

import pytest

from moesaic.kernels import table
from tests.cluster.test_faults import TOKENS, Once
from tests.cluster.test_identity import alone, workload
from tests.support import pairs
from tests.support.cluster_driver import Answer, Cluster, cluster

pytestmark = pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")

MEMORY = 1 << 20
"""Bytes for experts in each server: 13 of the 72 that it holds of the demo."""


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(6, TOKENS))


def read(served: Cluster) -> list[int]:
    """Bytes that each server read. Reports come a moment later."""
    servers = [one for one in served.supervisor.status() if one.role == "expert server"]
    return [one.stats.residency.loaded_bytes for one in servers]


@pytest.mark.parametrize("schedule", pairs.some(["lockstep", "async", "barrier"], ["async"]))
def test_tokens_are_those_of_one_process(schedule: str, expected: list[Answer]) -> None:
    with cluster(attention_workers=2, schedule=schedule, server_memory=MEMORY) as served:
        served.submit(*workload(6, TOKENS))
        assert served.finish() == expected
        served.until(lambda: min(read(served)) > 5 * MEMORY)
        for one in served.supervisor.status():
            if one.role == "expert server":
                assert 0 < one.stats.residency.hits < one.stats.residency.chosen


@pytest.mark.parametrize("replicas", pairs.some([1, 2], [2]))
def test_a_server_that_is_killed_while_it_reads_costs_a_pause(replicas: int, expected: list[Answer]) -> None:
    """With replicas every server holds all experts, which costs no memory."""
    with cluster(min_replicas=replicas, server_memory=MEMORY) as served:
        served.submit(*workload(6, TOKENS))
        kill = Once(served, "expert server 1", signal.SIGKILL, 120)
        assert served.finish(kill) == expected and kill.done
        served.until(lambda: [one.incarnation for one in served.supervisor.status()] == [1, 1, 2])
