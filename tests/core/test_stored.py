from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.stored import BLOCK, COMPRESSED, GROUP, GROUP_BYTES, HEAD, NUMBER_BYTES, row_bytes


@pytest.mark.parametrize("dtype", NUMBER_BYTES)
def test_numbers_of_their_own_take_the_same_each(dtype: str) -> None:
    assert [row_bytes(dtype, count) for count in (0, 1, 1025)] == [
        count * NUMBER_BYTES[dtype] for count in (0, 1, 1025)
    ]


@given(st.integers(0, 10 * BLOCK))
def test_a_compressed_row_has_a_head_a_block_and_whole_groups(count: int) -> None:
    heads, groups = 0, 0
    for begin in range(0, count, BLOCK):
        heads += 1
        groups += len(range(begin, min(begin + BLOCK, count), GROUP))
    assert row_bytes(COMPRESSED, count) == HEAD * heads + GROUP_BYTES * groups


def test_whole_blocks_take_three_quarters_and_their_heads() -> None:
    assert row_bytes(COMPRESSED, 7 * BLOCK) == 7 * (BLOCK * 12 // 8 + HEAD)


def test_another_type_is_none() -> None:
    with pytest.raises(KeyError):
        row_bytes("int3", 3)
