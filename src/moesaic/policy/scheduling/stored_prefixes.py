"""Prefixes that are stored on a disk: their names, what is written of them, and which give way.

A full KV block is named by a digest of the block before it and of its own content. The first block follows
a digest of all that the bits depend on, such as the checkpoint. So a name stands for one content.

Question: Which stored prefixes are removed when the disk's share is full (`--prefix-cache-disk`)?
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

DIGEST_BYTES = 32
"""Bytes of a digest."""
HEADROOM = 8
"""A removal leaves limit / HEADROOM bytes free, so that the next writes remove nothing."""


class StoredEntry(NamedTuple):
    """A block that is on the disk."""

    last_use: int
    """When it was used last, in nanoseconds."""
    num_bytes: int
    name: str


@dataclass(frozen=True)
class PrefixPath:
    """The first blocks of a sequence, from the first one on."""

    blocks: list[int]
    digests: list[bytes]
    """The names of the blocks."""
    pages: dict[int, int] = field(default_factory=dict)
    """Index of a block -> the page with the state at its end, where such a snapshot is kept."""


@dataclass
class PrefixChanges:
    """What happened to known blocks since the last time that somebody asked."""

    paths: list[PrefixPath] = field(default_factory=list)
    """Paths of requests that ended or were preempted."""
    evicted_blocks: list[int] = field(default_factory=list)
    """Blocks whose content is written over next. Those of `paths` may be among them."""
    evicted_pages: list[int] = field(default_factory=list)
    """Pages of states whose content is written over next."""

    def __bool__(self) -> bool:
        return bool(self.paths or self.evicted_blocks or self.evicted_pages)


def chain_digests(root: bytes, contents: Iterable[bytes]) -> list[bytes]:
    """The digests of consecutive blocks.

    root: the digest before the first one. contents: of each block, see `kvblocks.block_contents`.

    >>> first, second = chain_digests(b"root", [b"a", b"b"])
    >>> chain_digests(first, [b"b"]) == [second]
    True
    """
    digests, digest = [], root
    for content in contents:
        digest = hashlib.blake2b(digest + content, digest_size=DIGEST_BYTES).digest()
        digests.append(digest)
    return digests


def rename_for_rank(digest: bytes, rank: int | None) -> bytes:
    """The name of the part that a rank of a group has of a block. rank: None: the process has all of it.

    >>> rename_for_rank(b"name", None)
    b'name'
    """
    if rank is None:
        return digest
    return hashlib.blake2b(digest + b"rank %d" % rank, digest_size=DIGEST_BYTES).digest()


def state_digest(digest: bytes) -> bytes:
    """The name of the state at the end of a block."""
    return hashlib.blake2b(digest + b"state", digest_size=DIGEST_BYTES).digest()


def choose_expired(entries: Sequence[StoredEntry], limit: int, num_needed_bytes: int) -> list[StoredEntry]:
    """The entries to remove before so many bytes are written, least recently used first.

    None is removed while all fits into `limit` bytes. Otherwise some room is made beyond what is needed.

    >>> old, new = StoredEntry(1, 50, "old"), StoredEntry(2, 50, "new")
    >>> [entry.name for entry in choose_expired([new, old], 120, 30)]
    ['old']
    """
    total = sum(entry.num_bytes for entry in entries)
    if total + num_needed_bytes <= limit:
        return []
    expired_entries, room = [], limit - max(num_needed_bytes, limit // HEADROOM)
    for entry in sorted(entries):
        if total <= room:
            break
        total -= entry.num_bytes
        expired_entries.append(entry)
    return expired_entries
