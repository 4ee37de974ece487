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
from typing import NamedTuple

from moesaic.core.metrics import StoredPrefixStats
from moesaic.models.kvcache.images import Bytes
from moesaic.policy.scheduling.stored_prefixes import PrefixChanges, PrefixPath, state_digest
from moesaic.runtime.prefix_cache.entry_files import EntryFiles

LOG = logging.getLogger(__name__)
MAX_COPIED_BYTES = 64 << 20
"""Bytes of blocks that wait outside of the KV cache. What comes on top of them is not written."""
PAUSE_SECONDS = 30.0
"""Nothing is written for so long after the disk was full or failed."""
FLUSH_SECONDS = 4.0
"""When the process ends, writing goes on for at most so long. A supervisor waits for a second more."""

CopyPart = Callable[[int], Bytes]
"""Returns the content of a KV block or of a page of states, in memory of its own."""


class Place(NamedTuple):
    """A part of the memory of sequences."""

    is_page: bool
    """True: a page of states. False: a KV block."""
    number: int


class PrefixWriter:
    """A queue of KV blocks and pages of states, and the thread that writes them."""

    def __init__(self, files: EntryFiles, copy_block: CopyPart, copy_page: CopyPart) -> None:
        self._files, self._copy_block, self._copy_page = files, copy_block, copy_page
        self._news = threading.Condition()
        """Protects what follows."""
        self._waiting: OrderedDict[bytes, Place | Bytes] = OrderedDict()
        """Digest -> where the content is in memory, or a copy of it."""
        self._waiting_places: dict[Place, bytes] = {}
        """Place -> digest, for what waits in the memory of sequences."""
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
            for path in changes.paths if self._deadline is None else ():
                self._queue(path)
            for block in changes.evicted_blocks:
                self._move_out(Place(False, block))
            for page in changes.evicted_pages:
                self._move_out(Place(True, page))
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

    def end_soon(self) -> None:
        """Take nothing more, and end the thread within a few seconds. Several threads may call it."""
        with self._news:
            self._deadline = self._deadline or time.monotonic() + FLUSH_SECONDS
            self._news.notify()

    def close(self) -> None:
        """Write what waits, for a few seconds at most, and end the thread. Several threads may call it."""
        self.end_soon()
        self._thread.join(FLUSH_SECONDS + 1.0)

    def _queue(self, path: PrefixPath) -> None:
        names = []
        for index, (block, digest) in enumerate(zip(path.blocks, path.digests, strict=True)):
            names.append(digest)
            self._add(digest, Place(False, block))
            if index in path.pages:
                names.append(state_digest(digest))
                self._add(names[-1], Place(True, path.pages[index]))
        self._used_paths.append(names)

    def _add(self, digest: bytes, place: Place) -> None:
        is_known = digest in self._stored_digests or digest in self._waiting
        if not is_known and time.monotonic() >= self._pause_end:
            self._waiting[digest] = place
            self._waiting_places[place] = digest

    def _move_out(self, place: Place) -> None:
        """Copy what is written over next, if it waits to be written."""
        digest = self._waiting_places.pop(place, None)
        if digest is None:
            return
        content = self._copy(place)
        if self._copied_bytes + len(content) > MAX_COPIED_BYTES:
            del self._waiting[digest]
            self._dropped_blocks += 1
            return
        self._waiting[digest] = content
        self._copied_bytes += len(content)

    def _copy(self, place: Place) -> Bytes:
        return self._copy_page(place.number) if place.is_page else self._copy_block(place.number)

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
        with self._news:
            self._waiting.clear()
            self._waiting_places.clear()
            self._copy_block = self._copy_page = _copy_nothing  # the KV cache can be freed

    def _take(self) -> tuple[bytes, Bytes] | None:
        """The next entry to write. A block of the cache is copied while nobody can evict it."""
        if not self._waiting:
            return None
        digest, place = self._waiting.popitem(last=False)
        if isinstance(place, Place):
            del self._waiting_places[place]
            return digest, self._copy(place)
        self._copied_bytes -= len(place)
        return digest, place

    def _write(self, digest: bytes, content: Bytes) -> None:
        """Write an entry, unless another process has written it meanwhile."""
        if self._files.has_file(digest, content):
            self.remember([digest])
            return
        try:
            old_digests = self._files.write(digest, content)
        except OSError as error:
            self._pause(error)
            return
        with self._news:
            self._stored_digests.difference_update(old_digests)
            self._stored_digests.add(digest)
            self._written_bytes += len(content)

    def _pause(self, error: OSError) -> None:
        """Write nothing for a while. The log says so once."""
        if not self._has_logged:
            self._has_logged = True
            LOG.warning("--prefix-cache-dir: prefixes are not stored now (%s)", error.strerror)
        with self._news:
            self._pause_end = time.monotonic() + PAUSE_SECONDS
            self._dropped_blocks += 1 + len(self._waiting)
            self._waiting.clear()
            self._waiting_places.clear()
            self._copied_bytes = 0


def _copy_nothing(number: int) -> Bytes:
    raise ValueError("the writer has ended")
