"""Request -> attention worker: where it stays for life, its KV cache with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moesaic.core.tables import Tables


@dataclass(frozen=True)
class WorkerLoad:
    """What dispatch knows of a worker."""

    total_blocks: int
    used_blocks: int
    """By the requests that were given to it and have not ended, their prompts and generated tokens."""
    requests: int
    rank: int | None = None
    """Whose experts are beside it; None: those of the rank with the worker's id."""

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks


class Dispatch(Protocol):
    """Chooses a worker. It may remember what it chose before, and it sees every request once.

    workers: id -> load of those that take requests; they may be others at every call. prompt: token ids.
    Raises ValueError when there is no worker.
    """

    def __call__(self, workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int: ...


def least_loaded(workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int:
    """The worker with the most free KV blocks; of equal ones the one with fewer requests, then the lower id.

    The rule of the code behind Asynchronous Expert Parallelism, without its need to know output lengths.
    Raises ValueError when there is no worker.
    """
    return min(workers, key=lambda worker: (-workers[worker].free_blocks, workers[worker].requests, worker))


class RoundRobin:
    """One worker after the other, in the order of their ids.

    Example: workers 0, 3, 5 get requests 0, 3, 5, 0, ...; when 3 left after its first one: 0, 3, 5, 0, 5, ...
    """

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int:
        self._last = min(workers, key=lambda worker: (worker <= self._last, worker))
        return self._last


class Affinity:
    """The worker beside most of the experts that a prompt is expected to use (Sem-MoE, Algorithm 2).

    Who got a request gets no other one until each worker got one: rounds keep the counts even. (The printed
    mask is inverted: it leaves those that got one.) Equal scores go by `least_loaded`. A worker whose rank
    the tables do not know has score 0.

    Example: two workers, three prompts that score highest on rank 1: workers 1, 0, 1.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._served: set[int] = set()
        """Workers that got a request in this round."""

    def __call__(self, workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int:
        waiting = [worker for worker in workers if worker not in self._served]
        if not waiting:
            self._served.clear()
            waiting = list(workers)
        scores = self._scores(workers, waiting, prompt)
        best = max(scores.values(), default=0.0)
        chosen = least_loaded({worker: workers[worker] for worker in waiting if scores[worker] == best})
        self._served.add(chosen)
        return chosen

    def _scores(
        self, workers: Mapping[int, WorkerLoad], among: Iterable[int], prompt: Sequence[int]
    ) -> dict[int, float]:
        by_rank = dict(enumerate(self._tables.request_scores(prompt).tolist()))
        ranks = {worker: workers[worker].rank for worker in among}
        return {worker: by_rank.get(worker if rank is None else rank, 0.0) for worker, rank in ranks.items()}
