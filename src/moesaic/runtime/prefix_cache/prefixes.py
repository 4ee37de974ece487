"""Looks up prefixes on the disk, reads them into the KV cache, and has them written.

Two threads read, apart from the steps of the model. A request whose prefix is read waits in the scheduler.

Question: How does the KV of a prompt come back from the disk (`--prefix-cache-dir`)?
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from moesaic.core.metrics import StoredPrefixStats
from moesaic.core.request import Request
from moesaic.core.tokens import STATE_CHUNK, IntArray
from moesaic.models.kvcache.images import Bytes
from moesaic.policy.scheduling.kvblocks import block_contents
from moesaic.policy.scheduling.schedulers.actions import Event, KeepPrefixes, PrefixRead, ReadPrefix
from moesaic.policy.scheduling.stored_prefixes import chain_digests, state_digest
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


class StoredPrefixes:
    """Stores and reads nothing: for workers without --prefix-cache-dir."""

    @property
    def is_reading(self) -> bool:
        """Whether a read is under way or its event was not taken."""
        return False

    def count_stored_tokens(self, requests: Sequence[Request]) -> dict[int, int]:
        """Request -> how many of its first tokens seem to be stored. Requests without any are left out."""
        return {}

    def read(self, action: ReadPrefix) -> None:
        """Begin to read blocks. `take_events` has the event of the end."""

    def keep(self, action: KeepPrefixes) -> None:
        """Have blocks written. What is evicted next is copied now, if it must be."""

    def take_events(self, timeout: float = 0.0) -> list[Event]:
        """The reads that have ended. Waits up to `timeout` seconds for the first one."""
        return []

    def forget(self, request_ids: Sequence[int]) -> None:
        """These requests ended or were cancelled. Unknown ids are ignored."""

    def stats(self) -> StoredPrefixStats:
        return StoredPrefixStats()

    def close(self) -> None:
        """Write what waits, for a few seconds at most."""


class PrefixesOnDisk(StoredPrefixes):
    """Stores prefixes in a directory, and reads them from there."""

    def __init__(
        self,
        memory: BlockMemory,
        block_size: int,
        root: bytes,
        files: EntryFiles,
        on_read: Callable[[], None] | None = None,
    ) -> None:
        """root: the digest before first blocks. on_read: called from a thread when a read has ended."""
        self._memory, self._block_size, self._root, self._files = memory, block_size, root, files
        self._on_read = on_read
        self._stride = math.lcm(block_size, STATE_CHUNK) // block_size if memory.page_bytes else 1
        """A state is stored at the end of every so many blocks, at most."""
        self._writer = PrefixWriter(files, memory.copy_block, memory.copy_page)
        self._queue = ThreadPoolExecutor(1, "reading prefixes")
        self._readers = ThreadPoolExecutor(READERS, "reading KV blocks")
        self._digests: dict[int, list[bytes]] = {}
        """Request -> names of its first blocks, as far as they seem to be stored."""
        self._news = threading.Condition()
        """Protects what follows."""
        self._events: list[Event] = []
        self._num_reading = 0
        """Reads whose events were not taken."""
        self._stats = StoredPrefixStats()
        self._has_logged = False
        self._close = weakref.finalize(self, _close, self._queue, self._readers, self._writer)

    # ---- the worker's side

    @property
    def is_reading(self) -> bool:
        return self._num_reading > 0

    def count_stored_tokens(self, requests: Sequence[Request]) -> dict[int, int]:
        counts = {}
        for request in requests:
            digests = self._find(request)
            if digests:
                self._digests[request.request_id] = digests
                counts[request.request_id] = len(digests) * self._block_size
        return counts

    def read(self, action: ReadPrefix) -> None:
        digests = self._digests[action.request_id][action.first_block :]
        self._num_reading += 1
        page = action.states[2] if action.states else None
        self._queue.submit(self._read, action.request_id, digests, action.blocks, page)

    def keep(self, action: KeepPrefixes) -> None:
        self._writer.keep(action.changes)

    def take_events(self, timeout: float = 0.0) -> list[Event]:
        if not self._num_reading:
            return []
        with self._news:
            if timeout and not self._events:
                self._news.wait(timeout)
            events, self._events = self._events, []
        self._num_reading -= len(events)
        return events

    def forget(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._digests.pop(request_id, None)

    def stats(self) -> StoredPrefixStats:
        with self._news:
            stats = self._stats
        return self._writer.count(stats)

    def close(self) -> None:
        self._close()
        self._writer.close()  # another thread may have begun to close it

    def _find(self, request: Request) -> list[bytes]:
        """The names of the first blocks of a prompt that are stored. Its last token is always computed."""
        tokens: IntArray = np.asarray(request.prompt_token_ids, dtype=np.int64)
        salt, num_blocks = request.params.cache_salt.encode(), (len(tokens) - 1) // self._block_size
        contents = block_contents(tokens, self._block_size, 0, num_blocks, salt)
        digests = chain_digests(self._root, contents)
        stored_digests = list(itertools.takewhile(self._files.contains, digests))
        self._writer.forget(digests[len(stored_digests) :])
        return stored_digests[: self._last_state(stored_digests)]

    def _last_state(self, digests: list[bytes]) -> int:
        """After how many of these blocks a request can go on: all of them, or those up to the last state."""
        if not self._memory.page_bytes:
            return len(digests)
        ends = range(len(digests) // self._stride * self._stride, 0, -self._stride)
        return next((end for end in ends if self._files.contains(state_digest(digests[end - 1]))), 0)

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
            self._events.append(PrefixRead(request_id, num_read))
            self._count(read_tokens=num_read * self._block_size)
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
                    self._count(damaged_entries=1)
            return False
        put(content)
        with self._news:
            self._count(read_bytes=len(content))
        return True

    def _count(self, read_tokens: int = 0, read_bytes: int = 0, damaged_entries: int = 0) -> None:
        stats = self._stats
        self._stats = StoredPrefixStats(
            read_tokens=stats.read_tokens + read_tokens,
            read_bytes=stats.read_bytes + read_bytes,
            damaged_entries=stats.damaged_entries + damaged_entries,
        )

    def _log_once(self, problem: str) -> None:
        with self._news:
            has_logged, self._has_logged = self._has_logged, True
        if not has_logged:
            LOG.warning("--prefix-cache-dir: %s", problem)


def _close(queue: ThreadPoolExecutor, readers: ThreadPoolExecutor, writer: PrefixWriter) -> None:
    queue.shutdown(wait=False, cancel_futures=True)
    readers.shutdown(wait=False, cancel_futures=True)
    writer.close()
