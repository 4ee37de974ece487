from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.policy.dispatch import WorkerLoad, least_loaded

LOADS = st.builds(WorkerLoad, st.integers(1, 9), st.integers(0, 12), st.integers(0, 9))


def test_worked_example() -> None:
    """Most free blocks, not the smallest share of used ones; then fewer requests; then the lower id."""
    assert least_loaded({0: WorkerLoad(100, 90, 1), 1: WorkerLoad(20, 5, 9)}) == 1
    assert least_loaded({0: WorkerLoad(20, 5, 2), 1: WorkerLoad(25, 10, 1)}) == 1
    assert least_loaded({7: WorkerLoad(20, 5, 2), 3: WorkerLoad(20, 5, 2)}) == 3


def test_a_worker_may_owe_more_blocks_than_it_has() -> None:
    """Requests that wait count with blocks that they do not hold yet."""
    assert WorkerLoad(10, 14, 3).free_blocks == -4
    assert least_loaded({0: WorkerLoad(10, 14, 3), 1: WorkerLoad(10, 13, 9)}) == 1


def test_no_worker() -> None:
    with pytest.raises(ValueError, match="empty"):
        least_loaded({})


@given(st.dictionaries(st.integers(0, 5), LOADS, min_size=1))
def test_nobody_has_more_room(workers: dict[int, WorkerLoad]) -> None:
    chosen = workers[least_loaded(workers)]
    assert chosen.free_blocks == max(load.free_blocks for load in workers.values())
    assert least_loaded(dict(reversed(workers.items()))) == least_loaded(workers)
