"""Measures how fast a disk is read without the page cache, by size of a read and number of reading threads.

A cache of the hypervisor or the disk may serve a second read faster than the first. Checkpoints are read
again and again, so the repeated reads count. The first read is reported separately.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from moesaic.core.errors import ConfigError
from moesaic.offload.arena import Arena
from moesaic.offload.reading import ALIGNMENT, IN_FLIGHT, DirectFile
from moesaic.planning.hardware.timing import Clock, Show

LANDING = 64 << 20
"""Size of the memory that one thread reads into, in bytes. It is too large to stay in a processor's cache.

It is memory of an arena, as for weights, since a disk fills huge pages faster than small ones.
"""
READERS = (1, IN_FLIGHT)


@dataclass(frozen=True)
class Sizes:
    """Sizes of files and of reads, in bytes."""

    file: int = 1 << 30
    """Size of the file that is written if there is none to read."""
    least: int = 64 << 20
    """Minimum size of a file that is read."""
    blocks: tuple[int, ...] = (128 << 10, 1 << 20, 8 << 20)
    """Sizes of one read that are measured."""


@dataclass(frozen=True)
class Read:
    """The measured speed of one way of reading."""

    is_repeated: bool
    block: int
    """Bytes of one read."""
    readers: int
    """Number of threads. Each reads every `readers`-th block."""
    bandwidth: float
    """Measured bytes/s."""


@dataclass(frozen=True)
class Disk:
    """The measurements of a disk."""

    file: str
    """A description of the file that was read."""
    memory: int
    """Size of the file system in bytes."""
    direct: bool
    """True if reads bypassed the page cache. If not, the file's cached pages were dropped before the first
    read."""
    reads: tuple[Read, ...]
    write: float | None
    """Bytes/s of writing to the disk itself. None: nothing was written."""

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the best repeated read by IN_FLIGHT threads. Weights are read in this way."""
        return max(read.bandwidth for read in self.reads if read.is_repeated and read.readers == IN_FLIGHT)


WEIGHTS = (".safetensors", ".gguf")
"""How names of files with weights end."""


def measure(path: Path, sizes: Sizes, limit: float, clock: Clock, show: Show) -> Disk:
    """Measure reading the file at `path`, or the largest *.safetensors or *.gguf of that directory.

    If it has fewer than sizes.least bytes, or there is none, a file is written there and deleted at the
    end. limit: seconds for each figure. The first read and writing take up to four times as long. Raises
    ConfigError for a path that does not exist or that cannot be read or written, and for a full disk.
    """
    try:
        source = _to_read(path, sizes.least)
        if source is not None:
            return _measure_file(source, str(source), None, sizes, limit, clock, show)
        with _write_temporary_file(path, sizes, limit, clock, show) as (file, write):
            return _measure_file(
                file, f"a temporary file in {path.absolute()}", write, sizes, limit, clock, show
            )
    except OSError as error:
        allowed_values = f"a directory to write to, or a file to read ({error.strerror})"
        raise ConfigError.field("--path", str(path), allowed_values) from error


def _to_read(path: Path, least: int) -> Path | None:
    if path.is_dir():
        weight_files = (file for ending in WEIGHTS for file in path.glob(f"*{ending}"))
        shards = [file for file in weight_files if file.stat().st_size >= least]
        return max(shards, key=lambda file: file.stat().st_size, default=None)
    if path.stat().st_size < least:
        raise ConfigError.field("--path", str(path), f"a directory, or a file of at least {least} bytes")
    return path


@contextmanager
def _write_temporary_file(
    folder: Path, sizes: Sizes, limit: float, clock: Clock, show: Show
) -> Iterator[tuple[Path, float]]:
    """Write a file of random bytes.

    Yields a path to open it with, and the bytes/s of writing. The file has no name in its folder, so it is
    gone as soon as this process ends, however it ends.
    """
    # Direct reads need whole blocks.
    size = min(sizes.file, shutil.disk_usage(folder).free // 2) // ALIGNMENT * ALIGNMENT
    if size < sizes.least:
        raise ConfigError.field("--path", str(folder), f"a disk with {2 * sizes.least} bytes left")
    with tempfile.TemporaryFile(dir=folder) as file:
        start = clock()
        num_bytes = _fill(file, size, sizes.least, start + 4 * limit, clock, show)
        yield Path(f"/proc/self/fd/{file.fileno()}"), num_bytes / max(clock() - start, 1e-9)


def _fill(file: IO[bytes], size: int, piece: int, end: float, clock: Clock, show: Show) -> int:
    """Write piece after piece to the disk itself until the clock reaches `end`.

    Returns the number of bytes.
    """
    random, num_bytes = os.urandom(piece), 0
    while num_bytes < size and (not num_bytes or clock() < end):
        show("writing the file to read", num_bytes, size)
        file.write(random[: size - num_bytes])
        file.flush()
        # Otherwise the page cache would take the data, and the clock would measure memory.
        os.fsync(file.fileno())
        num_bytes = min(num_bytes + piece, size)
    show("writing the file to read", size, size)
    return num_bytes


def _measure_file(
    file: Path, description: str, write: float | None, sizes: Sizes, limit: float, clock: Clock, show: Show
) -> Disk:
    memory, size = shutil.disk_usage(file).total, file.stat().st_size // ALIGNMENT * ALIGNMENT
    blocks = [min(block, size) for block in sizes.blocks]
    ways = [(block, readers) for readers in READERS for block in dict.fromkeys(blocks)]
    with DirectFile(file) as direct_file, ThreadPoolExecutor(max(READERS)) as threads:
        # A page in the cache would be read in place of the disk.
        _drop(file)
        disk = _Reader(direct_file, clock, threads)
        show("disk", 0, len(ways) + 1)
        span, seconds = disk.read(0, size, blocks[-1], 4 * limit)
        reads = [Read(False, blocks[-1], 1, span / seconds)]
        for block, readers in ways:
            show("disk", len(reads), len(ways) + 1)
            reads.append(Read(True, block, readers, disk.read_in_parallel(span, block, readers, limit)))
        show("disk", len(ways) + 1, len(ways) + 1)
        return Disk(description, memory, direct_file.direct, tuple(reads), write)


def _drop(file: Path) -> None:
    """Drop the file's pages from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Reader:
    file: DirectFile
    clock: Clock
    threads: ThreadPoolExecutor

    def read_in_parallel(self, span: int, block: int, readers: int, limit: float) -> float:
        """Bytes/s of `readers` threads. Each reads every `readers`-th block of the first `span` bytes."""
        running = [
            self.threads.submit(self.read, reader * block, span, block, limit, readers, repeat=True)
            for reader in range(readers)
        ]
        results = [reading.result() for reading in running]
        return sum(num_bytes for num_bytes, _ in results) / max(seconds for _, seconds in results)

    def read(
        self, first: int, span: int, block: int, limit: float, step: int = 1, repeat: bool = False
    ) -> tuple[int, float]:
        """Read blocks first, first + step * block, ... of the first `span` bytes, for at most `limit`
        seconds.

        repeat: start over after the last block. Returns the bytes read and the seconds.
        """
        slots = max(1, min(LANDING, span) // block)
        memory = Arena(slots * block).take(slots * block).numpy().data
        places = [memory[slot * block : (slot + 1) * block] for slot in range(slots)]
        offsets = range(first, max(span - block, first) + 1, step * block)
        start, num_bytes, count = self.clock(), 0, 0
        while repeat or count < len(offsets):
            num_bytes += self.file.read(offsets[count % len(offsets)], places[count % len(places)])
            count += 1
            if self.clock() - start >= limit:
                break
        return num_bytes, max(self.clock() - start, 1e-9)
