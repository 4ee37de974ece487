from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.tables import Tables
from moesaic.policy.placement.dispatch import (
    AHEAD,
    Affinity,
    Dispatch,
    RoundRobin,
    Rounds,
    WorkerLoad,
    least_loaded,
)
from moesaic.policy.placement.locality import request_ranks

LOADS = st.builds(WorkerLoad, st.integers(1, 9), st.integers(0, 12), st.integers(0, 9))
IDLE = WorkerLoad(10, 0, 0)


def tables(scores: list[list[float]]) -> Tables:
    """Tables of which dispatch reads only the scores [V, ranks]."""
    vocab_size, ranks = len(scores), len(scores[0])
    return Tables(
        model="toy",
        layers=(0,),
        experts=np.zeros((1, 2), dtype=np.int16),
        scores=np.array(scores, dtype=np.float32),
        labels=np.zeros((vocab_size, 1), dtype=np.int16),
        confidence=np.zeros((vocab_size, 1), dtype=np.float16),
        after=np.zeros((1, ranks**2), dtype=np.int16),
        after_confidence=np.zeros((1, ranks**2), dtype=np.float16),
    )


TWO = tables([[0, 1], [3, 0]])
"""Token 0 belongs to rank 1. Token 1 belongs to rank 0, three times as strongly."""


def test_worked_example() -> None:
    """The worker with the most free blocks comes first, not the one with the smallest used share. Then fewer
    requests decide, then the lower id."""
    assert least_loaded({0: WorkerLoad(100, 90, 1), 1: WorkerLoad(20, 5, 9)}) == 1
    assert least_loaded({0: WorkerLoad(20, 5, 2), 1: WorkerLoad(25, 10, 1)}) == 1
    assert least_loaded({7: WorkerLoad(20, 5, 2), 3: WorkerLoad(20, 5, 2)}) == 3


def test_a_worker_may_owe_more_blocks_than_it_has() -> None:
    """Requests that wait count with blocks that they do not have yet."""
    assert WorkerLoad(10, 14, 3).free_blocks == -4
    assert least_loaded({0: WorkerLoad(10, 14, 3), 1: WorkerLoad(10, 13, 9)}) == 1


@pytest.mark.parametrize(
    "make", [lambda: least_loaded, RoundRobin, lambda: Rounds(TWO), lambda: Affinity(TWO)]
)
def test_no_worker(make: Callable[[], Dispatch]) -> None:
    with pytest.raises(ValueError, match="empty"):
        make()({}, [0])
    assert make()({4: IDLE}, [0]) == 4


@given(st.dictionaries(st.integers(0, 5), LOADS, min_size=1))
def test_nobody_has_more_room(workers: dict[int, WorkerLoad]) -> None:
    chosen = workers[least_loaded(workers)]
    assert chosen.free_blocks == max(load.free_blocks for load in workers.values())
    assert least_loaded(dict(reversed(workers.items()))) == least_loaded(workers)


def test_round_robin_worked_example() -> None:
    dispatch = RoundRobin()
    workers = {5: IDLE, 0: IDLE, 3: IDLE}
    assert [dispatch(workers) for _ in range(4)] == [0, 3, 5, 0]
    dispatch = RoundRobin()
    found = [dispatch(workers) for _ in range(4)]
    del workers[3]
    assert [*found, dispatch(workers), dispatch(workers)] == [0, 3, 5, 0, 5, 0]


def test_rounds_worked_example() -> None:
    """Three prompts prefer rank 1. The second one goes elsewhere, and the third begins another round."""
    dispatch = Rounds(TWO)
    assert [dispatch({0: IDLE, 1: IDLE}, [0, 0]) for _ in range(3)] == [1, 0, 1]


def test_scores_are_summed_over_the_prompt() -> None:
    workers = {0: IDLE, 1: IDLE}
    assert Rounds(TWO)(workers, [0, 0, 1]) == 0
    assert Rounds(TWO)(workers, [0, 0, 0, 0, 1]) == 1


def test_equal_scores_go_to_free_blocks() -> None:
    workers = {0: WorkerLoad(10, 5, 0), 1: WorkerLoad(10, 2, 0), 2: WorkerLoad(10, 4, 0)}
    assert Rounds(tables([[1, 1, 1]]))(workers, [0]) == 1
    assert Rounds(tables([[2, 1, 2]]))(workers, [0]) == 2
    assert Rounds(tables([[1, 0, 0]]))(workers, []) == 1


def test_a_worker_says_whose_experts_are_beside_it() -> None:
    beside = {7: WorkerLoad(10, 9, 9, rank=1), 8: WorkerLoad(10, 0, 0, rank=0)}
    assert Rounds(TWO)(beside, [0]) == 7
    assert Rounds(TWO)({0: IDLE, 9: IDLE}, [1]) == 0  # rank 9 is none of the tables'


def test_workers_come_and_go_within_a_round() -> None:
    dispatch = Rounds(tables([[3, 2, 1]]))
    three = {0: IDLE, 1: IDLE, 2: IDLE}
    assert [dispatch(three, [0]), dispatch(three, [0])] == [0, 1]
    assert dispatch({0: IDLE, 1: IDLE}, [0]) == 0  # worker 2 is gone: nobody waits, another round
    assert dispatch(three, [0]) == 1
    assert dispatch(three, [0]) == 2


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=20), st.integers(1, 4))
def test_rounds_are_algorithm_2(prompts: list[list[int]], ranks: int) -> None:
    """Algorithm 2 as printed, with the mask's polarity corrected. Loads are equal, so ties go to the lower
    rank."""
    scores = np.random.default_rng(ranks).integers(0, 3, (4, ranks)).astype(np.float64)
    dispatch = Rounds(tables(scores.tolist()))
    workers = dict.fromkeys(range(ranks), IDLE)
    mask = np.ones(ranks, dtype=np.bool_)
    for prompt in prompts:
        score = scores[prompt].sum(axis=0) if prompt else np.zeros(ranks)
        score[~mask] = -np.inf
        expected = int(score.argmax())
        mask[expected] = False
        if not mask.any():
            mask[:] = True
        assert dispatch(workers, prompt) == expected


@given(st.integers(1, 5), st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=30))
def test_rounds_keep_the_counts_even(workers: int, prompts: list[list[int]]) -> None:
    for dispatch in (Rounds(TWO), RoundRobin()):
        chosen = [dispatch(dict.fromkeys(range(workers), IDLE), prompt) for prompt in prompts]
        for start in range(0, len(chosen), workers):
            part = chosen[start : start + workers]
            assert len(set(part)) == len(part)


TENTHS = tables([[9, 1], [6, 4], [7, 3]])


def test_affinity_worked_example() -> None:
    dispatch = Affinity(TENTHS)
    assert [dispatch({0: IDLE, 1: IDLE}, [token]) for token in range(3)] == [0, 1, 0]


def test_affinity_of_nothing_known_is_the_least_loaded() -> None:
    workers = {0: WorkerLoad(10, 5, 0), 1: WorkerLoad(10, 2, 0), 2: WorkerLoad(10, 4, 0)}
    dispatch = Affinity(tables([[1, 1, 1], [5, 0, 0]]))
    assert [dispatch(workers, []), dispatch(workers, [0])] == [1, 1]
    assert dispatch(workers, [1]) == 0


def test_affinity_leaves_out_who_is_too_far_ahead() -> None:
    for requests, chosen in ((AHEAD - 1, 0), (AHEAD, 1)):
        assert Affinity(TENTHS)({0: WorkerLoad(10, 0, requests), 1: IDLE}, [0]) == chosen


@given(st.integers(1, 4), st.integers(0, 1000), st.integers(1, 40))
def test_affinity_as_it_is_measured(ranks: int, seed: int, requests: int) -> None:
    """The rate equals that of policy.locality when no request ends. Each prompt is one token of its own."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, (requests, ranks)).astype(np.float64)
    dispatch = Affinity(tables(scores.tolist()))
    tokens, counts, found = [0] * ranks, [0] * ranks, []
    for request in range(requests):
        workers = {rank: WorkerLoad(10**6, tokens[rank], counts[rank]) for rank in range(ranks)}
        rank = dispatch(workers, [request])
        tokens[rank], counts[rank] = tokens[rank] + 1, counts[rank] + 1
        found.append(rank)
    assert found == request_ranks(scores, np.ones(requests, dtype=np.int64)).tolist()


# ---- links


def near_pairs(worker: int) -> npt.NDArray[np.float64]:
    """Ranks 0 and 1 share a host, and so do ranks 2 and 3."""
    worth = np.where(np.arange(4) // 2 == worker // 2, 0.5, 0.0)
    worth[worker] = 1.0
    return worth


def test_with_links_a_prompt_goes_to_the_host_of_its_experts() -> None:
    """Rank 0 has most of the prompt's experts, and ranks 2 and 3 together have more."""
    prompt = tables([[4, 0, 3, 3]])
    workers = dict.fromkeys(range(4), IDLE)
    assert Affinity(prompt)(workers, [0]) == 0
    assert Affinity(prompt, worth=near_pairs)(workers, [0]) == 2
    assert Rounds(prompt, worth=near_pairs)(workers, [0]) == 2


def test_a_busy_rank_is_replaced_by_one_of_its_host() -> None:
    prompt = tables([[4, 0, 1, 1]])
    workers = {0: WorkerLoad(10, 0, AHEAD), 1: IDLE, 2: IDLE, 3: IDLE}
    assert Affinity(prompt, worth=near_pairs)(workers, [0]) == 1


@given(st.integers(1, 4), st.integers(0, 1000), st.integers(1, 30))
def test_affinity_with_links_as_it_is_measured(ranks: int, seed: int, requests: int) -> None:
    """As `test_affinity_as_it_is_measured`, for links with any worth."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, (requests, ranks)).astype(np.float64)
    worth = rng.random((ranks, ranks))
    dispatch = Affinity(tables(scores.tolist()), worth=lambda worker: worth[:, worker])
    tokens, counts, found = [0] * ranks, [0] * ranks, []
    for request in range(requests):
        workers = {rank: WorkerLoad(10**6, tokens[rank], counts[rank]) for rank in range(ranks)}
        rank = dispatch(workers, [request])
        tokens[rank], counts[rank] = tokens[rank] + 1, counts[rank] + 1
        found.append(rank)
    lengths = np.ones(requests, dtype=np.int64)
    assert found == request_ranks(scores, lengths, worth=worth).tolist()
