"""Kernels that round the rows of weights in integers to int8, and multiply integers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.kernels.test_compressed_native import NONE, SIZES, Mlp, Size, uneven
from tests.kernels.test_quantized_layout import codes_of
from tests.kernels.test_rounding import everything_else
from tests.support.guarded import Guarded
from tests.support.integer_products import Integers, expert, gated_mlp, linear, linears, products
from tests.support.native_kernels import same_bits, stored

from moesaic.core.errors import ConfigError
from moesaic.core.weight_types import (
    NATIVE_DTYPES,
    QUANTIZATIONS,
    expert_code,
    is_integer,
    join_dtypes,
    split_dtype,
)
from moesaic.kernels import table
from moesaic.kernels.matrix import QuantizedMatrix
from moesaic.kernels.quantized_layout import Bytes, dequantize, pack

HERE = [name for name in table.instruction_sets() if name in table.INTEGER]
OTHERS = ("amx_int8", "avx2_vnni_int8")
"""test_integer_sets.py compares their bits with those of the other kernels."""
each = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in OTHERS else ()) for name in HERE]
    or [pytest.param("", marks=pytest.mark.skip("no integer kernels for this CPU"))],
)
TYPES = [name for name in QUANTIZATIONS if is_integer(name)]
MIXED = ["int4_offset+int8_16", "int8+int4", "int8_16+int8_offset"]


@pytest.fixture(autouse=True)
def auto_again() -> Iterator[None]:
    yield
    table.pick("cpu").set_threads(1, False)


def packed(rng: np.random.Generator, dtype: str, size: Size) -> list[Bytes]:
    inner, down = split_dtype(dtype)
    types = inner, inner, down
    return [
        pack(kind, *codes_of(rng, QUANTIZATIONS[kind], *shape))
        for kind, shape in zip(types, size.shapes, strict=True)
    ]


def compute(
    name: str, dtype: str, size: Size, mlps: list[list[Bytes]], rows: torch.Tensor, ids: list[int]
) -> torch.Tensor:
    table.pick("cpu", name)
    found = size.run([*map(Mlp, mlps), NONE], expert_code(dtype), rows.numpy(), ids)
    return torch.from_numpy(found.view(np.float32))


@each
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [*TYPES, *MIXED])
def test_experts_have_the_bits_of_the_slow_products(name: str, dtype: str, size: Size) -> None:
    rng = np.random.default_rng(size.h)
    mlps = [packed(rng, dtype, size) for _ in range(2)]
    rows = torch.from_numpy(0.1 * rng.standard_normal((19, size.h), dtype=np.float32))
    rows *= torch.from_numpy(rng.choice([0.001, 1, 50], (19, size.h)).astype(np.float32))
    ids = [0] * 16 + [1] * 3
    wanted = torch.cat(
        [
            expert(table.INTEGER[name], dtype, mlps[0], rows[:16]),
            expert(table.INTEGER[name], dtype, mlps[1], rows[16:]),
        ]
    )
    assert same_bits(compute(name, dtype, size, mlps, rows, ids), wanted)
    exact = compute(table.INTEGER[name], dtype, size, mlps, rows, ids)
    assert size.h == 1 or not same_bits(exact, wanted)


@each
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["int8", "int4_offset+int8_16"])
def test_rows_have_the_same_bits_alone_and_in_any_batch(name: str, dtype: str, size: Size) -> None:
    rng = np.random.default_rng(size.w)
    mlps = [packed(rng, dtype, size) for _ in range(4)]
    rows = torch.from_numpy(rng.standard_normal((200, size.h), dtype=np.float32))
    ids = uneven(rng, 200)
    wanted = compute(name, dtype, size, mlps, rows, ids)
    assert wanted.isfinite().all()
    for n, threads in ((1, 1), (2, 1), (7, 2), (9, 1), (40, 2), (200, 2)):
        table.pick("cpu", name).set_threads(threads, False)
        first = 200 - n
        assert same_bits(compute(name, dtype, size, mlps, rows[first:], ids[first:]), wanted[first:])


@each
@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_codes_do_not_overflow(name: str, dtype: str) -> None:
    kind, size = QUANTIZATIONS[dtype], Size(96, 8)
    most = 1 << kind.bits
    extremes = np.array([0, most - 1, most // 2, most // 2 - 1], dtype=np.uint8)  # of every sign and width
    for code in extremes:
        mlp = []
        for shape in size.shapes:
            scales = np.ones((shape[0], -(-shape[1] // kind.group)), dtype=np.float32)
            mlp.append(pack(dtype, np.full(shape, code), scales, scales if kind.offset else None))
        rows = torch.ones(5, 96)
        rows[1] = -1
        rows[2, ::2] = -1
        wanted = expert(table.INTEGER[name], dtype, mlp, rows)
        assert same_bits(compute(name, dtype, size, [mlp], rows, [0] * 5), wanted)


@each
@pytest.mark.parametrize("dtype", ["int8", "int4_offset"])
def test_strange_rows_stay_by_themselves(name: str, dtype: str) -> None:
    size, rng = Size(130, 64), np.random.default_rng(1)
    mlp, rows = packed(rng, dtype, size), torch.randn(6, 130)
    wanted = compute(name, dtype, size, [mlp], rows, [0] * 6)
    rows[1, 129], rows[2, 0], rows[3], rows[4] = float("nan"), float("inf"), 0, 1e-37
    found = compute(name, dtype, size, [mlp], rows, [0] * 6)
    assert same_bits(found[[0, 5]], wanted[[0, 5]])
    assert not found[1].isfinite().any() and not found[2].isfinite().any()
    assert (found[3:5] == 0).all()


@each
@pytest.mark.parametrize("dtype", ["fp8", "mxfp4", "mxfp4+int8", "bfloat16", "float32"])
def test_other_experts_have_the_bits_of_the_set_without_rounding(name: str, dtype: str) -> None:
    size, rng = Size(130, 70), np.random.default_rng(2)
    if split_dtype(dtype)[0] in QUANTIZATIONS:
        mlp = packed(rng, dtype, size)
    else:
        mlp = [
            one if dtype == "bfloat16" else rng.standard_normal(one.shape, dtype=np.float32)
            for one in size.trained(rng)
        ]
    rows = torch.randn(9, 130)
    found = compute(name, dtype, size, [mlp], rows, [0] * 9)
    assert same_bits(found, compute(table.INTEGER[name], dtype, size, [mlp], rows, [0] * 9)) and found.any()


def drawn(dtype: str, rows: int, columns: int) -> QuantizedMatrix:
    rng = np.random.default_rng([rows, columns])
    stored = pack(dtype, *codes_of(rng, QUANTIZATIONS[dtype], rows, columns))
    return QuantizedMatrix(Guarded()(torch.from_numpy(stored)), columns, dtype)


@each
@pytest.mark.parametrize("shape", [(1, 1), (9, 31), (70, 1030), (200, 96), (17, 2100)], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_linear_has_the_bits_of_the_slow_products(name: str, dtype: str, shape: tuple[int, int]) -> None:
    weight, bias = drawn(dtype, *shape), torch.randn(shape[0])
    rows = torch.randn(130, shape[1])
    wanted = linear(rows, weight, bias)
    kernels = table.pick("cpu", name)
    for count, threads in ((1, 1), (2, 1), (3, 2), (5, 2), (9, 1), (130, 2)):
        kernels.set_threads(threads, False)
        assert same_bits(kernels.linear(rows[:count], weight, bias), wanted[:count])
    assert shape[1] == 1 or not same_bits(
        table.pick("cpu", table.INTEGER[name]).linear(rows, weight, bias), wanted
    )


@each
@pytest.mark.parametrize("columns", [64, 70])
def test_halves_are_rounded_to_the_even(name: str, columns: int) -> None:
    """Rows whose largest magnitude is 127 have a scale of one, so that their numbers are codes."""
    weight = drawn("int8", 20, columns)
    rows = torch.arange(-columns, columns).float().reshape(2, columns) / 2 + 0.5
    rows[:, ::32] = 127
    rows[1, 1::32] = -127
    assert same_bits(table.pick("cpu", name).linear(rows, weight), linear(rows, weight, None))
    even = rows.round()
    assert (even != rows).any()
    assert same_bits(table.pick("cpu", name).linear(even, weight), linear(rows, weight, None))


@each
def test_each_of_three_projections_has_the_products_of_its_type(name: str) -> None:
    rows, biases = torch.randn(9, 130), [torch.randn(40), None, torch.randn(7)]
    for types in (("int4_offset", "fp8", "int8_16"), ("fp8", "mxfp4", "int8"), ("int8", "int8", "int4")):
        weights = [drawn(dtype, size, 130) for dtype, size in zip(types, (40, 5, 7), strict=True)]
        found = table.pick("cpu", name).linears(rows, weights, biases)
        table.pick("cpu", table.INTEGER[name])
        assert all(map(same_bits, found, linears(rows, weights, biases)))


@each
@pytest.mark.parametrize(("inner", "down"), [("int8", "int8"), ("int4_offset", "int8_16"), ("int8", "fp8")])
def test_a_gated_mlp_has_the_bits_of_the_slow_products(name: str, inner: str, down: str) -> None:
    mlp, rows = (
        (drawn(inner, 70, 130), drawn(inner, 70, 130), drawn(down, 130, 70)),
        0.1 * torch.randn(9, 130),
    )
    found = table.pick("cpu", name).gated_mlp(rows, *mlp)
    exact = table.pick("cpu", table.INTEGER[name]).gated_mlp(rows, *mlp)
    assert same_bits(found, gated_mlp(table.INTEGER[name], rows, *mlp)) and found.any()
    assert same_bits(found, exact) == (down == "fp8"), "all matrices must be integers"


@each
def test_all_but_integers_has_the_bits_of_the_set_without_rounding(name: str) -> None:
    for found, wanted in zip(everything_else(name), everything_else(table.INTEGER[name]), strict=True):
        assert same_bits(found, wanted)
    rows, weight = stored(7, 70), stored(5, 70, dtype=torch.bfloat16)
    assert same_bits(
        table.pick("cpu", name).linear(rows, weight),
        table.pick("cpu", table.INTEGER[name]).linear(rows, weight),
    )


@pytest.mark.parametrize("columns", [32, 100, 768, 2048, 4100])
@pytest.mark.parametrize("dtype", TYPES)
def test_rounding_costs_less_than_a_hundredth(dtype: str, columns: int) -> None:
    """Beside float64 with the same weights, of rows and weights as in models: the root of the mean square."""
    rng, kind = np.random.default_rng(columns), QUANTIZATIONS[dtype]
    groups = -(-columns // kind.group)
    codes = np.clip(
        np.rint(rng.normal(0, 0.25, (64, columns)) * (1 << kind.bits - 1)),
        -(1 << kind.bits - 1),
        (1 << kind.bits - 1) - 1,
    )
    zero = 0 if kind.values == "int8" else 1 << kind.bits - 1
    coded = (codes + zero).astype(np.int64).astype(np.uint8)
    scales = rng.uniform(0.5, 1.5, (64, groups)).astype(np.float32)
    bytes_of = pack(dtype, coded, scales, -scales * zero if kind.offset else None)
    rows = torch.from_numpy(rng.standard_normal((40, columns), dtype=np.float32))
    exact = rows.double() @ torch.from_numpy(dequantize(dtype, bytes_of, columns)).double().T
    error = products(rows, Integers.of(dtype, bytes_of, columns)).double() - exact
    relative = float(error.square().mean().sqrt() / exact.square().mean().sqrt())
    assert 0 < relative < 0.01


@pytest.mark.parametrize("name", sorted(table.INTEGER))
def test_only_its_name_picks_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert table.pick("cpu").name != f"native ({name})"
    if name in HERE:
        assert table.pick("cpu", name).name == f"native ({name})" and table.pick("cpu", name).is_integer
    monkeypatch.setattr(table, "instruction_sets", lambda: ("avx512", "avx2", "portable"))
    with pytest.raises(ConfigError, match=f"got '{name}'; allowed: auto, avx512, avx2, portable, ref"):
        table.pick("cpu", name)


def test_types_without_integers() -> None:
    assert {one for one in NATIVE_DTYPES if not is_integer(one)} == {
        "bfloat16",
        "float32",
        "compressed",
        "fp8",
        "mxfp4",
    }
    assert not is_integer(join_dtypes("mxfp4", "int8")) and not is_integer(join_dtypes("int8", "fp8"))
