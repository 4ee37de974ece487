"""A worker of this thread and expert servers in processes, in a job of `gpu_nvshmem`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from moesaic.cluster.local import ChildProcess
from moesaic.core import messages
from moesaic.core.experts import ExpertLayout
from tests.support.gpu_nvshmem import NvshmemByTcp
from tests.support.gpu_server_process import Servers, servers
from tests.support.served_worker import Follow


class Job:
    """Servers of a job, and what brings a worker into it."""

    def __init__(self, jobs: NvshmemByTcp, children: Sequence[ChildProcess], workers: int = 1) -> None:
        name, count = jobs.unique_id(), len(children)
        places = [messages.JoinJob(name, pe, workers, count) for pe in range(workers + count)]
        for child, place in zip(children, places[workers:], strict=True):
            child.connection.send(place)
        self.others = places[1:workers]
        """The places of further workers."""
        self._place: messages.JoinJob | None = places[0]

    def follow(self, said: Sequence[object], send: Callable[[messages.JoinJob], object]) -> bool:
        """For `served_worker.generated`: the worker joins at its first turn."""
        if self._place is not None:
            place, self._place = self._place, None
            send(place)
        return True


@contextmanager
def job(
    path: Path,
    layout: ExpertLayout,
    held: Sequence[Mapping[int, Sequence[int]]],
    jobs: NvshmemByTcp,
    broken: int | None = None,
) -> Iterator[tuple[Servers, Follow]]:
    """As `servers`, and what lets the worker join."""
    with servers(path, layout, held, broken, transport="nvshmem") as both:
        yield both, Job(jobs, both.children).follow  # type: ignore[misc]
