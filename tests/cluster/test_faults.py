"""Real processes are killed and frozen while they have work; no request notices more than a pause."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import pytest

from moesaic import SamplingParams
from moesaic.cluster.supervisor import FROZEN_SECONDS
from tests.cluster.test_identity import alone, workload
from tests.support import pairs
from tests.support.cluster_driver import Answer, Cluster, cluster

TOKENS = 64


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(6, TOKENS))


class Once:
    """Does something to a process when so many tokens are there."""

    def __init__(self, served: Cluster, name: str, number: signal.Signals, after: int) -> None:
        self.served, self.name, self.number, self.after = served, name, number, after
        self.done = False

    def __call__(self, tokens: int) -> None:
        if not self.done and tokens >= self.after:
            self.done = True
            os.kill(self.served.pid(self.name), self.number)


SLOW = pytest.mark.slow


KILLED = list(
    itertools.product(
        ("expert server 0", "expert server 1", "attention worker 0"),
        ("lockstep", "async", "barrier", "auto"),
        (0, 1),
    )
)
NOW = [(name, *rest) for name, *rest in KILLED if rest[-1] == 0 and (name[-1] == "0" or rest[0] == "async")]
"""The second server is as good as the first one: one schedule is enough."""


@pytest.mark.parametrize(("victim", "schedule", "round_"), pairs.some(KILLED, NOW))
def test_a_killed_process_costs_a_pause(
    victim: str, schedule: str, round_: int, expected: list[Answer]
) -> None:
    after = random.Random(f"{victim}{round_}").randrange(1, 6 * TOKENS - 60)
    with cluster(attention_workers=2, expert_servers=2, min_replicas=2, schedule=schedule) as served:
        served.submit(*workload(6, TOKENS))
        kill = Once(served, victim, signal.SIGKILL, after)
        assert served.finish(kill) == expected
        assert kill.done


@SLOW
@pytest.mark.parametrize("schedule", ["lockstep", "async"])
def test_without_replicas_tokens_wait_for_the_restart(schedule: str, expected: list[Answer]) -> None:
    with cluster(attention_workers=1, expert_servers=2, schedule=schedule) as served:
        served.submit(*workload(6, TOKENS))
        assert served.finish(Once(served, "expert server 1", signal.SIGKILL, 50)) == expected
        assert [member.incarnation for member in served.supervisor.status()] == [1, 1, 2]


@pytest.mark.parametrize("schedule", pairs.some(["lockstep", "async"], ["async"]))
def test_a_frozen_server_is_gone_around_and_comes_back(
    schedule: str, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.cluster.supervisor.FROZEN_SECONDS", 600.0)  # not to be replaced meanwhile
    with cluster(attention_workers=2, expert_servers=2, min_replicas=2, schedule=schedule) as served:
        served.submit(*workload(6, TOKENS))
        freeze = Once(served, "expert server 0", signal.SIGSTOP, 50)
        try:
            assert served.finish(freeze) == expected
            assert freeze.done
        finally:
            os.kill(served.pid("expert server 0"), signal.SIGCONT)
        served.submit(*workload(6, TOKENS))
        assert served.finish()[6:] == expected
        assert [member.deaths for member in served.supervisor.status()] == [0, 0, 0, 0]


@SLOW
def test_a_frozen_server_without_replicas_is_replaced(
    expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.cluster.supervisor.FROZEN_SECONDS", 1.0)
    with cluster(attention_workers=1, expert_servers=2) as served:
        served.submit(*workload(6, TOKENS))
        assert served.finish(Once(served, "expert server 0", signal.SIGSTOP, 50)) == expected
        [_, frozen, _] = served.supervisor.status()
        assert (frozen.incarnation, frozen.deaths) == (2, 1)


@pytest.mark.parametrize("expert_servers", pairs.some([0, 1], [1]))
def test_processes_without_work_are_left_alone(expert_servers: int) -> None:
    with cluster(attention_workers=2, expert_servers=expert_servers) as served:
        end = time.monotonic() + FROZEN_SECONDS + 2
        while time.monotonic() < end:
            served.take(0.1)
        assert [member.deaths for member in served.supervisor.status()] == [0] * (2 + expert_servers)


@pytest.mark.slow
def test_the_only_attention_worker_is_killed(expected: list[Answer]) -> None:
    with cluster(attention_workers=1, expert_servers=1) as served:
        served.submit(*workload(6, TOKENS))
        assert served.finish(Once(served, "attention worker 0", signal.SIGKILL, 100)) == expected


@SLOW
def test_a_process_that_keeps_dying_ends_the_service_with_a_message() -> None:
    with cluster(attention_workers=1, expert_servers=1) as served:
        killed: set[int] = set()
        deadline = time.monotonic() + 240
        while "keep dying" not in served.supervisor.describe_end():
            assert time.monotonic() < deadline
            server = served.supervisor.status()[1]
            if server.stage == "serving" and server.pid is not None and server.pid not in killed:
                os.kill(server.pid, signal.SIGKILL)
                killed.add(server.pid)
            time.sleep(0.05)
        assert "killed by signal 9" in served.supervisor.describe_end()


@SLOW
def test_no_process_outlives_the_block() -> None:
    with cluster(attention_workers=2, expert_servers=2) as served:
        pids = [member.pid for member in served.supervisor.status()]
        served.submit([[5, 6, 7]], [SamplingParams(max_tokens=4, ignore_eos=True)])
        served.finish()
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
