"""Writes blocks to the disk, in a thread, so that no step waits for the disk.

A block that waits to be written stays in the KV cache. If its memory is needed before its turn, the block is
copied first, as long as not too many such copies wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace

from moesaic.core.metrics import StoredPrefixStats
from moesaic.models.kvcache.images import Bytes
from moesaic.policy.scheduling.stored_prefixes import PrefixChanges, PrefixPath
from moesaic.runtime.prefix_cache.entry_files import EntryFiles

LOG = logging.getLogger(__name__)
MAX_COPIED_BYTES = 256 << 20
"""Bytes of blocks that wait outside of the KV cache. What comes on top of them is not written."""
PAUSE_SECONDS = 30.0
"""Nothing is written for so long after the disk was full or failed."""
FLUSH_SECONDS = 5.0
"""When the process ends, writing goes on for at most so long."""

CopyBlock = Callable[[int], Bytes]
"""Returns the content of a KV block, in memory of its own."""


class PrefixWriter:
    """A queue of blocks, and the thread that writes them."""

    def __init__(self, files: EntryFiles, block_bytes: int, copy_block: CopyBlock) -> None:
        self._files, self._block_bytes, self._copy_block = files, block_bytes, copy_block
        self._news = threading.Condition()
        """Protects what follows."""
        self._waiting: OrderedDict[bytes, int | Bytes] = OrderedDict()
        """Digest -> the KV block, or a copy of its content."""
        self._waiting_blocks: dict[int, bytes] = {}
        """KV block -> digest, for those that wait in the cache."""
        self._used_paths: deque[list[bytes]] = deque()
        """Paths that were used, whose files get a new time once they are written."""
        self._stored_digests: set[bytes] = set()
        """Digests of entries that are on the disk, as far as this process knows."""
        self._copied_bytes = 0
        self._deadline: float | None = None
        """When writing ends, at the end of the process."""
        self._pause_end = 0.0
        self._has_logged = False
        self._written_bytes = self._dropped_blocks = 0
        self._thread = threading.Thread(target=self._run, name="writing prefixes", daemon=True)
        self._thread.start()

    # ---- the worker's side

    def keep(self, changes: PrefixChanges) -> None:
        """Queue blocks that are not stored, and copy those that are evicted before they are written."""
        with self._news:
            if self._deadline is not None:
                return
            for path in changes.paths:
                self._queue(path)
            for block in changes.evicted_blocks:
                self._move_out(block)
            self._news.notify()

    def remember(self, digests: list[bytes]) -> None:
        """These entries are on the disk already."""
        with self._news:
            self._stored_digests.update(digests)

    def forget(self, digests: list[bytes]) -> None:
        """Some of these entries are missing or damaged. They are written when they are kept again."""
        with self._news:
            self._stored_digests.difference_update(digests)

    def count(self, stats: StoredPrefixStats) -> StoredPrefixStats:
        """The counts with those of this writer."""
        with self._news:
            return replace(stats, written_bytes=self._written_bytes, dropped_blocks=self._dropped_blocks)

    def close(self) -> None:
        """Write what waits, for a few seconds at most, and end the thread."""
        with self._news:
            self._deadline = time.monotonic() + FLUSH_SECONDS
            self._news.notify()
        self._thread.join(FLUSH_SECONDS + 1.0)

    def _queue(self, path: PrefixPath) -> None:
        self._used_paths.append(path.digests)
        if time.monotonic() < self._pause_end:
            return
        for block, digest in zip(path.blocks, path.digests, strict=True):
            if digest not in self._stored_digests and digest not in self._waiting:
                self._waiting[digest] = block
                self._waiting_blocks[block] = digest

    def _move_out(self, block: int) -> None:
        """Copy the content of a block that is written over next, if it waits to be written."""
        digest = self._waiting_blocks.pop(block, None)
        if digest is None:
            return
        if self._copied_bytes + self._block_bytes > MAX_COPIED_BYTES:
            del self._waiting[digest]
            self._dropped_blocks += 1
            return
        self._waiting[digest] = self._copy_block(block)
        self._copied_bytes += self._block_bytes

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._waiting and not self._used_paths and self._deadline is None:
                    self._news.wait()
                if self._deadline is not None and (not self._waiting or time.monotonic() > self._deadline):
                    break
                entry = self._take()
                used_paths = [] if entry is not None else list(self._used_paths)
                if entry is None:
                    self._used_paths.clear()
            if entry is not None:
                self._write(*entry)
            for digests in used_paths:
                self._files.touch(digests)
        for digests in self._used_paths:
            self._files.touch(digests)
        self._copy_block = _no_block  # the KV cache can be freed

    def _take(self) -> tuple[bytes, Bytes] | None:
        """The next entry to write. A block of the cache is copied while nobody can evict it."""
        if not self._waiting:
            return None
        digest, place = self._waiting.popitem(last=False)
        if isinstance(place, int):
            del self._waiting_blocks[place]
            return digest, self._copy_block(place)
        self._copied_bytes -= self._block_bytes
        return digest, place

    def _write(self, digest: bytes, content: Bytes) -> None:
        try:
            old_digests = self._files.write(digest, content)
        except OSError as error:
            self._pause(error)
            return
        with self._news:
            self._stored_digests.difference_update(old_digests)
            self._stored_digests.add(digest)
            self._written_bytes += self._block_bytes

    def _pause(self, error: OSError) -> None:
        """Write nothing for a while. The log says so once."""
        if not self._has_logged:
            self._has_logged = True
            LOG.warning("--prefix-cache-dir: prefixes are not stored now (%s)", error.strerror)
        with self._news:
            self._pause_end = time.monotonic() + PAUSE_SECONDS
            self._dropped_blocks += 1 + len(self._waiting)
            self._waiting.clear()
            self._waiting_blocks.clear()
            self._copied_bytes = 0


def _no_block(block: int) -> Bytes:
    raise ValueError("the writer has ended")
