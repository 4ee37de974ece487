"""amx_int8 and avx2_vnni_int8 have the bits of avx512_int8 and avx2_int8.

test_integers.py compares these with the slow products, and all four in the full tier.

Tiles of amx_int8 take 16 rows, or the last 9 to 15. Fewer rows are multiplied as in avx512_int8.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.kernels.test_compressed_native import Size, uneven
from tests.kernels.test_integers import MIXED, TYPES, compute, drawn, packed
from tests.support import pairs
from tests.support.native_kernels import same_bits

from moesaic.commands.machine import examine
from moesaic.core.weight_types import QUANTIZATIONS
from moesaic.kernels import table
from moesaic.kernels.matrix import QuantizedMatrix
from moesaic.kernels.quantized_layout import pack

torch.set_num_threads(1)
OTHER = {"amx_int8": "avx512_int8", "avx2_vnni_int8": "avx2_int8"}
"""Kernels, and those with the same bits."""
HERE = [name for name in table.instruction_sets() if name in OTHER]
pytestmark = pytest.mark.skipif(not HERE, reason="neither AMX nor VNNI of 256 bits on this CPU")
ROWS = (1, 2, 8, 9, 15, 16, 17, 24, 25, 33, 100)
SHAPES = [(1, 1), (16, 31), (17, 130), (64, 128), (9, 1100), (33, 2100)]
"""Columns, and numbers of a row: parts of groups and panels, groups not a multiple of four, and blocks."""


@pytest.fixture(autouse=True)
def auto_again() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    table.pick("cpu").set_threads(1, False)


FAST = [(name, dtype, shape) for name in HERE for dtype, shape in zip(TYPES, SHAPES, strict=True)]


@pytest.mark.parametrize(("name", "dtype", "shape"), pairs.params(HERE, TYPES, SHAPES, fast=FAST))
def test_a_linear_has_the_same_bits_for_any_number_of_rows(
    name: str, dtype: str, shape: tuple[int, int]
) -> None:
    weight, bias, rows = drawn(dtype, *shape), torch.randn(shape[0]), torch.randn(max(ROWS), shape[1])
    wanted = table.pick("cpu", OTHER[name]).linear(rows, weight, bias)
    assert wanted.isfinite().all()
    kernels = table.pick("cpu", name)
    for count in ROWS:
        kernels.set_threads(1 + count % 2, False)
        assert same_bits(kernels.linear(rows[:count], weight, bias), wanted[:count]), count
        assert same_bits(kernels.linear(rows[-count:], weight, bias), wanted[-count:]), count


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if number == turn else pytest.mark.full)
        for turn, name in enumerate(HERE)
        for number, dtype in enumerate([*MIXED, *TYPES])
    ],
)
def test_experts_have_the_same_bits(name: str, dtype: str) -> None:
    """Of 200 rows in four experts, some in tiles; down projections read what such rows have become."""
    size, rng = Size(1060, 50), np.random.default_rng(0)
    mlps = [packed(rng, dtype, size) for _ in range(4)]
    rows = torch.from_numpy(0.1 * rng.standard_normal((200, size.h), dtype=np.float32))
    ids = uneven(rng, 200)
    wanted = compute(OTHER[name], dtype, size, mlps, rows, ids)
    assert wanted.isfinite().all()
    for n, threads in ((200, 2), (60, 1), (11, 1)):
        table.pick("cpu", name).set_threads(threads, False)
        assert same_bits(compute(name, dtype, size, mlps, rows[-n:], ids[-n:]), wanted[-n:])


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("dtype", ["int8", "int4_offset"])
def test_rows_with_nan_or_infinity_leave_the_others_of_a_tile_alone(name: str, dtype: str) -> None:
    weight, rows = drawn(dtype, 40, 130), torch.randn(16, 130)
    kernels = table.pick("cpu", name)
    wanted = kernels.linear(rows, weight)
    rows[3, 129], rows[7, 0], rows[9], rows[12] = float("nan"), float("-inf"), 0, 1e-37
    found, others = kernels.linear(rows, weight), [0, 1, 2, 4, 5, 6, 8, 10, 11, 13, 14, 15]
    assert same_bits(found[others], wanted[others])
    assert found[[3, 7]].isnan().all() and (found[[9, 12]] == 0).all()


@pytest.mark.skipif("amx_int8" not in HERE, reason="neither AMX with INT8 nor an emulation of it")
@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_codes_fit_into_tiles(dtype: str) -> None:
    """Codes of both signs whose products are as large as they can be."""
    kind = QUANTIZATIONS[dtype]
    most, ones = 1 << kind.bits, np.ones((20, 64 // kind.group), dtype=np.float32)
    rows = torch.ones(16, 64)
    rows[1::2] = -1
    for code in (0, most - 1, most // 2, most // 2 - 1):
        coded = np.full((20, 64), code, dtype=np.uint8)
        stored = torch.from_numpy(pack(dtype, coded, ones, ones if kind.offset else None))
        weight = QuantizedMatrix(stored, 64, dtype)
        wanted = table.pick("cpu", "avx512_int8").linear(rows, weight)
        assert same_bits(table.pick("cpu", "amx_int8").linear(rows, weight), wanted)


@pytest.mark.skipif("amx_bf16" in examine().instruction_sets, reason="this CPU has tiles")
def test_only_tests_see_emulated_tiles_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "amx_int8" in table.instruction_sets()
    monkeypatch.delenv("_MOESAIC_EMULATE_AMX")
    assert "amx_int8" not in table.instruction_sets()
