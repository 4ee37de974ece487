"""Chooses the attention worker of a request. The request stays there with its KV cache until it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moesaic.core.tables import Tables


@dataclass(frozen=True)
class WorkerLoad:
    """The load of a worker."""

    total_blocks: int
    used_blocks: int
    """Blocks of its open requests, for their prompts and generated tokens."""
    requests: int
    rank: int | None = None
    """The rank whose experts are beside it; None: the rank with the worker's id."""

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks


class Dispatch(Protocol):
    """Chooses a worker. It may remember earlier choices; it sees every request once.

    workers: id -> load of those that take requests; they may change between calls. prompt: token ids.
    Raises ValueError if there is no worker.
    """

    def __call__(self, workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int: ...


def least_loaded(workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int:
    """The worker with the most free KV blocks; of equal ones the one with fewer requests, then the lower
    id.

    This is the rule of the code behind Asynchronous Expert Parallelism, without its need to know output
    lengths. Raises ValueError if there is no worker.
    """
    return min(workers, key=lambda worker: (-workers[worker].free_blocks, workers[worker].requests, worker))


class RoundRobin:
    """One worker after another, in the order of their ids.

    Example: workers 0, 3, 5 get requests 0, 3, 5, 0, ...; when 3 left after its first one: 0, 3, 5, 0, 5,
    ...
    """

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int:
        self._last = min(workers, key=lambda worker: (worker <= self._last, worker))
        return self._last


EXACT = 1e-9
"""Shares that differ by less count as equal."""
AHEAD = 8
"""Number of requests that a worker may have more than another one, so that prompts go to their best rank."""


class Affinity:
    """Chooses the worker beside the experts that the prompt should use more than other prompts do.

    A prompt's score for a rank is its share of the expected pairs there (Sem-MoE, Algorithm 2), minus the
    mean share of the prompts so far. A rank with many popular experts is good for every prompt; the score
    shows which prompt gains most by it. A worker that is AHEAD of the one with the fewest requests gets no
    further request. Ties are decided by `least_loaded`. A worker whose rank is not in the tables has score
    0.

    Example: two ranks, prompts with 90 %, 60 % and 70 % of their pairs on rank 0, whose mean begins at 50
    %: +40 % goes to rank 0; the mean is then 70 %, so -10 % goes to rank 1, and 70 % is +3 % above 67 %:
    rank 0.
    """

    def __init__(self, tables: Tables, ahead: int = AHEAD) -> None:
        self._tables, self._ahead = tables, ahead
        self._shares: npt.NDArray[np.float64] = np.full(tables.ranks, 1 / tables.ranks)
        """Sum of the shares of the prompts so far, and of one even prompt."""
        self._prompts = 1

    def __call__(self, workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int:
        fewest = min(load.requests for load in workers.values())
        open_ones = {w: load for w, load in workers.items() if load.requests < fewest + self._ahead}
        scores = _of_workers(open_ones, self._score(prompt))
        best = max(scores.values()) - EXACT
        return least_loaded({worker: open_ones[worker] for worker in scores if scores[worker] >= best})

    def _score(self, prompt: Sequence[int]) -> npt.NDArray[np.float64]:
        """[ranks] score of the prompt on each rank."""
        found = self._tables.request_scores(prompt)
        if not found.any():
            return found
        share = found / found.sum()
        score: npt.NDArray[np.float64] = share - self._shares / self._prompts
        self._shares, self._prompts = self._shares + share, self._prompts + 1
        return score


class Rounds:
    """Chooses the worker beside most of the experts that a prompt should use: Sem-MoE's Algorithm 2 itself.

    A worker that got a request gets no other one until each worker has one, so rounds keep the counts even.
    (The mask in the paper is inverted: it keeps the workers that have one.) Ties are decided by
    `least_loaded`. A worker whose rank is not in the tables has score 0.

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
        scores = _of_workers({w: workers[w] for w in waiting}, self._tables.request_scores(prompt))
        best = max(scores.values(), default=0.0)
        chosen = least_loaded({worker: workers[worker] for worker in waiting if scores[worker] == best})
        self._served.add(chosen)
        return chosen


def _of_workers(workers: Mapping[int, WorkerLoad], by_rank: npt.NDArray[np.float64]) -> dict[int, float]:
    """Each worker's score, by its rank."""
    scores = dict(enumerate(by_rank.tolist()))
    return {
        worker: scores.get(worker if load.rank is None else load.rank, 0.0)
        for worker, load in workers.items()
    }
