"""Workers and servers of the barrier schedule begin steps together, in whatever order messages come."""

from __future__ import annotations

import random

import pytest
from tests.support.barrier_cluster import Cluster


def test_two_idle_workers_that_get_requests_at_once_begin_one_step() -> None:
    """Each server hears of the other worker's request first, and has begun when it hears of the second one.

    If a server counted that second arrival for the next step, each server would compute the rows of another
    worker alone, and then wait for the call of the other one.
    """
    cluster = Cluster(2, 2)
    cluster.settle()
    for one in cluster.workers:
        one.asked(1)
    for worker, server in [(1, 0), (0, 1), (0, 0), (1, 1)]:
        cluster.happen(("deliver", worker, server))
    for worker, server in [(0, 1), (1, 0)]:
        cluster.happen(("answer", worker, server))
        cluster.happen(("deliver", worker, server))
    cluster.settle()
    assert not cluster.stuck
    assert [one.steps for one in cluster.workers] == [1, 1]
    assert all(server.backend.runs == [(0, 2), (1, 2)] for server in cluster.servers)


def test_a_call_shows_a_server_that_the_step_has_begun() -> None:
    """Server 1 has not heard of the request when worker 1, which has none, asks it for experts.

    Otherwise it would not wait for worker 0, which it takes to be at the barrier.
    """
    cluster = Cluster(2, 2)
    cluster.settle()
    cluster.workers[0].asked(1)
    cluster.happen(("deliver", 0, 0))
    cluster.happen(("answer", 1, 0))
    cluster.happen(("deliver", 1, 1))
    assert cluster.servers[1].backend.runs == []
    cluster.settle()
    assert [one.steps for one in cluster.workers] == [1, 1]
    assert all(server.backend.runs == [(0, 2), (1, 2)] for server in cluster.servers)


def any_order(cluster: Cluster, seed: int) -> None:
    """Let some workers get requests while messages travel, in an order that the seed gives."""
    rng = random.Random(seed)
    asked = [number for number in range(len(cluster.workers)) for _ in range(rng.randint(0, 2))]
    rng.shuffle(asked)
    while (events := cluster.possible()) or asked:
        if asked and (not events or rng.random() < 0.5):
            cluster.workers[asked.pop()].asked(rng.randint(1, 2))
        else:
            cluster.happen(rng.choice(events))


@pytest.mark.parametrize(
    ("workers", "servers", "seeds"),
    [
        (2, 2, range(20)),
        (3, 3, range(10)),
        pytest.param(2, 2, range(20, 5000), marks=pytest.mark.full),
        pytest.param(3, 3, range(10, 2000), marks=pytest.mark.full),
    ],
)
def test_in_any_order_of_messages_all_run_each_step_together(
    workers: int, servers: int, seeds: range
) -> None:
    for seed in seeds:
        cluster = Cluster(workers, servers)
        any_order(cluster, seed)
        assert not cluster.stuck, seed
        assert not any(worker.requests for worker in cluster.workers), seed
        assert len({worker.steps for worker in cluster.workers}) == 1, seed
        for server in cluster.servers:
            assert {calls for _, calls in server.backend.runs} <= {workers}, seed


@pytest.mark.parametrize(
    "seeds", [range(5), pytest.param(range(5, 1000), marks=pytest.mark.full)], ids=["few", "many"]
)
@pytest.mark.parametrize("what", ["server", "worker"])
def test_after_a_restart_all_run_each_step_together_again(what: str, seeds: range) -> None:
    for seed in seeds:
        cluster = Cluster(3, 2)
        any_order(cluster, seed)
        if what == "server":
            cluster.restart(0)
            places = [(worker, 0) for worker in range(3)]
        else:
            cluster.replace(0)
            places = [(0, server) for server in range(2)]
        for worker, server in places:
            cluster.connect(worker, server)
            cluster.settle(random.Random(seed))
        cluster.workers[seed % 3].asked(2)
        cluster.settle(random.Random(seed))
        for one in cluster.servers:
            one.backend.runs.clear()
        any_order(cluster, seed)
        assert not cluster.stuck, seed
        for one in cluster.servers:
            assert {calls for _, calls in one.backend.runs} <= {3}, seed
