"""Quantised dense matrices give the same bits as the dequantised matrices in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.test_compressed_native import reading
from tests.kernels.test_quantized_layout import codes_of
from tests.support.guarded import Guarded
from tests.support.native_kernels import same_bits

from moesaic.core.weight_types import QUANTIZATIONS
from moesaic.kernels.matrix import QuantizedMatrix, Weight, concat_rows, dequantize_weight, select_rows
from moesaic.kernels.quantized_layout import pack
from moesaic.kernels.table import REFERENCE, Kernels

__all__ = ["reading"]
SHAPES = [(1, 1), (9, 31), (65, 33), (70, 1030), (3, 2100), (200, 128)]
"""Rows and columns of matrices. Most are no multiples of a vector, of a group or of a block."""
COUNTS = (1, 2, 3, 5, 8, 13, 25, 70, 400)
"""Numbers of rows: around the sizes at which the kernels choose another way."""


def drawn(dtype: str, rows: int, columns: int, seed: int = 0) -> QuantizedMatrix:
    """A random matrix. Memory that cannot be accessed follows it."""
    stored = pack(
        dtype, *codes_of(np.random.default_rng([seed, rows, columns]), QUANTIZATIONS[dtype], rows, columns)
    )
    return QuantizedMatrix(Guarded()(torch.from_numpy(stored)), columns, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", QUANTIZATIONS)
def test_a_linear_has_the_bits_of_float32(reading: Kernels, dtype: str, shape: tuple[int, int]) -> None:
    weight, bias, guarded = drawn(dtype, *shape), torch.randn(shape[0]), Guarded()
    for count in COUNTS:
        rows = guarded(torch.randn(count, shape[1]))
        wanted = reading.linear(rows, weight.floats(), bias)
        for threads in (1, 2):
            reading.set_threads(threads, False)
            assert same_bits(reading.linear(rows, weight, bias), wanted)
        alone = rows[count // 2 :][:1]
        assert same_bits(reading.linear(alone, weight, bias)[0], wanted[count // 2])
        torch.testing.assert_close(
            REFERENCE.linear(rows, weight, bias), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())
        )


THREE = [
    ("int4_offset", "int4_offset", "int8_16"),
    ("int8", "fp8", "mxfp4"),
    ("int4", "float32", "int8_offset"),
    ("float32", "int8", "float32"),
    ("bfloat16", "int8", "int8"),
    ("bfloat16", "float32", "float32"),
]


@pytest.mark.parametrize("types", THREE, ids=str)
def test_three_projections_may_have_three_types(reading: Kernels, types: tuple[str, str, str]) -> None:
    for width in (100, 1030):
        weights: list[Weight] = []
        for seed, (dtype, columns) in enumerate(zip(types, (130, 9, 40), strict=True)):
            if dtype in QUANTIZATIONS:
                weights.append(drawn(dtype, columns, width, seed))
            else:
                weights.append(torch.randn(columns, width).to(getattr(torch, dtype)))
        biases = [None, torch.randn(9), torch.randn(40)]
        for count in (1, 4, 30, 300):
            rows = torch.randn(count, width)
            wanted = [
                reading.linear(rows, dequantize_weight(one), bias)
                for one, bias in zip(weights, biases, strict=True)
            ]
            for threads in (1, 3):
                reading.set_threads(threads, False)
                found = reading.linears(rows, weights, biases)
                assert all(same_bits(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("inner", "down"), [*((one, one) for one in QUANTIZATIONS), ("int4_offset", "int8_16")]
)
def test_a_gated_mlp_has_the_bits_of_float32(reading: Kernels, inner: str, down: str) -> None:
    for hidden, width in ((33, 65), (1030, 70)):
        mlp = [drawn(inner, width, hidden, 1), drawn(inner, width, hidden, 2), drawn(down, hidden, width, 3)]
        for count in (1, 5, 40):
            rows = 0.1 * torch.randn(count, hidden)
            wanted = reading.gated_mlp(rows, *map(dequantize_weight, mlp))
            assert same_bits(reading.gated_mlp(rows, *mlp), wanted)
            assert same_bits(reading.gated_mlp(rows[-1:], *mlp)[0], wanted[-1])
            scale = float(wanted.abs().max())
            torch.testing.assert_close(REFERENCE.gated_mlp(rows, *mlp), wanted, rtol=1e-3, atol=1e-3 * scale)


@pytest.mark.parametrize("width", [1, 31, 64, 1025, 2100])
@pytest.mark.parametrize("dtype", QUANTIZATIONS)
def test_an_embedding_dequantises_the_rows_that_it_needs(reading: Kernels, dtype: str, width: int) -> None:
    table, ids = drawn(dtype, 9, width), torch.tensor([8, 0, 3, 3])
    for kernels in (reading, REFERENCE):
        assert same_bits(kernels.embed(table, ids), table.floats()[ids])


def test_rows_are_chosen_and_joined() -> None:
    one, other, third = drawn("int8", 5, 40, 1), drawn("int8", 3, 40, 2), drawn("int4", 4, 40, 3)
    chosen = select_rows(one, torch.tensor([4, 0]))
    assert isinstance(chosen, QuantizedMatrix) and torch.equal(chosen.floats(), one.floats()[[4, 0]])
    both = concat_rows([one, other])
    assert isinstance(both, QuantizedMatrix) and torch.equal(
        both.floats(), torch.cat([one.floats(), other.floats()])
    )
    mixed = concat_rows([one, third, torch.ones(1, 40, dtype=torch.bfloat16)])
    assert torch.equal(dequantize_weight(mixed), torch.cat([one.floats(), third.floats(), torch.ones(1, 40)]))
    assert torch.equal(
        dequantize_weight(select_rows(torch.arange(6.0).view(3, 2), torch.tensor([2]))),
        torch.tensor([[4.0, 5.0]]),
    )


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(
        TypeError, match=r"a matrix in int8: got torch.uint8 \(2, 35\); allowed: torch.uint8 \(2, 36\)"
    ):
        QuantizedMatrix(torch.zeros(2, 35, dtype=torch.uint8), 30, "int8")


def test_refusals_of_native_kernels(reading: Kernels) -> None:
    weight, rows = drawn("int8", 4, 40), torch.randn(2, 40)
    with pytest.raises(ValueError, match="does not fit"):
        reading.linear(torch.randn(2, 41), weight)
    with pytest.raises(TypeError, match="gate, up and down differ in type"):
        reading.gated_mlp(rows, weight, drawn("int4", 4, 40), drawn("int8", 40, 4))
    with pytest.raises(TypeError, match="gate, up and down differ in type"):
        reading.gated_mlp(rows, weight, weight, torch.randn(40, 4))
    gaps = QuantizedMatrix(torch.zeros(8, 72, dtype=torch.uint8)[::2], 40, "int8")
    with pytest.raises(TypeError, match="a weight is not dense"):
        reading.linear(rows, gaps)


def test_kernels_that_read_no_quantised_matrices(native: Kernels) -> None:
    if native.can_use_quantized:
        assert native.linear(torch.randn(2, 40), drawn("int8", 4, 40)).shape == (2, 4)
        return
    with pytest.raises(ValueError, match="stored: got 4; allowed: 0 to 1 with these kernels"):
        native.linear(torch.randn(2, 40), drawn("int8", 4, 40))
