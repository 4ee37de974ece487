"""The products of table.INTEGER's kernels, in torch: slow, and as csrc/integers.h describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moesaic.core.weight_types import (
    BLOCK,
    BLOCK_TYPES,
    QUANTIZATIONS,
    is_integer,
    join_dtypes,
    split_dtype,
)
from moesaic.kernels import blocks, quantized_layout, table
from moesaic.kernels.matrix import QuantizedMatrix, Weight, kind_of
from moesaic.kernels.weights import ExpertWeights

try:
    from moesaic.kernels.native import ops

    by_kernels, linear_by_kernels, mlp_by_kernels = ops.experts, ops.linear, ops.gated_mlp
except ImportError:  # installed without a compiler
    pass

LINE = 32
"""Numbers of a row with one scale."""
LEAST_PEAK = 127 * 2.0**-126


@dataclass(frozen=True)
class Integers:
    """A matrix [rows, columns] in integers. Groups are filled up with zeros."""

    values: torch.Tensor
    """[rows, groups, size of a group] int64, without zero points."""
    scales: torch.Tensor
    """[rows, groups] float32"""
    offsets: torch.Tensor | None

    @classmethod
    def of(cls, dtype: str, stored: quantized_layout.Bytes, columns: int) -> Integers:
        """Reads rows as kernels/quantized_layout.py writes them, or ggml's blocks."""
        if dtype in BLOCK_TYPES:
            return cls.of_blocks(dtype, stored)
        kind, parts, at = QUANTIZATIONS[dtype], [], 0
        for begin in range(0, columns, BLOCK):
            groups = -(-min(BLOCK, columns - begin) // kind.group)
            size = kind.row_bytes(groups * kind.group)
            parts.append(_block(dtype, stored[:, at : at + size], groups))
            at += size
        values, scales, offsets = (
            None if one[0] is None else torch.from_numpy(np.concatenate(one, axis=1))
            for one in zip(*parts, strict=True)
        )
        assert values is not None and scales is not None
        return cls(values, scales, offsets)

    @classmethod
    def of_blocks(cls, dtype: str, stored: quantized_layout.Bytes) -> Integers:
        """Reads rows of ggml's blocks. Numbers of E2M1 are halves, so integers stand for twice as much."""
        codes, scales, offsets = blocks.decode_rows(dtype, stored)
        values = quantized_layout.TABLES[blocks.VALUES.get(dtype, "int8")][codes]
        double = 2 if dtype == "mxfp4_e8m0" else 1
        integers = torch.from_numpy((values * double).astype(np.int64))
        return cls(
            integers.reshape(*scales.shape, BLOCK_TYPES[dtype].group),
            torch.from_numpy(scales / np.float32(double)),
            None if offsets is None else torch.from_numpy(offsets),
        )


def _block(
    dtype: str, stored: quantized_layout.Bytes, groups: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    kind, rows = QUANTIZATIONS[dtype], len(stored)
    heads = np.ascontiguousarray(stored[:, : 4 * groups * (1 + kind.offset)]).view("<f4")
    codes = stored[:, 4 * groups * (1 + kind.offset) :]
    if kind.bits == 4:
        pairs = codes.reshape(rows, -1, 1, 16)
        codes = np.concatenate([pairs & 15, pairs >> 4], axis=2)
    values = quantized_layout.TABLES[kind.values][codes].astype(np.int64).reshape(rows, groups, kind.group)
    return values, heads[:, :groups], heads[:, groups:] if kind.offset else None


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, k] -> int8 values [n, lines, LINE] as int64, and scales [n, lines]."""
    short = -rows.shape[1] % LINE
    lines = torch.nn.functional.pad(rows, (0, short)).reshape(len(rows), -1, LINE)
    peaks = lines.abs().amax(dim=2)
    scales = torch.where(peaks < LEAST_PEAK, torch.zeros(()), peaks / 127)
    scales[~peaks.isfinite()] = float("nan")
    values = torch.where((scales > 0)[:, :, None], (lines / scales[:, :, None]).round(), torch.zeros(()))
    return values.long(), scales


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, rounded once to float32. The product of two float32 numbers is exact in float64."""
    return (a.double() * b.double() + c.double()).float()


def products(rows: torch.Tensor, weights: Integers) -> torch.Tensor:
    """rows [n, k] times a matrix [o, k] transposed: [n, o]."""
    values, scales = rounded(rows)
    size = weights.values.shape[2]
    values = values.reshape(len(rows), -1, size)
    out = None
    groups = weights.values.shape[1]
    for begin in range(0, groups, BLOCK // size):
        sums = torch.zeros(len(rows), len(weights.values))
        for group in range(begin, min(begin + BLOCK // size, groups)):
            codes, scale = values[:, group], scales[:, group * size // LINE, None]
            integers = codes @ weights.values[:, group].T
            sums = fused(integers.float() * scale, weights.scales[None, :, group], sums)
            if weights.offsets is not None:
                total = scale * codes.sum(dim=1, keepdim=True).float()
                sums = fused(total, weights.offsets[None, :, group], sums)
        out = sums if out is None else out + sums
    assert out is not None
    return out


def activated(base: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up with the bits of the kernels `base`: by an expert that only picks numbers."""
    width, one = gate.shape[1], torch.eye(gate.shape[1])
    none = torch.zeros_like(one)
    parts = torch.cat([one, none], dim=1), torch.cat([none, one], dim=1), torch.cat([one, none])
    mlp = ExpertWeights(*((part.contiguous(),) for part in parts))
    table.pick("cpu", base)
    rows = torch.cat([gate, up], dim=1)
    return by_kernels(mlp, rows, torch.zeros(len(rows), 1, dtype=torch.int64))[:, 0, :width]


def expert(base: str, dtype: str, stored: list[quantized_layout.Bytes], rows: torch.Tensor) -> torch.Tensor:
    """One expert. stored: gate and up [w, row_bytes], down [h, row_bytes]. base: as in `activated`."""
    hidden, width = rows.shape[1], len(stored[0])
    inner, outer = split_dtype(dtype)
    gate, up = (products(rows, Integers.of(inner, one, hidden)) for one in stored[:2])
    return products(activated(base, gate, up), Integers.of(outer, stored[2], width))


def experts(
    base: str,
    weights: ExpertWeights,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `ops.experts`, with `expert` for each pair of a row and an expert."""
    output = torch.empty(*ids.shape, hidden.shape[1]) if output is None else output
    for chosen in ids.unique().tolist():
        stored = [one.numpy() for one in weights.matrices_of(chosen)]
        row, place = torch.nonzero(ids == chosen, as_tuple=True)
        output[row, place] = expert(base, weights.packed_dtype, stored, hidden[row])
    return output


def linear(rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `ops.linear`."""
    if not isinstance(weight, QuantizedMatrix) or not is_integer(weight.kind):
        return linear_by_kernels(rows, weight, bias)
    found = products(rows, Integers.of(weight.kind, weight.stored_rows.numpy(), weight.columns))
    return found if bias is None else found + bias


def linears(
    rows: torch.Tensor, weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """As `ops.linears`."""
    return tuple(linear(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def gated_mlp(
    base: str, rows: torch.Tensor, gate_proj: Weight, up_proj: Weight, down_proj: Weight
) -> torch.Tensor:
    """As `ops.gated_mlp`."""
    mlp, dtype = (gate_proj, up_proj, down_proj), join_dtypes(kind_of(gate_proj), kind_of(down_proj))
    stored = [one.stored_rows.numpy() for one in mlp if isinstance(one, QuantizedMatrix)]
    return expert(base, dtype, stored, rows) if is_integer(dtype) else mlp_by_kernels(rows, *mlp)
