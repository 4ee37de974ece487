"""Divides this machine's cores and NUMA nodes among the processes of a cluster.

Question: Which cores does a process get, and which NUMA node?
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.cluster.member import Role
from moesaic.cluster.numa import Node
from moesaic.config import WorkerConfig
from moesaic.runtime.machine import allowed_cpus, limit_cores


class Cores:
    """The cores that this process may use, to be divided among its child processes. Where a limit of CPU time
    is lower, they are only as many as it allows.

    nodes: the NUMA nodes that processes are bound to. With fewer than two, none is bound.
    """

    def __init__(self, worker: WorkerConfig, nodes: Sequence[Node] = ()) -> None:
        self._nodes = tuple(nodes) if len(nodes) > 1 else ()
        usable_cpus = [cpu for node in self._nodes for cpu in node.cpus] or allowed_cpus()
        self._num_usable, self._cores = len(usable_cpus), usable_cpus[: limit_cores(len(usable_cpus))]
        self._pin_threads = worker.model.pin_threads
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
        own_nodes = self.nodes(place, alike)
        if len(own_nodes) != 1:
            return max(1, len(self._cores) // max(1, alike))
        sharing = [other_place for other_place in range(alike) if self.nodes(other_place, alike) == own_nodes]
        node_cores = len(own_nodes[0].cpus) * len(self._cores) // self._num_usable
        return max(1, node_cores // len(sharing))

    def cpus(self, role: Role, place: int, ranks: int | None) -> tuple[int, ...]:
        """Returns the cores that --pin-threads assigns to a process; empty: any core.

        Attention worker and expert server of a rank share the rank's part of the cores. Without ranks, the
        workers divide the cores among each other, and so do the servers. A tensor-parallel group has a core
        for each of its processes. place: index of the process among those of its role, from 0.
        """
        if not self._pin_threads:
            return ()
        if ranks is None:
            offset = 0 if role is Role.WORKER else len(self._cores) // 2
            first = place * self._group + offset
            return tuple(self._cores[(first + rank) % len(self._cores)] for rank in range(self._group))
        num_cores = max(1, len(self._cores) // ranks)
        first = place * num_cores % len(self._cores)
        return tuple(self._cores[first : first + num_cores])
