"""Who of a cluster's processes on this machine gets which of its cores."""

from __future__ import annotations

import os

from moesaic.cluster.member import Role
from moesaic.config import WorkerConfig


class Cores:
    """The cores that this process may use, for all of its children together."""

    def __init__(self, worker: WorkerConfig) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self._pinned = worker.model.pin_threads
        self._group = worker.parallel.tensor_parallel_size

    def threads(self, alike: int) -> int:
        """Of each of `alike` processes of one role.

        Workers and servers wait for each other most of the time, and threads that wait sleep, so each role
        has all the cores: one worker and one server on two cores were a third to two thirds faster with two
        threads each than with one, with every schedule.
        """
        return max(1, len(self._cores) // max(1, alike))

    def cpus(self, role: Role, place: int, ranks: int | None) -> tuple[int, ...]:
        """Where --pin-threads keeps a process: a rank's two share its part of the cores; without ranks all
        workers share them among each other, and so do all servers; a group has one for each of its processes.
        Empty: anywhere. place: among those of its role, 0 first.
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
