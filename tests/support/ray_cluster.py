"""A moesaic cluster whose processes run on the nodes of a Ray cluster, driven from a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_identity import workload
from tests.support import cluster_driver
from tests.support.cluster_driver import Answer, Cluster, Running
from tests.support.ray_nodes import Nodes

ray: Any = pytest.importorskip("ray", reason="the extra moesaic[ray] is missing")


def command(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def joining(address: str) -> list[int]:
    """Ids of the processes of this machine that were started to join a cluster."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if "moesaic.cluster.joining" in command(pid) and address in command(pid)]


@contextmanager
def on_ray(folder: Path, nodes: Nodes, **more: Any) -> Iterator[Cluster]:
    """A cluster on these nodes. Nothing of it is left after it."""
    settings: dict[str, Any] = {"rebalance_interval": 0.0, "cluster_secret_file": str(folder / "secret")}
    with cluster_driver.cluster(distributed_executor_backend="ray", **settings | more) as running:
        address = running.supervisor.report().join_address
        assert address is not None
        yield running
    deadline = time.monotonic() + 30
    while joining(address) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not joining(address)
    assert not ray.is_initialized()
    while any(nodes.left()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert nodes.left() == ([], [])


def processes(running: Cluster) -> dict[str, Any]:
    """The running process of each member, by its name."""
    return {member.name: member.child for member in running.supervisor._members.all_members}


def started_by(running: Cluster, process: Any) -> int:
    """Id of the process that an actor started."""
    address = str(running.supervisor.report().join_address)
    [pid] = [one for one in joining(address) if process.joining.ticket in command(one)]
    return pid


def answers(running: Cluster, disturb: Callable[[int], None] = lambda tokens: None) -> list[Answer]:
    running.running = Running()
    running.submit(*workload(6, 24))
    return running.finish(disturb)


def once(action: Callable[[], object], after: int = 40) -> Callable[[int], None]:
    """Does something when requests have so many tokens."""
    todo = [action]
    return lambda tokens: [todo.pop()() for _ in todo * (tokens > after)] and None


def actor_pid(process: Any) -> int:
    from ray._private import state

    return int(state.actors(process.room._actor._actor_id.hex())["Pid"])


def serving(running: Cluster) -> bool:
    return all(one.stage == "serving" for one in running.supervisor.status())
