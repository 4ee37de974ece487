"""Reads and writes the part of stored prefixes that one process has in its memory.

A process that is a worker of its own has all of a block. The ranks of a group have the heads of their own, so
each of them stores its part under a name of its own.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from moesaic.core.metrics import StoredPrefixStats
from moesaic.core.tokens import IntArray
from moesaic.models.kvcache.images import Bytes
from moesaic.policy.scheduling.stateblocks import SNAPSHOT_TOKENS
from moesaic.policy.scheduling.stored_prefixes import PrefixChanges, rename_for_rank, state_digest
from moesaic.runtime.prefix_cache.entry_files import EntryFiles
from moesaic.runtime.prefix_cache.writer import PrefixWriter

LOG = logging.getLogger(__name__)
READERS = 2
"""Threads that read the blocks of a prefix."""


class BlockMemory(Protocol):
    """KV blocks in memory of this host, each as bytes over all layers."""

    @property
    def block_bytes(self) -> int: ...

    def copy_block(self, block: int) -> Bytes: ...

    def put_block(self, block: int, data: Bytes) -> None: ...

    @property
    def page_bytes(self) -> int:
        """Bytes of the state of a sequence at a multiple of STATE_CHUNK tokens. 0 without states."""
        ...

    def copy_page(self, page: int) -> Bytes: ...

    def put_page(self, page: int, data: Bytes) -> None: ...


class EndedRead(NamedTuple):
    """A read that has ended."""

    request_id: int
    num_blocks: int
    """The first blocks, as many as were there and undamaged."""


class PrefixPart(Protocol):
    """Where the worker's thread stores prefixes: in the part of one process, or in those of all ranks."""

    @property
    def has_states(self) -> bool:
        """Whether a request can go on at a block's end only if a state is stored there."""
        ...

    @property
    def is_reading(self) -> bool:
        """Whether a read is under way or was not taken."""
        ...

    def contains(self, digest: bytes) -> bool:
        """Whether a block seems to be stored."""
        ...

    def contains_state(self, digest: bytes) -> bool:
        """Whether the state at the end of this block seems to be stored."""
        ...

    def read(self, request_id: int, digests: Sequence[bytes], blocks: IntArray, page: int | None) -> None:
        """Begin to read these blocks into `blocks` [b]. page: for the state at their end, or None."""
        ...

    def take_reads(self, timeout: float = 0.0) -> list[EndedRead]:
        """The reads that have ended. Waits up to `timeout` seconds for the first one."""
        ...

    def keep(self, changes: PrefixChanges) -> None:
        """Have blocks written. What is evicted next is copied now, if it must be."""
        ...

    def forget(self, digests: Sequence[bytes]) -> None:
        """These blocks are not stored. They are written when they are kept again."""
        ...

    def stats(self) -> StoredPrefixStats:
        """Bytes that this process has read and written, and what was lost."""
        ...

    def flush(self) -> None:
        """Write what waits, for a few seconds at most, in any thread. Nothing is written afterwards."""
        ...

    def close(self) -> None:
        """The same, in the worker's thread."""
        ...


class OwnPart:
    """The part of this process."""

    def __init__(
        self,
        memory: BlockMemory,
        files: EntryFiles,
        on_read: Callable[[], None] | None = None,
        rank: int | None = None,
    ) -> None:
        """on_read: called from a thread when a read has ended. rank: of this process in its group. None: it
        has all of a block."""
        self._memory, self._files, self._on_read, self._rank = memory, files, on_read, rank
        self._writer = PrefixWriter(files, memory.copy_block, memory.copy_page)
        self._queue = ThreadPoolExecutor(1, "reading prefixes")
        self._readers = ThreadPoolExecutor(READERS, "reading KV blocks")
        self._news = threading.Condition()
        """Protects what follows."""
        self._ended_reads: list[EndedRead] = []
        self._num_reading = 0
        """Reads that were not taken."""
        self._read_bytes = self._damaged_entries = 0
        self._has_logged = False
        self._close = weakref.finalize(self, _close, self._queue, self._readers, self._writer)

    def bytes_of_token(self, block_size: int) -> float:
        """Bytes that a token of a long prompt takes: its keys and values, and its share of snapshots."""
        return self._memory.block_bytes / block_size + self._memory.page_bytes / SNAPSHOT_TOKENS

    @property
    def has_states(self) -> bool:
        return self._memory.page_bytes > 0

    @property
    def is_reading(self) -> bool:
        return self._num_reading > 0

    def contains(self, digest: bytes) -> bool:
        return self.contains_of_rank(digest, self._rank)

    def contains_state(self, digest: bytes) -> bool:
        return self.contains_state_of_rank(digest, self._rank)

    def contains_of_rank(self, digest: bytes, rank: int | None) -> bool:
        """Whether the part that `rank` has of a block seems to be stored."""
        return self._files.contains(rename_for_rank(digest, rank))

    def contains_state_of_rank(self, digest: bytes, rank: int | None) -> bool:
        """Whether the part that `rank` has of the state at a block's end seems to be stored."""
        return self._files.contains(state_digest(rename_for_rank(digest, rank)))

    def read(self, request_id: int, digests: Sequence[bytes], blocks: IntArray, page: int | None) -> None:
        self._num_reading += 1
        self._queue.submit(self._read, request_id, self._rename(digests), blocks, page)

    def take_reads(self, timeout: float = 0.0) -> list[EndedRead]:
        if not self._num_reading:
            return []
        with self._news:
            if timeout and not self._ended_reads:
                self._news.wait(timeout)
            ended_reads, self._ended_reads = self._ended_reads, []
        self._num_reading -= len(ended_reads)
        return ended_reads

    def wait_for_read(self, request_id: int) -> int:
        """How many blocks of a request were read. Waits until its read has ended, and takes it."""
        with self._news:
            while not (reads := [read for read in self._ended_reads if read.request_id == request_id]):
                self._news.wait()
            self._ended_reads.remove(reads[0])
        self._num_reading -= 1
        return reads[0].num_blocks

    def keep(self, changes: PrefixChanges) -> None:
        paths = [replace(path, digests=self._rename(path.digests)) for path in changes.paths]
        self._writer.keep(PrefixChanges(paths, changes.evicted_blocks, changes.evicted_pages))

    def forget(self, digests: Sequence[bytes]) -> None:
        self._writer.forget(self._rename(digests))

    def stats(self) -> StoredPrefixStats:
        with self._news:
            stats = StoredPrefixStats(read_bytes=self._read_bytes, damaged_entries=self._damaged_entries)
        return self._writer.count(stats)

    def flush(self) -> None:
        self._close()
        self._writer.close()  # another thread may have begun to close it

    def close(self) -> None:
        self.flush()

    def end_soon(self) -> None:
        """Take nothing more to write. `close` then waits for what is left of its seconds."""
        self._writer.end_soon()

    def _rename(self, digests: Sequence[bytes]) -> list[bytes]:
        return [rename_for_rank(digest, self._rank) for digest in digests]

    # ---- the threads

    def _read(self, request_id: int, digests: list[bytes], blocks: IntArray, page: int | None) -> None:
        """Read blocks until one of them is missing or damaged. With a page, all count or none."""
        num_read, has_missed = 0, threading.Event()

        def read_block(digest: bytes, block: int) -> bool:
            put = functools.partial(self._memory.put_block, block)
            is_read = not has_missed.is_set() and self._read_entry(digest, self._memory.block_bytes, put)
            if not is_read:
                has_missed.set()
            return is_read

        for is_read in self._readers.map(read_block, digests, blocks.tolist()):
            if not is_read:
                break
            num_read += 1
        if page is not None:
            num_read = self._read_state(digests, page) if num_read == len(digests) else 0
        self._writer.remember(digests[:num_read])
        self._writer.forget(digests[num_read:])
        with self._news:
            self._ended_reads.append(EndedRead(request_id, num_read))
            self._news.notify()
        if self._on_read is not None:
            self._on_read()

    def _read_state(self, digests: list[bytes], page: int) -> int:
        """Read the state at the end of these blocks. Returns how many of them count."""
        name, put = state_digest(digests[-1]), functools.partial(self._memory.put_page, page)
        if not self._read_entry(name, self._memory.page_bytes, put):
            self._writer.forget([name])
            return 0
        self._writer.remember([name])
        return len(digests)

    def _read_entry(self, digest: bytes, num_bytes: int, put: Callable[[Bytes], None]) -> bool:
        content = np.empty(num_bytes, np.uint8)
        try:
            is_read = self._files.read(digest, content)
        except OSError as error:
            is_read = False
            self._log_once(f"a file could not be read ({error.strerror})")
        if not is_read:
            if is_read is None:
                self._log_once("a damaged file was removed, and its KV is computed")
                with self._news:
                    self._damaged_entries += 1
            return False
        put(content)
        with self._news:
            self._read_bytes += len(content)
        return True

    def _log_once(self, problem: str) -> None:
        with self._news:
            has_logged, self._has_logged = self._has_logged, True
        if not has_logged:
            LOG.warning("--prefix-cache-dir: %s", problem)


def _close(queue: ThreadPoolExecutor, readers: ThreadPoolExecutor, writer: PrefixWriter) -> None:
    queue.shutdown(wait=False, cancel_futures=True)
    readers.shutdown(wait=False, cancel_futures=True)
    writer.close()
