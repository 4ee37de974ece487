"""Divides this machine's cores among the processes of a cluster."""

from __future__ import annotations

import os

from moesaic.cluster.member import Role
from moesaic.config import WorkerConfig


class Cores:
    """The cores that this process may use, to be divided among its child processes."""

    def __init__(self, worker: WorkerConfig) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self._pinned = worker.model.pin_threads
        self._group = worker.parallel.tensor_parallel_size

    def threads(self, alike: int) -> int:
        """Returns the number of threads for each of `alike` processes of one role.

        Workers and servers mostly wait for each other, and waiting threads sleep. So each role gets all
        cores. One worker and one server on two cores were a third to two thirds faster with two threads
        each than with one, with every schedule.
        """
        return max(1, len(self._cores) // max(1, alike))

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
