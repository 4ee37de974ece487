from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.core.errors import ConfigError
from moesaic.core.metrics import BlockStats
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.kvblocks import KVBlocks, block_contents
from moesaic.policy.scheduling.stored_prefixes import PrefixPath, chain_digests


def ints(*tokens: int) -> IntArray:
    return np.array(tokens, dtype=np.int64)


def filled(pool: KVBlocks, request_id: int, tokens: IntArray) -> list[int]:
    """Allocates, computes and commits a request. Returns its block table."""
    assert pool.allocate(request_id, tokens, len(tokens) - 1) is not None
    pool.commit(request_id, tokens, len(tokens))
    return pool.table(request_id).tolist()


def test_worked_example() -> None:
    """Two questions about one text. The second one computes only what differs."""
    pool = KVBlocks(num_blocks=5, block_size=4)
    text = (1, 2, 3, 4, 5, 6, 7, 8)

    first = ints(*text, 9)
    assert pool.allocate(0, first, reusable=8) == 0
    assert pool.table(0).tolist() == [0, 1, 2]
    pool.commit(0, first, num_computed=6)  # block 0 is full and known; block 1 holds 5, 6 so far
    pool.commit(0, first, num_computed=9)

    second = ints(*text, 10, 11)
    assert pool.allocate(1, second, reusable=9) == 8
    assert pool.table(1).tolist() == [0, 1, 3]
    assert pool.stats() == BlockStats(num_total=5, num_free=1, num_used=4, prefix_queries=19, prefix_hits=8)

    assert pool.extend(1, 12)  # 12 tokens fit in three blocks
    assert pool.extend(1, 13)
    assert not pool.extend(1, 17)  # all five blocks are in use: 0 and 1 by both
    pool.free(0)
    pool.free(1)
    assert pool.stats() == BlockStats(num_total=5, num_free=3, num_cached=2, prefix_queries=19, prefix_hits=8)


def test_blocks_that_are_not_valid_are_found_by_nobody() -> None:
    pool, tokens = KVBlocks(16, 2), ints(*range(7))
    filled(pool, 0, tokens)
    pool.free(0, valid=False)
    assert pool.stats() == BlockStats(num_total=16, num_free=16, prefix_queries=7)
    assert pool.allocate(1, tokens, reusable=6) == 0


def test_blocks_that_are_not_valid_stay_known_while_another_request_has_them() -> None:
    """Its later blocks are named after them."""
    pool, shared = KVBlocks(16, 2), ints(1, 2, 3, 4)
    filled(pool, 0, ints(*shared, 5, 6, 7))
    other = ints(*shared, 8, 9, 10)
    assert pool.allocate(1, other, reusable=6) == 4
    pool.free(0, valid=False)
    assert pool.stats().num_cached == 0
    pool.commit(1, other, 7)
    assert pool.allocate(2, ints(8, 9, 10), reusable=2) == 0, "8, 9 is known after 1, 2, 3, 4 only"
    pool.free(1, valid=False)
    assert pool.allocate(3, ints(*shared, 0), reusable=4) == 0


def test_requests_of_other_salts_share_nothing() -> None:
    pool, tokens = KVBlocks(32, 2), ints(*range(7))
    for request_id, salt in enumerate((b"", b"a", b"b", b"ab")):
        assert pool.allocate(request_id, tokens, 6, salt=salt) == 0
        pool.commit(request_id, tokens, len(tokens))
    for request_id, salt in enumerate((b"", b"a", b"b", b"ab"), start=4):
        assert pool.allocate(request_id, tokens, 6, salt=salt) == 6
        assert pool.table(request_id)[:3].tolist() == pool.table(request_id - 4)[:3].tolist()
    assert pool.allocate(8, tokens, 6, salt=b"c") == 0


def test_a_salt_is_no_beginning_of_the_tokens() -> None:
    """A salt that has the bytes of a token makes no key of another prefix."""
    pool, tokens = KVBlocks(32, 1), ints(1, 2, 3)
    filled(pool, 0, tokens)
    assert pool.allocate(1, tokens[1:], 1, salt=tokens[:1].tobytes()) == 0


def test_the_last_token_is_always_computed() -> None:
    pool = KVBlocks(8, 4)
    tokens = ints(*range(8))
    filled(pool, 0, tokens)
    assert pool.allocate(1, tokens, reusable=7) == 4
    assert pool.table(0)[1] != pool.table(1)[1]


def test_reusable_caps_the_prefix() -> None:
    pool = KVBlocks(16, 2)
    tokens = ints(*range(9))
    filled(pool, 0, tokens)
    assert pool.allocate(1, tokens, reusable=0) == 0
    assert pool.allocate(2, tokens, reusable=5) == 4
    assert pool.stats().prefix_hits == 4


def test_nothing_is_shared_before_its_step_is_done() -> None:
    pool = KVBlocks(8, 2)
    tokens = ints(1, 2, 3)
    pool.allocate(0, tokens, 2)
    assert pool.allocate(1, tokens, 2) == 0
    pool.commit(0, tokens, 1)
    assert pool.allocate(2, tokens, 2) == 0
    pool.commit(0, tokens, 2)
    assert pool.allocate(3, tokens, 2) == 2


def test_a_block_computed_twice_is_kept_once() -> None:
    pool = KVBlocks(8, 2)
    tokens = ints(1, 2, 3, 4, 5)
    pool.allocate(0, tokens, 4)
    pool.allocate(1, tokens, 4)
    pool.commit(0, tokens, 5)
    assert pool.stats().num_free == 2
    pool.commit(1, tokens, 5)
    assert pool.stats().num_free == 4
    assert pool.table(0)[:2].tolist() == pool.table(1)[:2].tolist()
    assert pool.table(0)[2] != pool.table(1)[2]


def test_equal_blocks_after_different_prefixes_differ() -> None:
    pool = KVBlocks(8, 2)
    filled(pool, 0, ints(1, 1, 5, 5, 0))
    assert pool.allocate(1, ints(2, 2, 5, 5, 0), 4) == 0


def test_the_oldest_prefix_is_evicted_leaf_first() -> None:
    pool = KVBlocks(4, 1)
    old, new = ints(1, 2, 0), ints(3, 0)
    filled(pool, 0, old[:2])
    pool.free(0)
    filled(pool, 1, new[:1])
    pool.free(1)
    assert pool.stats().num_cached == 3
    assert pool.allocate(2, ints(7, 8), 0) == 0  # the free block, then the leaf "2" of 1 -> 2
    pool.free(2)
    assert pool.allocate(3, old, 2) == 1
    pool.free(3)
    assert pool.allocate(4, new, 1) == 1


def test_use_renews_a_prefix() -> None:
    pool = KVBlocks(2, 1)
    for request_id, token in enumerate((1, 2)):
        filled(pool, request_id, ints(token))
        pool.free(request_id)
    pool.allocate(2, ints(1, 9), 1)  # holds "1", so the new block must evict "2"
    pool.free(2)
    assert pool.allocate(3, ints(1, 9), 1) == 1
    pool.free(3)
    assert pool.allocate(4, ints(2, 9), 1) == 0


def test_what_does_not_fit_changes_nothing() -> None:
    pool = KVBlocks(4, 2)
    known = ints(1, 2, 3, 4)
    filled(pool, 0, known)
    pool.free(0)
    before = pool.stats()
    assert pool.allocate(1, ints(1, 2, 3, 4, *range(5)), 8) is None
    assert pool.allocate(1, ints(1, 2, 3, 4, 5), 4, spare=2) is None  # hits are no spare blocks
    assert pool.stats() == before
    assert pool.allocate(1, ints(1, 2, 3, 4, 5), 4, spare=1) == 4


def test_without_prefix_reuse_everything_is_free_again() -> None:
    pool = KVBlocks(4, 2, prefix_reuse=False)
    filled(pool, 0, ints(1, 2, 3))
    assert pool.allocate(1, ints(1, 2, 3), 2) == 0
    pool.free(0)
    pool.free(1)
    assert pool.stats() == BlockStats(num_total=4, num_free=4)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 1), (1, 0)])
def test_sizes_are_checked(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match="got 0; allowed: at least 1"):
        KVBlocks(num_blocks, block_size)


def test_a_request_allocates_once() -> None:
    pool = KVBlocks(4, 2)
    pool.allocate(0, ints(1), 0)
    with pytest.raises(ValueError, match="request 0 has blocks already"):
        pool.allocate(0, ints(1), 0)


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(PROMPTS, st.integers(1, 3), st.booleans())
def test_the_longest_known_prefix_is_found(prompts: list[list[int]], size: int, keep: bool) -> None:
    """Compares with a plain version, which compares with every earlier prompt token by token."""
    pool = KVBlocks(1000, size)
    for request_id, prompt in enumerate(prompts):
        limit = (len(prompt) - 1) // size * size
        starts = [prompt[:length] for length in range(0, limit + 1, size)]
        known = [
            start
            for start in starts
            if any(earlier[: len(start)] == start for earlier in prompts[:request_id])
        ]
        assert pool.allocate(request_id, ints(*prompt), len(prompt) - 1) == (len(known[-1]) if known else 0)
        pool.commit(request_id, ints(*prompt), len(prompt))
        if not keep:
            pool.free(request_id)


def test_changes_name_the_paths_of_ended_requests_and_the_evicted_blocks() -> None:
    pool = KVBlocks(3, 2, stored_root=b"root")
    filled(pool, 0, ints(1, 2, 3, 4, 5))
    pool.free(0)
    changes = pool.take_changes()
    contents = block_contents(ints(1, 2, 3, 4), 2, 0, 2, b"")
    assert changes.paths == [PrefixPath([0, 1], chain_digests(b"root", contents))]
    assert not changes.evicted_blocks and not pool.take_changes()
    filled(pool, 1, ints(6, 7, 8))
    assert pool.take_changes().evicted_blocks == [1]
    pool.free(1, valid=False)
    assert not pool.take_changes().paths, "what is not valid is not stored"
