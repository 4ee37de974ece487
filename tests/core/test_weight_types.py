from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.weight_types import (
    BLOCK,
    COMPRESSED_DTYPE,
    GROUP,
    GROUP_BYTES,
    HEAD,
    NATIVE_DTYPES,
    NUMBER_BYTES,
    expert_code,
    is_native,
    is_packed,
    join_dtypes,
    row_bytes,
    split_dtype,
)


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
    assert row_bytes(COMPRESSED_DTYPE, count) == HEAD * heads + GROUP_BYTES * groups


def test_whole_blocks_take_three_quarters_and_their_heads() -> None:
    assert row_bytes(COMPRESSED_DTYPE, 7 * BLOCK) == 7 * (BLOCK * 12 // 8 + HEAD)


def test_another_type_is_none() -> None:
    with pytest.raises(KeyError):
        row_bytes("int3", 3)


def test_types_of_gate_and_down_go_together_in_a_name_and_in_a_number() -> None:
    assert join_dtypes("int8", "int8") == "int8" and split_dtype("int8") == ("int8", "int8")
    both = join_dtypes("int4_offset", "int8_16")
    assert split_dtype(both) == ("int4_offset", "int8_16") and is_packed(both) and is_native(both)
    assert expert_code("fp8") == NATIVE_DTYPES.index("fp8")
    assert divmod(expert_code(both), 256) == (
        NATIVE_DTYPES.index("int8_16") + 1,
        NATIVE_DTYPES.index("int4_offset"),
    )
    assert not is_packed("float32") and is_native("float32") and not is_native("float16")
