from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic.offload.reading import ALIGNMENT, IN_FLIGHT, PIECE, DirectFile, ParallelReads

DATA = random.Random(0).randbytes(PIECE + 5 * ALIGNMENT + 123)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the bytes of DATA, all of them on the disk."""
    file = tmp_path_factory.mktemp("reading") / "file"
    with file.open("wb") as opened:
        opened.write(DATA)
        opened.flush()
        os.fsync(opened.fileno())
    return file


def memory(size: int) -> memoryview:
    """Memory that begins at a page."""
    return memoryview(mmap.mmap(-1, size))


def descriptors(path: Path) -> int:
    """How often this process has the file open."""
    links = Path("/proc/self/fd").iterdir()
    return sum(str(path) == str(link.readlink()) for link in links if link.is_symlink())


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("offset", [0, ALIGNMENT, PIECE - ALIGNMENT, PIECE + ALIGNMENT])
@pytest.mark.parametrize("size", [ALIGNMENT, 3 * ALIGNMENT, PIECE + 2 * ALIGNMENT, 2 * PIECE])
def test_the_bytes_of_the_file(path: Path, direct: bool, offset: int, size: int) -> None:
    into = memory(size)
    into[:] = b"\x5a" * size
    with DirectFile(path, direct) as file:
        got = file.read(offset, into)
    wanted = DATA[offset : offset + size]
    assert got == len(wanted) and into[:got] == wanted
    assert set(into[got:].tolist()) <= {0x5A}, "behind the file's end nothing is written"


@pytest.mark.parametrize("direct", [True, False])
def test_behind_the_end_there_is_nothing(path: Path, direct: bool) -> None:
    with DirectFile(path, direct) as file:
        assert file.read(PIECE + 5 * ALIGNMENT, memory(ALIGNMENT)) == 123
        assert file.read(PIECE + 6 * ALIGNMENT, memory(ALIGNMENT)) == 0
        assert file.read(0, memory(ALIGNMENT)[:0]) == 0


@pytest.mark.parametrize("direct", [True, False])
def test_only_whole_blocks(path: Path, direct: bool) -> None:
    into = memory(4 * ALIGNMENT)
    with DirectFile(path, direct) as file:
        for offset, part in (
            (1, into),
            (-ALIGNMENT, into),
            (0, into[: ALIGNMENT + 1]),
            (0, into[512 : 512 + ALIGNMENT]),
        ):
            with pytest.raises(ValueError, match="allowed: multiples of 4096"):
                file.read(offset, part)
    assert not any(into)


def cached(path: Path) -> int:
    """The number of the file's blocks that are in the page cache."""
    with path.open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    blocks = np.zeros(-(-len(mapped) // ALIGNMENT), np.uint8)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (mapped, blocks)]
    if ctypes.CDLL(None).mincore(pointers[0], ctypes.c_size_t(len(mapped)), pointers[1]):
        pytest.skip("this system does not tell what is cached")
    return int((blocks & 1).sum())


@pytest.fixture
def droppable(path: Path) -> Path:
    """The file with nothing in the page cache. Skips the test where the file system always caches."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(path):
        pytest.skip("this file system keeps its files in memory")
    return path


@pytest.mark.parametrize("direct", [True, False])
def test_nothing_stays_in_the_page_cache(droppable: Path, direct: bool) -> None:
    into = memory(PIECE + 6 * ALIGNMENT)
    with DirectFile(droppable, direct) as file:
        file.read(0, into[: 3 * ALIGNMENT])
        assert cached(droppable) == 0
        file.read(0, into)
    assert cached(droppable) == 0


def test_plain_reads_do_not_take_what_was_cached_before(droppable: Path) -> None:
    droppable.read_bytes()
    assert cached(droppable) > PIECE // ALIGNMENT
    with DirectFile(droppable, direct=False):
        assert cached(droppable) == 0


# ---- file systems without O_DIRECT


def refuse_to_open(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, "no direct reads")
        return opened(path, flags, *rest, **more)

    opened = os.open
    monkeypatch.setattr(os, "open", refuse)


def refuse_to_read(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        if isinstance(buffers[0], mmap.mmap):  # the block that is tried
            raise OSError(number, "no direct reads")
        return read(descriptor, buffers, offset)

    read = os.preadv
    monkeypatch.setattr(os, "preadv", refuse)


@pytest.mark.parametrize("refuse", [refuse_to_open, refuse_to_read])
def test_plain_reads_take_the_place_of_direct_ones(
    path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[pytest.MonkeyPatch, int], None]
) -> None:
    refuse(monkeypatch, errno.EINVAL)
    with DirectFile(path) as file:
        assert not file.direct and descriptors(path) == 1
        into = memory(2 * ALIGNMENT)
        assert file.read(ALIGNMENT, into) == len(into) and into == DATA[ALIGNMENT : 3 * ALIGNMENT]


@pytest.mark.parametrize("refuse", [refuse_to_open, refuse_to_read])
def test_other_errors_are_told(
    path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[pytest.MonkeyPatch, int], None]
) -> None:
    refuse(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="no direct reads"):
        DirectFile(path)
    assert descriptors(path) == 0


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for direct in (True, False):
        with pytest.raises(FileNotFoundError):
            DirectFile(tmp_path / "none", direct)


# ---- the end


@pytest.mark.parametrize("direct", [True, False])
def test_files_are_closed(path: Path, direct: bool) -> None:
    file = DirectFile(path, direct)
    assert descriptors(path) == 1
    file.close()
    file.close()
    assert descriptors(path) == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.read(0, memory(ALIGNMENT))
    file = DirectFile(path, direct)
    del file
    assert descriptors(path) == 0, "the object's end closes it too"


def test_so_many_reads_are_made_at_once() -> None:
    before = set(threading.enumerate())
    parallel, together = ParallelReads(), threading.Barrier(IN_FLIGHT, timeout=60)
    meeting = [lambda: together.wait() + 1] * (3 * IN_FLIGHT)  # none ends before IN_FLIGHT have begun
    assert parallel.run(meeting) == 3 * sum(range(1, IN_FLIGHT + 1))
    parallel.close()
    parallel.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("reading weights")]


@pytest.mark.parametrize("bad", range(5))
def test_after_an_error_none_is_running_and_the_next_reads_are_whole(bad: int) -> None:
    parallel, running = ParallelReads(), []

    def read(number: int) -> int:
        running.append(number)
        try:
            if number == bad:
                raise OSError(errno.EIO, "the disk failed")
            return number
        finally:
            running.remove(number)

    reads = [lambda number=number: read(number) for number in range(5)]
    with pytest.raises(OSError, match="the disk failed"):
        parallel.run(reads)
    assert not running
    assert parallel.run([reads[number] for number in range(5) if number != bad]) == 10 - bad
    assert parallel.run([]) == 0
    parallel.close()
