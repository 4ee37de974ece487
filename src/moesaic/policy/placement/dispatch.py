"""Chooses the attention worker of a request. The request and its KV cache stay there until it ends.

Question: Which attention worker gets a request?
Question: Which worker computes a prompt, and which one goes on (`--prefill-workers`)?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moesaic.core.tables import Tables

SHORT_PROMPT = 16
"""A prompt of fewer tokens is computed by the worker that generates: it adds few rows to a step."""


@dataclass(frozen=True)
class WorkerLoad:
    """The current load of one attention worker."""

    total_blocks: int
    used_blocks: int
    """KV blocks of its open requests, for their prompts and generated tokens."""
    requests: int
    rank: int | None = None
    """The rank of the experts beside this worker. None means the rank with the worker's id."""

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks


class Dispatch(Protocol):
    """Chooses a worker for each request. It is called once per request and may remember its choices.

    workers: id -> load of the workers that take requests; they may change between calls. prompt: token ids.
    Raises ValueError if there is no worker.
    """

    def __call__(self, workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int: ...


def least_loaded(workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int:
    """The worker with the most free KV blocks. Ties go to fewer requests, then to the lower id.

    The code behind Asynchronous Expert Parallelism has the same rule, but needs to know output lengths.
    Raises ValueError if there is no worker.
    """
    return min(workers, key=lambda worker: (-workers[worker].free_blocks, workers[worker].requests, worker))


class RoundRobin:
    """Chooses one worker after another, in the order of their ids.

    Example: workers 0, 3, 5 get requests 0, 3, 5, 0, ... If worker 3 leaves after its first one: 0, 3, 5,
    0, 5, ...
    """

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int:
        self._last = min(workers, key=lambda worker: (worker <= self._last, worker))
        return self._last


Worth = Callable[[int], "npt.NDArray[np.float64]"]
"""Worker -> [ranks] worth, 0 to 1, of a pair that each rank's server computes for the worker
(`link_prices.worth_of`)."""
EXACT = 1e-9
"""Shares count as equal if their difference is smaller."""
AHEAD = 8
"""How many more requests a worker may have than another one, so that prompts go to their best rank."""


class Affinity:
    """Chooses the worker beside the experts that this prompt should use more than other prompts do.

    A prompt's share for a rank is the share of its expected (token, expert) pairs there (Sem-MoE, Algorithm
    2). Its score is this share minus the mean share of the prompts so far. A rank with many popular experts
    is good for every prompt; the score shows which prompt gains most by it.

    With `worth`, pairs of other ranks count too, by what the link to their server leaves of them. So a
    prompt goes to the host of its experts, even if its best rank is busy.

    A worker gets no request while it has AHEAD more than the one with the fewest. `least_loaded` decides
    ties. A worker on a rank that is not in the tables has score 0.

    Example: there are two ranks, and three prompts have 90 %, 60 % and 70 % of their pairs on rank 0. The
    mean starts at 50 %. The first prompt scores +40 % and goes to rank 0. The mean is then 70 %, so the
    second scores -10 % and goes to rank 1. The mean is then 67 %, so the third scores +3 % and goes to rank
    0.
    """

    def __init__(self, tables: Tables, ahead: int = AHEAD, worth: Worth | None = None) -> None:
        """worth: what the links to servers of other ranks leave of a pair. None: a worker's score counts the
        pairs of its own rank alone."""
        self._tables, self._ahead, self._worth = tables, ahead, worth
        self._shares: npt.NDArray[np.float64] = np.full(tables.ranks, 1 / tables.ranks)
        """[ranks] sum of the shares of all prompts so far, and of one even prompt to start with."""
        self._prompts = 1

    def __call__(self, workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int:
        fewest = min(load.requests for load in workers.values())
        candidates = {w: load for w, load in workers.items() if load.requests < fewest + self._ahead}
        scores = _of_workers(candidates, self._score(prompt), self._worth)
        best = max(scores.values()) - EXACT
        return least_loaded({worker: candidates[worker] for worker in scores if scores[worker] >= best})

    def _score(self, prompt: Sequence[int]) -> npt.NDArray[np.float64]:
        """[ranks] score of the prompt for each rank."""
        pairs = self._tables.request_scores(prompt)
        if not pairs.any():
            return pairs
        share = pairs / pairs.sum()
        score: npt.NDArray[np.float64] = share - self._shares / self._prompts
        self._shares, self._prompts = self._shares + share, self._prompts + 1
        return score


class Rounds:
    """Chooses the worker beside most of the experts that a prompt should use: Sem-MoE's Algorithm 2 as it
    is.

    A worker that got a request gets no other one until each worker has one, so rounds keep the counts even.
    (The mask in the paper is inverted: it keeps the workers that already have one.) `least_loaded` decides
    ties. A worker on a rank that is not in the tables has score 0.

    Example: with two workers, three prompts that score highest on rank 1 go to workers 1, 0, 1.
    """

    def __init__(self, tables: Tables, worth: Worth | None = None) -> None:
        """worth: see `Affinity`."""
        self._tables, self._worth = tables, worth
        self._workers_of_round: set[int] = set()
        """Workers that got a request in this round."""

    def __call__(self, workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int:
        waiting = [worker for worker in workers if worker not in self._workers_of_round]
        if not waiting:
            self._workers_of_round.clear()
            waiting = list(workers)
        candidates = {w: workers[w] for w in waiting}
        scores = _of_workers(candidates, self._tables.request_scores(prompt), self._worth)
        best = max(scores.values(), default=0.0)
        worker_id = least_loaded({worker: workers[worker] for worker in waiting if scores[worker] == best})
        self._workers_of_round.add(worker_id)
        return worker_id


def _of_workers(
    workers: Mapping[int, WorkerLoad], by_rank: npt.NDArray[np.float64], worth: Worth | None = None
) -> dict[int, float]:
    """The score of each worker: that of its rank, or those of all ranks by their worth for the worker."""
    if worth is not None:
        return {worker: float(by_rank @ worth(worker)) for worker in workers}
    scores = dict(enumerate(by_rank.tolist()))
    return {
        worker: scores.get(worker if load.rank is None else load.rank, 0.0)
        for worker, load in workers.items()
    }


@dataclass(frozen=True)
class Places:
    """The workers of one request."""

    decode: int
    """Generates the answer."""
    prefill: int | None
    """Computes the prompt. None: the same worker does."""


def choose_apart(
    dispatch: Dispatch,
    workers: Mapping[int, WorkerLoad],
    prefill_workers: Mapping[int, WorkerLoad],
    token_ids: Sequence[int],
    blocks: int,
) -> Places | None:
    """Choose two workers for a request: one that computes its prompt, and one that generates its answer.

    Prefill and decode on different workers is the idea of DistServe (Zhong et al. 2024) and Splitwise (Patel
    et al. 2024): a long prompt then delays no other request's next token. token_ids: its prompt and what it
    has generated, which take so many blocks.

    `dispatch` chooses the worker that generates. The prefill worker is the one whose open prompts have the
    fewest blocks. Without prefill workers, and for a short prompt, there is none.

    A prompt waits, and None is returned, until a worker has room for its KV. Otherwise prefill workers would
    run ahead, and KV without a place in the cache would fill the memory.

    Example: prefill workers 7 and 8 have 100 blocks each, of which 40 and 30 are used. A prompt of 15 tokens
    goes to none of them, one of 16 tokens to 8. Raises ValueError if there are no workers at all.
    """
    if not prefill_workers or len(token_ids) < SHORT_PROMPT:
        return Places(dispatch(workers, token_ids), None)
    roomy = {key: load for key, load in workers.items() if not load.requests or load.free_blocks >= blocks}
    if not roomy:
        return None
    return Places(dispatch(roomy, token_ids), least_loaded(prefill_workers))
