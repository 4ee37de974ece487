"""Seeded faults on Ray while requests go on: actors, processes and nodes die, or freeze. For `make full`."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_identity import alone, workload
from tests.support import ray_nodes
from tests.support.cluster_driver import Answer, Cluster
from tests.support.ray_cluster import actor_pid, answers, on_ray, once, processes, serving, started_by
from tests.support.ray_nodes import Nodes

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::FutureWarning:ray.*")]
CLUSTERS, FAULTS = 12, 4
SCHEDULES = ("lockstep", "barrier", "async", "auto")
KINDS = ("actor", "process", "freeze", "node")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes.running([1, 1, 1, 1]) as started:
        yield started


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(6, 24))


def trouble(running: Cluster, nodes: Nodes, kind: str, process: Any) -> Callable[[], None]:
    """What ends `process`, or stops it."""
    match kind:
        case "actor":
            pid = actor_pid(process)
            return lambda: os.kill(pid, signal.SIGKILL)
        case "process" | "freeze":
            pid = started_by(running, process)
            return lambda: os.kill(pid, signal.SIGKILL if kind == "process" else signal.SIGSTOP)
        case _:
            [node] = [one for one in nodes.nodes if one.node_id == process.room.node]
            return lambda: nodes.kill(node)


@pytest.mark.parametrize("number", range(CLUSTERS))
def test_no_token_differs_and_nothing_is_left(
    number: int, tmp_path: Path, nodes: Nodes, expected: list[Answer]
) -> None:
    rng = random.Random(number)
    shape: dict[str, Any] = {"attention_workers": rng.choice((1, 2)), "expert_servers": 2}
    shape |= {"min_replicas": rng.choice((1, 2)), "schedule": SCHEDULES[number % 4]}
    done = []
    with on_ray(tmp_path, nodes, **shape) as running:
        for _ in range(FAULTS):
            kind, name = rng.choice(KINDS), rng.choice(sorted(processes(running)))
            done.append(f"{kind} of {name}")
            before = processes(running)[name]
            end = trouble(running, nodes, kind, before)
            assert answers(running, once(end, after=rng.randrange(10, 100))) == expected, done
            if kind == "node":
                nodes.add()
            running.until(partial(replaced, running, before))
        assert answers(running) == expected, done


def replaced(running: Cluster, process: Any) -> bool:
    return process not in processes(running).values() and serving(running)
