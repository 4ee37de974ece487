"""Stored prefixes of a group: each rank reads and writes the part of its own heads, as the first rank says.

The first rank looks names up, since all parts are in the directory of one host. A block counts as stored if
each rank's part is there, and as read if each rank has read its part.

Question: How do ranks store prefixes on a disk (`--prefix-cache-dir`)?
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.metrics import StoredPrefixStats
from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import Group
from moesaic.policy.scheduling.stored_prefixes import DIGEST_BYTES, PrefixChanges, PrefixPath
from moesaic.runtime.prefix_cache.part import EndedRead, OwnPart

_MARK = -(1 << 60)
"""The first number of an order. Nothing else that is announced begins with it."""
_FIELDS = 5
"""Numbers before the lists of an order: mark, kind, request, length of `blocks`, length of `pages`."""
_READ, _COLLECT, _KEEP, _EVICT, _FORGET, _END = range(6)

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Order:
    """What the first rank tells the others to do with their parts."""

    kind: int
    request_id: int = 0
    blocks: Sequence[int] = ()
    pages: Sequence[int] = ()
    """_READ: the page of the state, if there is one. _EVICT: the pages. _KEEP: index of a block and its page,
    pair after pair."""
    digests: Sequence[bytes] = ()

    def pack(self) -> bytes:
        """The inverse of `parse_order`."""
        fields = _MARK, self.kind, self.request_id, len(self.blocks), len(self.pages)
        numbers = np.array([*fields, *self.blocks, *self.pages], np.int64)
        return numbers.tobytes() + b"".join(self.digests)

    def obey(self, group: Group, part: OwnPart) -> None:
        """Do on another rank what this order says."""
        if self.kind == _READ:
            page = self.pages[0] if self.pages else None
            part.read(self.request_id, self.digests, np.array(self.blocks, np.int64), page)
        elif self.kind == _COLLECT:
            _count_least(group, part.wait_for_read(self.request_id))
        elif self.kind == _KEEP:
            pages = dict(zip(self.pages[::2], self.pages[1::2], strict=True))
            part.keep(PrefixChanges([PrefixPath(list(self.blocks), list(self.digests), pages)]))
        elif self.kind == _EVICT:
            part.keep(PrefixChanges([], list(self.blocks), list(self.pages)))
        elif self.kind == _FORGET:
            part.forget(self.digests)
        else:
            part.end_soon()


def parse_order(message: bytes) -> _Order | None:
    """The order in a message of the first rank. None: it is none. Raises ConnectionLost for a damaged one."""
    if int.from_bytes(message[:8], "little", signed=True) != _MARK:
        return None
    numbers = np.frombuffer(message[: len(message) // 8 * 8], np.int64).tolist()
    kind, request_id, num_blocks, num_pages = numbers[1:_FIELDS] if len(numbers) >= _FIELDS else (-1,) * 4
    end = _FIELDS + num_blocks + num_pages
    has_lists = min(num_blocks, num_pages) >= 0 and end <= len(numbers)
    if not (has_lists and 0 <= kind <= _END) or (len(message) - 8 * end) % DIGEST_BYTES:
        raise ConnectionLost(f"an order about prefixes of {len(message)} bytes")
    first_page = _FIELDS + num_blocks
    digests = [message[start : start + DIGEST_BYTES] for start in range(8 * end, len(message), DIGEST_BYTES)]
    return _Order(kind, request_id, numbers[_FIELDS:first_page], numbers[first_page:end], digests)


class GroupPart:
    """On the first rank: the `PrefixPart` of all ranks."""

    def __init__(
        self, group: Group, explain_loss: Callable[[ConnectionLost], MoesaicError], own_part: OwnPart
    ) -> None:
        """explain_loss: the error to raise where a rank is gone. The other ranks have to be ready."""
        self._group, self._explain_loss, self._own_part = group, explain_loss, own_part

    @property
    def has_states(self) -> bool:
        return self._own_part.has_states

    @property
    def is_reading(self) -> bool:
        return self._own_part.is_reading

    def contains(self, digest: bytes) -> bool:
        ranks = range(self._group.size)
        return all(self._own_part.contains_of_rank(digest, rank) for rank in ranks)

    def contains_state(self, digest: bytes) -> bool:
        ranks = range(self._group.size)
        return all(self._own_part.contains_state_of_rank(digest, rank) for rank in ranks)

    def read(self, request_id: int, digests: Sequence[bytes], blocks: IntArray, page: int | None) -> None:
        pages = [] if page is None else [page]
        self._announce(_Order(_READ, request_id, blocks.tolist(), pages, digests))
        self._own_part.read(request_id, digests, blocks, page)

    def take_reads(self, timeout: float = 0.0) -> list[EndedRead]:
        """The reads that have ended on the first rank. It waits until they have ended on the others."""
        return [self._collect(read) for read in self._own_part.take_reads(timeout)]

    def keep(self, changes: PrefixChanges) -> None:
        for path in changes.paths:
            pages = [number for pair in path.pages.items() for number in pair]
            self._announce(_Order(_KEEP, blocks=path.blocks, pages=pages, digests=path.digests))
        if changes.evicted_blocks or changes.evicted_pages:
            self._announce(_Order(_EVICT, blocks=changes.evicted_blocks, pages=changes.evicted_pages))
        self._own_part.keep(changes)

    def forget(self, digests: Sequence[bytes]) -> None:
        self._announce(_Order(_FORGET, digests=digests))
        self._own_part.forget(digests)

    def stats(self) -> StoredPrefixStats:
        return self._own_part.stats()

    def flush(self) -> None:
        """The other ranks notice the end of this process by themselves, and write what waits there."""
        self._own_part.flush()

    def close(self) -> None:
        with contextlib.suppress(ConnectionLost):  # a rank is gone
            self._group.announce(_Order(_END).pack())
        self._own_part.close()

    def _collect(self, read: EndedRead) -> EndedRead:
        self._announce(_Order(_COLLECT, read.request_id))
        return EndedRead(read.request_id, self._run(lambda: _count_least(self._group, read.num_blocks)))

    def _announce(self, order: _Order) -> None:
        self._run(lambda: self._group.announce(order.pack()))

    def _run(self, run: Callable[[], Result]) -> Result:
        try:
            return run()
        except ConnectionLost as lost:
            self._group.close()
            raise self._explain_loss(lost) from None


def _count_least(group: Group, num_blocks: int) -> int:
    """The least number of blocks that any rank has read."""
    return int(group.gather_notes(np.array([num_blocks]), np.arange(group.size)).min())
