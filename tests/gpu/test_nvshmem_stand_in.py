"""The stand-in for NVSHMEM: processes without common memory that write into each other's."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.support import gpu_nvshmem
from tests.support.gpu_graphs import Graph, graphs
from tests.support.gpu_nvshmem import NvshmemByTcp, StandInHeap, nvshmem
from tests.support.gpu_sanitizer import DEVICE, STREAM, in_thread, sanitized
from tests.support.hosts import end_with_parent, soon
from tests.support.tcp_heap import TcpHeap
from triton.runtime.errors import InterpreterError

from moesaic.core.errors import ConfigError
from moesaic.gpu.nvshmem import symmetric_heap
from moesaic.gpu.triton.launching import launch
from moesaic.kernels.moving import pin_tensor

SIZE = 1 << 16
calls = SimpleNamespace(put_signal=None, at_least=None)
"""The module whose functions the kernels below call."""


# ---- processes of a job


@dataclass
class Job:
    """This process is PE 0, `others[i]` is PE i + 1."""

    heap: StandInHeap
    others: Sequence[BaseProcess]
    ends: Sequence[Connection]

    @property
    def below(self) -> TcpHeap:
        return self.heap.below


Child = Callable[[TcpHeap, Connection], None]


@contextlib.contextmanager
def joined(count: int, child: Child, late: float = 0.001) -> Iterator[Job]:
    """A job of this process, which has the device and graphs, and of `count` others, which run `child`."""
    context = multiprocessing.get_context("fork")
    others, ends = [], []
    for pe in range(1, count + 1):
        mine, theirs = context.Pipe()
        others.append(context.Process(target=_run, args=(child, pe, count + 1, late, theirs)))
        others[-1].start()
        theirs.close()
        ends.append(mine)
    try:
        with sanitized(), graphs(), nvshmem(late) as jobs:
            name = jobs.unique_id()
            for end in ends:
                end.send_bytes(name)
            yield Job(jobs.join(name, 0, count + 1, SIZE), others, ends)
    finally:
        for process, end in zip(others, ends, strict=True):
            process.kill()
            process.join()
            end.close()


def _run(child: Child, pe: int, pes: int, late: float, end: Connection) -> None:
    end_with_parent()
    with sanitized(), contextlib.closing(NvshmemByTcp(late)) as jobs:
        child(jobs.join(end.recv_bytes(), pe, pes, SIZE).below, end)


def until(heap: TcpHeap, place: int, number: int) -> None:
    """Wait until the own word there is `number`."""
    soon(lambda: heap.word(place) == number, 20)


def _show(heap: TcpHeap, end: Connection) -> None:
    """Another process: shows its memory as often as it is asked."""
    with contextlib.suppress(EOFError):
        while end.recv():
            end.send(heap.memory.copy())


# ---- puts

STRIDE, PUTS = 40, 1500
"""Bytes of a put's place, and puts to each process. A place begins with the word."""


def _numbers_and_sizes() -> list[tuple[int, int]]:
    drawn = random.Random(1)
    return [(number, drawn.randrange(STRIDE - 7)) for number in range(1, PUTS + 1)]


def _check_all(heap: TcpHeap, end: Connection) -> None:
    """Look at the bytes of each put as soon as its word is there. Sends the numbers of wrong puts, and all
    numbers in the order in which they came."""
    sizes, wrong, order = dict(_numbers_and_sizes()), [], []
    words = heap.memory[: STRIDE * PUTS].view(np.int64)[:: STRIDE // 8]
    known = np.zeros(PUTS, np.bool_)
    while not known.all():
        for at in np.flatnonzero((words != 0) & ~known).tolist():
            known[at], number = True, int(words[at])
            order.append(number)
            found = heap.memory[STRIDE * at + 8 : STRIDE * at + 8 + sizes[number]]
            if number != at + 1 or not (found == number % 251 + 1).all():
                wrong.append(number)
        time.sleep(0)
    end.send((wrong, order))


def test_bytes_are_there_before_their_word_and_puts_arrive_in_any_order() -> None:
    with joined(2, _check_all, late=0.0005) as job:
        heap = job.below
        for number, size in _numbers_and_sizes():
            source = STRIDE * (number - 1) + 8
            heap.memory[source : source + size] = number % 251 + 1
            for pe in (2, 1):
                heap.put(source, source, size, source - 8, number, pe)
        for end in job.ends:
            wrong, order = end.recv()
            assert wrong == [] and sorted(order) == list(range(1, PUTS + 1))
            behind = sum(later < earlier for earlier, later in itertools.pairwise(order))
            assert behind > 10, "puts came in the order in which they were sent"
        heap.quiet()


def test_a_source_that_is_overwritten_too_early_is_noticed() -> None:
    """By a kernel, which does not wait. What a stream puts has been read before the stream goes on."""
    with joined(1, _show, late=0.05) as job:
        heap = job.below
        heap.memory[:4096] = 1
        heap.put(0, 0, 2048, 4096, 1, 1)
        job.heap.put(2048, 2048, 2048, 4104, 1, 1)
        heap.memory[:4096] = 2
        job.heap.quiet()
        job.ends[0].send(True)
        found = job.ends[0].recv()
        assert found[4096:4112].view(np.int64).tolist() == [1, 1]
        assert (found[:2048] == 2).all() and (found[2048:4096] == 1).all()


def test_quiet_waits_until_everything_has_arrived() -> None:
    with joined(2, _show, late=0.02) as job:
        for number in range(1, 101):
            job.below.put(0, 0, 0, 8 * number, number, 1 + number % 2)
        job.heap.quiet()
        for pe, end in enumerate(job.ends, 1):
            end.send(True)
            words = end.recv()[:808].view(np.int64)
            assert words.tolist() == [number if 1 + number % 2 == pe else 0 for number in range(101)]


def test_a_process_writes_to_itself() -> None:
    with joined(0, _show) as job:
        job.below.memory[:8] = 7
        job.heap.put(64, 0, 8, 128, -3, 0)
        job.heap.quiet()
        assert job.below.memory[64:72].tolist() == [7] * 8 and job.below.word(128) == 2**64 - 3


# ---- processes that end or stand still


def test_puts_to_a_process_that_was_killed_vanish() -> None:
    with joined(2, _show) as job:
        os.kill(job.others[0].pid or 0, signal.SIGKILL)
        for number in range(1, 51):
            for pe in (1, 2):
                job.below.put(0, 0, 4096, 8192, number, pe)
        job.heap.quiet()
        job.below.put(0, 0, 8, 8192, 51, 1)
        job.below.put(0, 0, 8, 8192, 51, 2)
        job.heap.quiet()
        job.ends[1].send(True)
        assert job.ends[1].recv()[8192:8200].view(np.int64) == 51


def test_a_frozen_process_holds_up_no_other_one() -> None:
    with joined(2, _show) as job:
        os.kill(job.others[0].pid or 0, signal.SIGSTOP)
        heap, puts = job.below, 400
        for number in range(1, puts + 1):  # more than sockets hold
            heap.put(0, 0, SIZE - 8, SIZE - 8, number, 1)
        heap.put(0, 0, 8, 64, 9, 2)
        heap.links[2].quiet()
        job.ends[1].send(True)
        assert job.ends[1].recv()[64:72].view(np.int64) == 9
        waiting = threading.Thread(target=job.heap.below.quiet, daemon=True)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive(), "a frozen process has taken all puts"
        os.kill(job.others[0].pid or 0, signal.SIGCONT)
        waiting.join(20)
        assert not waiting.is_alive()


# ---- the order of a stream, and what is checked


def test_a_put_comes_after_what_the_stream_does_before() -> None:
    with joined(0, _show) as job:
        job.heap.tensor[:8].copy_(pin_tensor(torch.full((8,), 5, dtype=torch.uint8)), non_blocking=True)
        assert job.below.memory[0] == 0
        job.heap.put(64, 0, 8, 128, 1, 0)
        job.heap.quiet()
        assert job.heap.tensor[64:72].tolist() == [5] * 8
        job.heap.await_signal(128, 1)
        with pytest.raises(AssertionError, match="is 1, not 2: a GPU would wait for ever"):
            job.heap.await_signal(128, 2)


@pytest.mark.parametrize(
    ("put", "says"),
    [
        ((SIZE, 0, 1, 0, 1, 0), "1 bytes at 65536 of a heap of 65536"),
        ((0, SIZE - 8, 9, 0, 1, 0), "9 bytes at 65528"),
        ((0, 0, -1, 0, 1, 0), "-1 bytes at 0"),
        ((0, 0, 1, SIZE, 1, 0), "8 bytes at 65536"),
        ((0, 0, 1, 4, 1, 0), "a word at 4"),
        ((0, 0, 1, 0, 1, 1), "process 1 of 1"),
    ],
)
def test_puts_to_no_place_are_refused(put: tuple[int, int, int, int, int, int], says: str) -> None:
    with joined(0, _show) as job, pytest.raises(AssertionError, match=says):
        job.heap.put(*put)


# ---- joining


def test_a_job_begins_when_all_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu_nvshmem.ADDRESS, "127.0.0.2")
    with sanitized(), contextlib.ExitStack() as closing:
        jobs = [closing.enter_context(contextlib.closing(NvshmemByTcp())) for _ in range(4)]
        name = jobs[0].unique_id()
        assert len(name) == gpu_nvshmem.NAME_BYTES and b"127.0.0.2:" in name
        heaps: dict[int, StandInHeap] = {}

        def join(pe: int) -> None:
            with in_thread():
                heaps[pe] = jobs[pe].join(name, pe, 4, 64)

        threads = [threading.Thread(target=join, args=(pe,)) for pe in range(4)]
        for thread in threads[:-1]:
            thread.start()
        host, _, port = name[16:].rstrip(b"\0").decode().partition(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"knows no token..")
            assert stranger.recv(1) == b"" and not heaps
        threads[-1].start()
        for thread in threads:
            thread.join(20)
        for one, other in itertools.product(range(4), range(4)):
            heaps[one].below.put(0, 0, 0, 8 * one, 1 + one, other)
        for heap in heaps.values():
            heap.quiet()
        assert {heap.below.memory[:32:8].tobytes() for heap in heaps.values()} == {b"\1\2\3\4"}


def test_what_cannot_join_is_refused() -> None:
    with sanitized(), nvshmem() as jobs:
        assert symmetric_heap.jobs(DEVICE) is jobs
        with pytest.raises(ConfigError, match="a name of 3 bytes; this version's have 128"):
            jobs.join(b"abc", 0, 1, 64)
        name = jobs.unique_id()
        assert jobs.join(name, 0, 1, 64).tensor.tolist() == [0] * 64
        with pytest.raises(ConfigError, match="in a job already"):
            jobs.join(name, 0, 1, 64)
    with sanitized(), nvshmem() as jobs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_nvshmem, "PATIENCE", 0.05)
        with pytest.raises(ConfigError, match="process 0 of 2: not all of them have joined: timed out"):
            jobs.join(jobs.unique_id(), 0, 2, 64)


# ---- kernels in Triton's interpreter


@triton.jit
def _ask(places, sizes, step, PES: tl.constexpr):
    """One program a process: send it the bytes, and the next number into its word."""
    pe = tl.program_id(0)
    if pe < PES:
        source, target = tl.load(places), tl.load(places + 1)
        calls.put_signal(target, source, tl.load(sizes + pe), tl.load(places + 2), tl.load(step) + 1, pe)


@triton.jit
def _await(words, step, polls, PES: tl.constexpr):
    """One program: until all words have the next number. The number is then the last one, or -1."""
    each = tl.arange(0, PES)
    number, missing, left = tl.load(step) + 1, 1, polls + 0
    while (missing > 0) & (left > 0):
        there = calls.at_least(tl.load(words + each), number + tl.zeros([PES], tl.int64))
        missing = PES - tl.sum(there.to(tl.int32), 0)
        left -= 1
    tl.store(step, tl.where(missing == 0, number, -1))


def _answer(heap: TcpHeap, end: Connection) -> None:
    """Another process: doubles the bytes that it gets, and sends them back to where they belong."""
    mine, size = 1024 * (1 + heap.pe), end.recv()
    for number in itertools.count(1):
        until(heap, 0, number)
        heap.memory[mine : mine + size] = 2 * heap.memory[512 : 512 + size]
        heap.put(mine, mine, size, 64 + 8 * heap.pe, number, 0)


def _in_kernels(job: Job) -> tuple[list[Callable[[], None]], torch.Tensor, torch.Tensor]:
    """What asks both other processes and waits for them, the bytes that it sends, and the last number."""
    base = job.heap.tensor.data_ptr()
    places = torch.tensor([base + 256, base + 512, base], device=DEVICE)
    sizes, step = torch.tensor([0, 3, 5], device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    words = torch.tensor([base + 72, base + 80], device=DEVICE)
    for end, size in zip(job.ends, (3, 5), strict=True):
        end.send(size)
    ask = partial(launch, _ask, (3,), places, sizes, step, PES=3)
    return [ask, partial(launch, _await, (1,), words, step, 100000, PES=2)], job.heap.tensor[256:264], step


def _check_answers(job: Job, sent: int) -> None:
    for pe, size in ((1, 3), (2, 5)):
        at = 1024 * (1 + pe)
        assert job.heap.tensor[at : at + 6].tolist() == [2 * sent] * size + [0] * (6 - size)


def test_kernels_put_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, call in gpu_nvshmem.CALLS.items():
        monkeypatch.setattr(calls, name, call)
    with joined(2, _answer) as job:
        work, sent, step = _in_kernels(job)
        for number in range(1, 4):
            sent.fill_(10 * number)
            for one in work:
                one()
            assert int(step) == number
            _check_answers(job, 10 * number)


def test_graphs_put_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, call in gpu_nvshmem.CALLS.items():
        monkeypatch.setattr(calls, name, call)
    with joined(2, _answer) as job:
        work, sent, step = _in_kernels(job)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for one in work:
                one()
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing: a put"):
                job.heap.put(0, 0, 0, 0, 1, 0)
        assert int(step) == 0 and job.below.word(72) == 0
        monkeypatch.setattr(Graph, "beside", True)
        for number in range(1, 4):
            sent.fill_(20 * number)
            graph.replay()
            STREAM.synchronize()
            assert int(step) == number
            _check_answers(job, 20 * number)


def test_kernels_that_leave_the_heap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, call in gpu_nvshmem.CALLS.items():
        monkeypatch.setattr(calls, name, call)
    with joined(0, _show) as job:
        step = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        words = torch.tensor([job.heap.tensor.data_ptr() + SIZE], device=DEVICE)
        with pytest.raises(InterpreterError, match="is not in the symmetric heap"):
            launch(_await, (1,), words, step, 1, PES=1)
