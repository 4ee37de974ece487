"""Threads with pools of their own compute at the same time, with the bits of the shared pool."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.kernels.test_pool import check
from tests.support.native_kernels import same_bits, stored
from tests.support.paged_steps import cache, tokens

from moesaic.core.errors import ConfigError
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.gating import Gating
from moesaic.kernels.table import Kernels
from moesaic.kernels.weights import ExpertWeights

plain = pytest.importorskip("moesaic.kernels.native.plain", reason="no native kernels in this build")
_native = pytest.importorskip("moesaic.kernels.native._native")

torch.set_num_threads(1)
HIDDEN, WIDTH, EXPERTS = 130, 70, 6


@contextmanager
def own_pool(threads: int, cpus: tuple[int, ...] = ()) -> Iterator[None]:
    plain.own_pool(threads, cpus)
    try:
        yield
    finally:
        plain.shared_pool()


class Work:
    """Operations that keep intermediate results in every kind of memory. Another seed gives other numbers."""

    def __init__(self, native: Kernels, seed: int) -> None:
        torch.manual_seed(seed)
        self.native = native
        self.rows = torch.randn(40, HIDDEN)
        self.weight = stored(300, HIDDEN, dtype=torch.bfloat16)
        shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        self.experts = ExpertWeights(
            *(tuple(stored(*one, dtype=torch.bfloat16) for _ in range(EXPERTS)) for one in shapes)
        )
        self.ids = torch.randint(EXPERTS, (40, 2))
        self.router = stored(EXPERTS, HIDDEN)
        self.keys, self.values = cache(8, 2, 32), cache(8, 2, 32)
        several, one = tokens([5] * 8, [60] * 8, 8, seed), tokens([1], [1500], 8, seed)
        self.batches = [AttentionBatch.build(step, 8) for step in (several, one)]
        self.queries = [torch.randn(int(batch.batch.num_rows), 8, 32) for batch in self.batches]

    def __call__(self) -> list[torch.Tensor]:
        attended = [
            self.native.paged_attention(query, self.keys, self.values, batch, 0.2)
            for query, batch in zip(self.queries, self.batches, strict=True)
        ]
        gated = self.native.gate(self.rows, self.router, Gating(2, True))
        answers = self.native.experts(self.experts, self.rows, self.ids)
        return [self.native.linear(self.rows, self.weight), answers, *gated, *attended]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a, b) if a.dtype is torch.int64 else same_bits(a, b)
        for a, b in zip(found, wanted, strict=True)
    )


def at_once(jobs: list[Callable[[], None]]) -> None:
    """Runs each function in a thread of its own and raises what they raise."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result(timeout=100)


def repeated(work: Work, wanted: list[torch.Tensor], together: threading.Barrier) -> int:
    together.wait(timeout=100)
    return sum(not same(work(), wanted) for _ in range(60))


@pytest.mark.parametrize("threads", [(1, 1), (2, 2), (3, 1, 0)])
def test_two_threads_at_once_have_the_bits_of_the_shared_pool(
    native: Kernels, threads: tuple[int, ...]
) -> None:
    """A thread count of 0 means a thread that uses the shared pool."""
    native.set_threads(2, False)
    works = [Work(native, seed) for seed in range(len(threads))]
    wanted = [work() for work in works]
    together, wrong = threading.Barrier(len(threads)), []

    def job(place: int) -> None:
        if not threads[place]:
            wrong.append(repeated(works[place], wanted[place], together))
            return
        with own_pool(threads[place]):
            assert _native.threads() == threads[place]
            wrong.append(repeated(works[place], wanted[place], together))

    at_once([lambda place=place: job(place) for place in range(len(threads))])  # type: ignore[misc]
    assert wrong == [0] * len(threads)


def test_a_recording_runs_on_the_pool_of_the_thread_that_runs_it(native: Kernels) -> None:
    native.set_threads(2, False)
    assert native.recorder is not None
    works = [Work(native, seed) for seed in range(2)]
    recorders = [native.recorder() for _ in works]
    recordings = [record(work) for record, work in zip(recorders, works, strict=True)]
    wanted = [[one.clone() for one in recording.result] for recording in recordings]
    together, wrong = threading.Barrier(2), []

    def job(place: int) -> None:
        with own_pool(2):
            together.wait(timeout=100)
            wrong.append(sum(not same(recordings[place].run(), wanted[place]) for _ in range(60)))

    at_once([lambda: job(0), lambda: job(1)])
    assert wrong == [0, 0]


def tasks_now() -> set[str]:
    """The ids of all threads of this process, Python's and others."""
    return {task.name for task in Path("/proc/self/task").iterdir()}


def soon(true: Callable[[], bool]) -> bool:
    """Whether the condition becomes true. A thread ends a little after its join."""
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return true()


def test_a_thread_that_ends_frees_its_pool(native: Kernels) -> None:
    seen: list[set[str]] = []

    def job() -> None:
        before = tasks_now()
        for threads in (4, 2):
            plain.own_pool(threads)
            seen.append(tasks_now() - before)

    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    assert [len(workers) for workers in seen] == [3, 1]
    assert soon(lambda: not set.union(*seen) & tasks_now()) and _native.threads() == 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_pinned_thread_gets_its_cores_back(native: Kernels) -> None:
    everywhere = os.sched_getaffinity(0)
    one, other = sorted(everywhere)[:2]
    work = Work(native, 0)
    wanted = work()
    with own_pool(1, (other,)):
        assert os.sched_getaffinity(0) == {other} and same(work(), wanted)
        before = tasks_now()  # torch may have started threads on that core
        plain.own_pool(2, (one, other))
        assert os.sched_getaffinity(0) == {one} and same(work(), wanted)
        tasks = [int(task) for task in tasks_now() - before]
        assert soon(lambda: [os.sched_getaffinity(task) for task in tasks].count({other}) == 1)
    assert os.sched_getaffinity(0) == everywhere and _native.threads() == 1


def test_what_there_cannot_be_changes_nothing(native: Kernels) -> None:
    absent = max(os.sched_getaffinity(0)) + 1
    with own_pool(2):
        with pytest.raises(ConfigError, match="threads: got 0; allowed: 1 or more"):
            plain.own_pool(0)
        with pytest.raises(ConfigError, match=f"cpus: got {absent}; allowed: "):
            plain.own_pool(1, (absent,))
        assert _native.threads() == 2
        with pytest.raises(RuntimeError, match="has a pool of its own"):
            native.set_threads(3, False)
    plain.shared_pool()
    assert _native.threads() == 1


@pytest.mark.slow
def test_a_process_forked_by_a_thread_with_its_own_pool_computes() -> None:
    check("""
from moesaic.kernels.native import _native, plain
plain.own_pool(3)
assert same()
assert all(child_is_well() for _ in range(5)) and same() and _native.threads() == 3
plain.shared_pool()
assert all(child_is_well() for _ in range(5)) and same()
""")


@pytest.mark.slow
def test_more_threads_than_there_can_be_leave_the_shared_pool() -> None:
    check("""
from moesaic.kernels.native import _native, plain
plain.own_pool(2)
everywhere = os.sched_getaffinity(0)
size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, -1))
try:
    plain.own_pool(10_000, [min(everywhere)])
except (RuntimeError, MemoryError, OSError):
    pass
else:
    raise SystemExit("they could be started")
assert os.sched_getaffinity(0) == everywhere and _native.threads() == 3 and same()
""")
