"""A frozen process holds up nobody else: what is sent to it waits, and what it owes is asked of others."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from moesaic import SamplingParams
from moesaic.cluster.router import Router
from moesaic.cluster.supervisor import FROZEN_SECONDS
from tests.cluster.test_identity import alone, workload
from tests.support import pairs
from tests.support.cluster_driver import PATIENCE, Cluster, cluster

TOKENS = 48


def flood(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of 12 KB each: their biases are none."""
    params = SamplingParams(
        max_tokens=2,
        temperature=0.0,
        ignore_eos=True,
        logprobs=0,
        logit_bias=dict.fromkeys(range(200, 1000), 0.0),
    )
    return [[3 + number, 5, 7] for number in range(count)], [params] * count


def in_background(action: Callable[[], None]) -> bool:
    """Whether `action` comes to its end."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return not thread.is_alive()


def requests_of(served: Cluster, worker: int) -> set[int]:
    """Those that have not ended."""
    router = served._launched.connection
    assert isinstance(router, Router)
    with router._lock:
        return {number for number, entry in router._entries.items() if entry.worker == worker}


@pytest.mark.slow
def test_more_than_a_frozen_worker_takes_is_sent_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other worker's streams go on; the frozen one is killed, started again, and nothing is lost."""
    monkeypatch.setattr("moesaic.cluster.supervisor.FROZEN_SECONDS", 1e6)
    first, second = workload(6, TOKENS), flood(60)
    with cluster(attention_workers=2, expert_servers=0, dispatch="round-robin") as served:
        served.submit(*first)
        served.until(lambda: served.running.tokens >= 12)
        os.kill(served.pid("attention worker 0"), signal.SIGSTOP)
        assert in_background(lambda: served.submit(*second)), "the sender waits for the frozen worker"
        others = requests_of(served, 1)
        served.until(lambda: not others & served.running.unfinished)
        assert len(requests_of(served, 0)) >= 30, "it is frozen, and has them"
        assert [member.deaths for member in served.supervisor.status()] == [0, 0]
        monkeypatch.setattr("moesaic.cluster.supervisor.FROZEN_SECONDS", FROZEN_SECONDS)
        assert served.finish() == alone(*first) + alone(*second)
        assert served.supervisor.status()[0].incarnation == 2


@pytest.mark.slow
def test_a_frozen_server_keeps_nobody_at_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was frozen while all waited for requests, at which it owes nothing; the supervisor does not look."""
    monkeypatch.setattr("moesaic.cluster.supervisor.FROZEN_SECONDS", 1e6)
    prompts, params = workload(6, TOKENS)
    with cluster(attention_workers=2, expert_servers=2, min_replicas=2, schedule="barrier") as served:
        served.submit(prompts, params)
        served.finish()
        gate = served.pid("expert server 0")
        os.kill(gate, signal.SIGSTOP)
        try:
            served.submit(prompts, params)
            assert served.finish() == alone(prompts, params) * 2
        finally:
            os.kill(gate, signal.SIGCONT)


FROZEN = [("lockstep", 0), ("lockstep", 40), ("async", 40), ("barrier", 40)]


@pytest.mark.parametrize(("schedule", "after"), pairs.some(FROZEN, [FROZEN[0], FROZEN[3]]))
def test_a_frozen_server_with_a_replica_is_gone_around_by_its_clients_alone(
    schedule: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor does not look. Frozen before its first answer, too: every token comes, with its bits."""
    monkeypatch.setattr("moesaic.cluster.supervisor.FROZEN_SECONDS", 1e6)
    prompts, params = workload(6, TOKENS)
    with cluster(attention_workers=2, expert_servers=2, min_replicas=2, schedule=schedule) as served:
        served.connected()  # who never met it goes around it without a failover
        if after:
            served.submit(prompts, params)
            served.until(lambda: served.running.tokens >= after)
        before = served.supervisor.report().processes[3].stats.pairs
        victim = served.pid("expert server 1")
        os.kill(victim, signal.SIGSTOP)
        try:
            served.submit(prompts, params)
            got = served.finish()
            assert sum(len(tokens) for tokens, _ in got) == len(got) * TOKENS
            assert got == alone(prompts, params) * (2 if after else 1)
            served.until(lambda: served.supervisor.report().counters.failovers > 0)  # told a little later
            report = served.supervisor.report()
            assert report.processes[3].stats.pairs >= before and report.counters.process_deaths == 0
        finally:
            os.kill(victim, signal.SIGCONT)
        served.submit(prompts, params)
        served.finish()
        served.until(lambda: served.supervisor.report().counters.false_failovers > 0)
