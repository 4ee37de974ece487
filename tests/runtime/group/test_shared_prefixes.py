"""Prefixes of a group on a disk: a block counts where every rank has its part."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from moesaic.core.errors import ConnectionLost
from moesaic.experts.collectives.group import Group
from moesaic.experts.collectives.one_shot import local_group
from moesaic.models.kvcache.images import Bytes
from moesaic.policy.scheduling.stored_prefixes import (
    PrefixChanges,
    PrefixPath,
    chain_digests,
    rename_for_rank,
    state_digest,
)
from moesaic.runtime.group.shared_images import next_message
from moesaic.runtime.group.shared_prefixes import GroupPart, parse_order
from moesaic.runtime.prefix_cache.entry_files import FOLDER, EntryFiles
from moesaic.runtime.prefix_cache.part import OwnPart

RANKS = 3
PATH = PrefixPath([4, 5, 6, 7], chain_digests(b"root", [b"a", b"b", b"c", b"d"]), {1: 8, 3: 9})


class Memory:
    """Blocks and pages of one rank, whose sizes differ from those of other ranks."""

    def __init__(self, rank: int) -> None:
        self.block_bytes, self.page_bytes = 100 + rank, 50 + rank
        self.rank = rank
        self.blocks: dict[int, Bytes] = {}
        self.pages: dict[int, Bytes] = {}

    def copy_block(self, block: int) -> Bytes:
        return np.full(self.block_bytes, 10 * block + self.rank, np.uint8)

    def copy_page(self, page: int) -> Bytes:
        return np.full(self.page_bytes, 10 * page + self.rank, np.uint8)

    def put_block(self, block: int, data: Bytes) -> None:
        self.blocks[block] = data.copy()

    def put_page(self, page: int, data: Bytes) -> None:
        self.pages[page] = data.copy()


class Ranks:
    """The ranks of a group, of which all but the first one are threads."""

    def __init__(self, directory: Path) -> None:
        self.memories = [Memory(rank) for rank in range(RANKS)]
        self.parts = [
            OwnPart(memory, EntryFiles(str(directory), 1 << 20, RANKS), rank=memory.rank)
            for memory in self.memories
        ]
        self.ends = local_group(RANKS)
        self.threads = [
            threading.Thread(target=self._follow, args=(end, part))
            for end, part in list(zip(self.ends, self.parts, strict=True))[1:]
        ]
        for thread in self.threads:
            thread.start()
        self.part = GroupPart(self.ends[0], lambda lost: lost, self.parts[0])

    def _follow(self, end: Group, part: OwnPart) -> None:
        assert next_message(end, None, part) == b"a step"  # type: ignore[arg-type]

    def read(self, page: int | None = None) -> int:
        """How many blocks are read into the blocks 24 to 27."""
        self.part.read(1, PATH.digests, np.arange(24, 28), page)
        ended_reads = []
        while self.part.is_reading:
            ended_reads += self.part.take_reads(timeout=30.0)
        [read] = ended_reads
        assert read.request_id == 1
        return read.num_blocks

    def end(self) -> None:
        self.part.close()
        self.ends[0].announce(b"a step")
        for thread in self.threads:
            thread.join()
        for part in self.parts[1:]:
            part.close()


def store(directory: Path, changes: PrefixChanges) -> None:
    ranks = Ranks(directory)
    ranks.part.keep(changes)
    ranks.end()


def file_of(directory: Path, digest: bytes, rank: int) -> Path:
    return directory / FOLDER / rename_for_rank(digest, rank).hex()


def test_every_rank_reads_what_it_wrote(tmp_path: Path) -> None:
    store(tmp_path, PrefixChanges([PATH], evicted_blocks=[4], evicted_pages=[9]))
    assert len(list((tmp_path / FOLDER).iterdir())) == RANKS * 6
    ranks = Ranks(tmp_path)
    assert all(map(ranks.part.contains, PATH.digests))
    assert [ranks.part.contains_state(digest) for digest in PATH.digests] == [False, True, False, True]
    assert ranks.read(page=29) == 4
    for memory in ranks.memories:
        for block, place in zip(PATH.blocks, range(24, 28), strict=True):
            assert (memory.blocks[place] == memory.copy_block(block)).all()
        assert (memory.pages[29] == memory.copy_page(9)).all()
    ranks.end()


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_block_counts_only_if_all_ranks_have_it(damage: str, rank: int, tmp_path: Path) -> None:
    """It is written again by the rank that lacks it, once it was kept again."""
    store(tmp_path, PrefixChanges([PATH]))
    path = file_of(tmp_path, PATH.digests[2], rank)
    path.write_bytes(b"damaged") if damage == "damaged" else path.unlink()
    ranks = Ranks(tmp_path)
    assert ranks.part.contains(PATH.digests[1])
    assert ranks.part.contains(PATH.digests[2]) == (damage == "damaged")
    assert ranks.read() == 2
    assert ranks.read(page=29) == 0
    ranks.part.forget(PATH.digests[2:])
    ranks.part.keep(PrefixChanges([PATH]))
    ranks.end()
    assert len(list((tmp_path / FOLDER).iterdir())) == RANKS * 6
    again = Ranks(tmp_path)
    assert again.read(page=29) == 4
    again.end()


def test_the_state_of_one_rank_is_missing(tmp_path: Path) -> None:
    store(tmp_path, PrefixChanges([PATH]))
    (tmp_path / FOLDER / state_digest(rename_for_rank(PATH.digests[3], 1)).hex()).unlink()
    ranks = Ranks(tmp_path)
    assert not ranks.part.contains_state(PATH.digests[3]) and ranks.part.contains_state(PATH.digests[1])
    assert ranks.read(page=29) == 0
    ranks.end()


def test_damaged_orders_end_the_group() -> None:
    good = PrefixPath([1], [b"d" * 32])
    parts = Recorder()
    GroupPart(parts, lambda lost: lost, parts).keep(PrefixChanges([good]))  # type: ignore[arg-type]
    [message] = parts.messages
    assert parse_order(message) is not None
    for damaged in (message[:-1], message[:24], message[:8], message + b"x"):
        with pytest.raises(ConnectionLost):
            parse_order(damaged)
    assert parse_order(b"a step") is None


class Recorder:
    """Takes messages to a group, and what is kept."""

    size = 1

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def announce(self, message: bytes) -> bytes:
        self.messages.append(message)
        return message

    def keep(self, changes: PrefixChanges) -> None:
        pass
