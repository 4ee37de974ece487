"""Every implementation of Group at every size: the sums and their bits, the bytes sent, and the order of
returned rows.
"""

from __future__ import annotations

import doctest
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tests.support import collectives_scenarios
from tests.support.collectives_scenarios import ROWS, WIDTH, Outcome

from moesaic.experts.collectives import group as groups
from moesaic.experts.collectives import routing
from moesaic.experts.collectives.one_shot import local_group
from moesaic.experts.collectives.packets import metadata_bytes

PATIENCE = 120.0
KINDS, SIZES = ("threads", "processes"), (1, 2, 3, 4)
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, METADATA, MESSAGES = range(6)
Outcomes = Callable[[str, int], list[Outcome]]
each = pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, marks=pytest.mark.slow if kind == "processes" else ())
        for kind in KINDS
        for size in SIZES
    ],
)


def in_threads(size: int) -> list[Outcome]:
    outcomes: list[Outcome] = [{} for _ in range(size)]
    ends = local_group(size)

    def body(rank: int) -> None:
        outcomes[rank] = collectives_scenarios.run(ends[rank])

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return outcomes


def in_processes(size: int, folder: Path) -> list[Outcome]:
    files = [folder / f"{size}-{rank}.npz" for rank in range(size)]
    command = [sys.executable, "-m", "tests.support.collectives_rank", str(folder / f"s{size}")]
    children = []
    for rank, file in enumerate(files):
        suite = [*command, str(rank), str(size), "suite", str(file)]
        children.append(subprocess.Popen(suite, stdout=subprocess.DEVNULL))
    for child in children:
        with child:
            assert child.wait(PATIENCE) == 0
    assert not (folder / f"s{size}").exists()
    return [dict(np.load(file)) for file in files]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The results of each rank, by kind and size of the group. Each group runs once."""
    folder = tmp_path_factory.mktemp("groups")
    return cache(lambda kind, size: in_threads(size) if kind == "threads" else in_processes(size, folder))


@each
def test_an_all_reduce_gives_the_same_bits_to_all(kind: str, size: int, outcomes: Outcomes) -> None:
    wanted = collectives_scenarios.total([collectives_scenarios.rows(rank) for rank in range(size)])
    odd = collectives_scenarios.total([collectives_scenarios.rows(rank, 1)[:, :5] for rank in range(size)])
    for found in outcomes(kind, size):
        assert np.array_equal(found["all_reduce/sum"], wanted)
        assert np.array_equal(found["all_reduce_odd/sum"], odd)
        assert found["all_reduce/traffic"][ALL_REDUCE] == 2 * (size - 1) * 4 * ROWS * WIDTH // size


@each
def test_a_reduce_scatter_gives_each_rank_its_rows(kind: str, size: int, outcomes: Outcomes) -> None:
    whole = collectives_scenarios.total([collectives_scenarios.rows(rank) for rank in range(size)])
    sizes = collectives_scenarios.sizes(size)
    ends = np.cumsum([0, *sizes])
    for rank, found in enumerate(outcomes(kind, size)):
        share = ROWS // size
        assert np.array_equal(found["reduce_scatter/own"], whole[rank * share : (rank + 1) * share])
        assert found["reduce_scatter/traffic"][REDUCE_SCATTER] == (size - 1) * 4 * ROWS * WIDTH // size
        places = collectives_scenarios.order()[ends[rank] : ends[rank + 1]]
        assert np.array_equal(found["reduce_scatter_v/own"], whole[places])
        assert found["reduce_scatter_v/traffic"][REDUCE_SCATTER] == 4 * WIDTH * (ROWS - sizes[rank])


@each
def test_an_all_gather_gives_all_rows_to_all(kind: str, size: int, outcomes: Outcomes) -> None:
    sizes = collectives_scenarios.sizes(size)
    wanted = np.concatenate([collectives_scenarios.rows(rank, 6) for rank in range(size)])
    varied = np.concatenate([collectives_scenarios.rows(rank, count) for rank, count in enumerate(sizes)])
    for rank, found in enumerate(outcomes(kind, size)):
        assert np.array_equal(found["all_gather/all"], wanted)
        assert np.array_equal(found["all_gather_v/all"], varied)
        assert found["all_gather/traffic"][ALL_GATHER] == (size - 1) * 4 * (6 * size) * WIDTH // size
        assert found["all_gather_v/traffic"][ALL_GATHER] == (size - 1) * 4 * WIDTH * sizes[rank]


@each
def test_a_permutation_is_undone(kind: str, size: int, outcomes: Outcomes) -> None:
    whole = collectives_scenarios.total([collectives_scenarios.rows(rank) for rank in range(size)])
    for found in outcomes(kind, size):
        assert np.array_equal(found["there_and_back/all"], whole)


@each
def test_pairs_come_back_to_their_places(kind: str, size: int, outcomes: Outcomes) -> None:
    for rank, found in enumerate(outcomes(kind, size)):
        ids = collectives_scenarios.route(rank, size).expert_ids
        hidden = collectives_scenarios.rows(rank, len(ids))
        assert np.array_equal(
            found["pairs/answers"], hidden[:, None] * (ids[:, :, None] + 1).astype(np.float32)
        )


@each
def test_weighted_sums_come_back_to_their_rows(kind: str, size: int, outcomes: Outcomes) -> None:
    for rank, found in enumerate(outcomes(kind, size)):
        ids, weights = (
            collectives_scenarios.route(rank, size).expert_ids,
            collectives_scenarios.weights(rank, size),
        )
        hidden = collectives_scenarios.rows(rank, len(ids)).astype(np.float64)
        wanted = hidden * (weights * (ids + 1)).sum(1, dtype=np.float64)[:, None]
        np.testing.assert_allclose(found["sums/answers"], wanted, rtol=1e-5)


@each
def test_a_row_goes_once_to_a_rank(kind: str, size: int, outcomes: Outcomes) -> None:
    routes = [collectives_scenarios.route(rank, size) for rank in range(size)]
    for rank, found in enumerate(outcomes(kind, size)):
        seen = [row for route in routes for row in range(len(route.owners)) if rank in route.owners[row]]
        assert found["pairs/seen"].tolist() == seen
        there = [len({*line.tolist()} - {rank}) for line in routes[rank].owners]
        back_pairs = sum(int((route.owners == rank).sum()) for route in routes)
        back_rows = len(seen)
        own_pairs, own_rows = (routes[rank].owners == rank).sum(), (routes[rank].owners == rank).any(1).sum()
        distinct = [len(routes[rank].rows(other)) for other in range(size) if other != rank]
        metadata = sum(metadata_bytes(count, collectives_scenarios.TOP_K) for count in distinct)
        pairs, sums = found["pairs/traffic"], found["sums/traffic"]
        assert pairs[ALL_TO_ALL] == 4 * WIDTH * (sum(there) + back_pairs - own_pairs)
        assert sums[ALL_TO_ALL] == 4 * WIDTH * (sum(there) + back_rows - own_rows)
        assert pairs[METADATA] == sums[METADATA] == metadata


@each
def test_notes_follow_the_rows(kind: str, size: int, outcomes: Outcomes) -> None:
    sizes = collectives_scenarios.sizes(size)
    shuffled = np.concatenate([np.arange(count) + 100 * rank for rank, count in enumerate(sizes)])
    for rank, found in enumerate(outcomes(kind, size)):
        assert np.array_equal(found["notes/all"][collectives_scenarios.order()], shuffled)
        assert found["notes/traffic"][METADATA] == (size - 1) * 4 * sizes[rank]


@each
def test_the_first_rank_is_heard_by_all(kind: str, size: int, outcomes: Outcomes) -> None:
    for rank, found in enumerate(outcomes(kind, size)):
        assert found["message/said"].tolist() == [b"", b"0 says 1", b"0 says 2" * 2]
        assert found["message/traffic"][MESSAGES] == (0 if rank else (size - 1) * 24)


@each
def test_many_rounds_of_changing_sizes(kind: str, size: int, outcomes: Outcomes) -> None:
    for found in outcomes(kind, size):
        assert found["many/wrong"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_every_byte_is_counted_once(size: int, outcomes: Outcomes) -> None:
    for found in outcomes("processes", size):
        counted = sum(value.sum() for name, value in found.items() if name.endswith("/traffic"))
        assert counted == found["sent"]


def test_examples() -> None:
    assert doctest.testmod(groups).failed == 0
    assert doctest.testmod(routing).failed == 0
