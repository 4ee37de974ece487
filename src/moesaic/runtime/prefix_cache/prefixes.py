"""Looks up prefixes on the disk, has them read into the KV cache, and has them written.

A request whose prefix is read waits in the scheduler. Threads read and write (`part.py`).

Question: How does the KV of a prompt come back from the disk (`--prefix-cache-dir`)?
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moesaic.core.metrics import StoredPrefixStats
from moesaic.core.request import Request
from moesaic.core.tokens import STATE_CHUNK, IntArray
from moesaic.policy.scheduling.kvblocks import block_contents
from moesaic.policy.scheduling.schedulers.actions import Event, KeepPrefixes, PrefixRead, ReadPrefix
from moesaic.policy.scheduling.stored_prefixes import chain_digests
from moesaic.runtime.prefix_cache.part import PrefixPart


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

    def flush(self) -> None:
        """Write what waits, for a few seconds at most, in any thread. Nothing is written afterwards."""

    def close(self) -> None:
        """The same, in the worker's thread."""


class PrefixesOnDisk(StoredPrefixes):
    """Stores prefixes in a directory, and reads them from there."""

    def __init__(self, part: PrefixPart, block_size: int, root: bytes) -> None:
        """root: the digest before first blocks."""
        self._part, self._block_size, self._root = part, block_size, root
        self._stride = math.lcm(block_size, STATE_CHUNK) // block_size
        """A state is stored at the end of every so many blocks, at most."""
        self._digests: dict[int, list[bytes]] = {}
        """Request -> names of its first blocks, as far as they seem to be stored."""
        self._read_tokens = 0

    @property
    def is_reading(self) -> bool:
        return self._part.is_reading

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
        page = action.states[2] if action.states else None
        self._part.read(action.request_id, digests, action.blocks, page)

    def keep(self, action: KeepPrefixes) -> None:
        self._part.keep(action.changes)

    def take_events(self, timeout: float = 0.0) -> list[Event]:
        ended_reads = self._part.take_reads(timeout)
        self._read_tokens += self._block_size * sum(read.num_blocks for read in ended_reads)
        return [PrefixRead(*read) for read in ended_reads]

    def forget(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._digests.pop(request_id, None)

    def stats(self) -> StoredPrefixStats:
        return replace(self._part.stats(), read_tokens=self._read_tokens)

    def flush(self) -> None:
        self._part.flush()

    def close(self) -> None:
        self._part.close()

    def _find(self, request: Request) -> list[bytes]:
        """The names of the first blocks of a prompt that are stored. Its last token is always computed."""
        tokens: IntArray = np.asarray(request.prompt_token_ids, dtype=np.int64)
        salt, num_blocks = request.params.cache_salt.encode(), (len(tokens) - 1) // self._block_size
        contents = block_contents(tokens, self._block_size, 0, num_blocks, salt)
        digests = chain_digests(self._root, contents)
        stored_digests = list(itertools.takewhile(self._part.contains, digests))
        if len(stored_digests) < len(digests):
            self._part.forget(digests[len(stored_digests) :])
        return stored_digests[: self._last_state(stored_digests)]

    def _last_state(self, digests: list[bytes]) -> int:
        """After how many of these blocks a request can go on: all of them, or those up to the last state."""
        if not self._part.has_states:
            return len(digests)
        ends = range(len(digests) // self._stride * self._stride, 0, -self._stride)
        return next((end for end in ends if self._part.contains_state(digests[end - 1])), 0)
