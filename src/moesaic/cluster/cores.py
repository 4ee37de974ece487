"""Divides this machine's cores and NUMA nodes among the processes of a cluster.

Question: Which cores does a process get, and which NUMA node?
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from moesaic.cluster.member import Role
from moesaic.cluster.numa import Node
from moesaic.config import WorkerConfig


class Cores:
    """The cores that this process may use, to be divided among its child processes.

    nodes: the NUMA nodes that processes are bound to. With fewer than two, none is bound.
    """

    def __init__(self, worker: WorkerConfig, nodes: Sequence[Node] = ()) -> None:
        self._nodes = tuple(nodes) if len(nodes) > 1 else ()
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self._cores = [cpu for node in self._nodes for cpu in node.cpus] or allowed
        self._pinned = worker.model.pin_threads
        self._group = worker.parallel.tensor_parallel_size

    def nodes(self, place: int, alike: int) -> tuple[Node, ...]:
        """Returns the NUMA nodes of a process, the index `place` among `alike` of its role.

        With at least as many processes as nodes, each has one node, and neighbours share one. Fewer processes
        use all nodes. Empty: processes are not bound.
        """
        if not self._nodes or alike < len(self._nodes):
            return self._nodes
        return self._nodes[place * len(self._nodes) // alike :][:1]

    def threads(self, place: int, alike: int) -> int:
        """Returns the number of threads for a process, the index `place` among `alike` of its role.

        Workers and servers mostly wait for each other, and waiting threads sleep. So each role gets all
        cores. One worker and one server on two cores were a third to two thirds faster with two threads
        each than with one, with every schedule.
        """
        mine = self.nodes(place, alike)
        if len(mine) != 1:
            return max(1, len(self._cores) // max(1, alike))
        sharing = [one for one in range(alike) if self.nodes(one, alike) == mine]
        return max(1, len(mine[0].cpus) // len(sharing))

    def cpus(self, role: Role, place: int, ranks: int | None) -> tuple[int, ...]:
        """Returns the cores that --pin-threads assigns to a process; empty: any core.

        Attention worker and expert server of a rank share the rank's part of the cores. Without ranks, the
        workers divide the cores among each other, and so do the servers. A tensor-parallel group has a core
        for each of its processes. place: index of the process among those of its role, from 0.
        """
        if not self._pinned:
            return ()
        if ranks is None:
            offset = 0 if role is Role.WORKER else len(self._cores) // 2
            first = place * self._group + offset
            return tuple(self._cores[(first + one) % len(self._cores)] for one in range(self._group))
        each = max(1, len(self._cores) // ranks)
        first = place * each % len(self._cores)
        return tuple(self._cores[first : first + each])
