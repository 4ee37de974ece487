"""A Ray cluster of several nodes on this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

STORE = 80 << 20
"""Bytes of each node's object store, the least that Ray takes. Nothing is put there."""


class Nodes:
    """A Ray cluster on this machine."""

    def __init__(self, cpus: Sequence[int]) -> None:
        """cpus: of each node. Each process of one thread takes one."""
        from ray.cluster_utils import Cluster

        self._folder = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray")
        Path(self._folder, "ray").mkdir()  # Ray's file with the address of its last cluster stands there
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": self._folder}
        self._cluster = Cluster(initialize_head=True, head_node_args=head | {"object_store_memory": STORE})
        self.address = str(self._cluster.address)
        self.nodes: list[Any] = []
        """All nodes that were added. Some may have ended."""
        for one in cpus:
            self.add(wait=False, num_cpus=one)
        self._cluster.wait_for_nodes()

    def add(self, wait: bool = True, **resources: float) -> Any:
        given = {"num_cpus": 1} | resources
        node = self._cluster.add_node(wait=wait, object_store_memory=STORE, **given)
        self.nodes.append(node)
        return node

    def remove(self, node: Any) -> None:
        self._cluster.remove_node(node)

    def kill(self, node: Any) -> None:
        """Kills a node with SIGKILL. Its actors end when they notice."""
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_all(self) -> None:
        """Kills all nodes with SIGKILL, with the one that controls the cluster."""
        for node in self.nodes:
            self.kill(node)
        self._cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def left(self) -> tuple[list[str], list[str]]:
        """Actors that live and placement groups that have room, once nobody is connected."""
        import ray
        from ray._private import state
        from ray.util.placement_group import placement_group_table

        ray.init(address=self.address, configure_logging=False, log_to_driver=False)
        try:
            actors = [one["State"] for one in state.actors().values() if one["State"] != "DEAD"]
            groups = [one["state"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
            return actors, groups
        finally:
            ray.shutdown()


@contextmanager
def running(cpus: Sequence[int]) -> Iterator[Nodes]:
    """Nodes with so many CPUs each. Inside, `ray` programs find them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", "")
        started = Nodes(cpus)
        patch.setenv("RAY_ADDRESS", started.address)
        yield started
        started.close()
