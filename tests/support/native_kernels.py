"""What the tests of the native kernels share: weights as in a mapped file, and tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.core.experts import SILU, Activation
from moesaic.kernels.reference.cache import decode
from moesaic.kernels.table import INTEGER, REFERENCE, ROUNDING, Kernels, instruction_sets

ROWS = (0, 1, 2, 3, 5, 7, 8, 13, 49, 130)
WIDTHS = (1, 7, 24, 33, 100, 1030, 2100)
"""Widths of rows. They are no multiples of a vector, and some are longer than the block that sums
are cut at.
"""
STORED = (torch.float32, torch.bfloat16)
CACHED = (*STORED, torch.int8)
LOGITS = {"amx_bf16x2": 3e-4}
"""How far logits may be from those in float32, as a share of the largest, where it is not 1e-4.

Two parts of a number hold 16 of its 24 bits.
"""
ROUNDING_NAMES = {f"native ({name})" for name in ROUNDING}


def native_sets(without: Collection[str] = INTEGER) -> list[Any]:
    """This CPU's instruction sets as parameters: the fastest unmarked, the others slow.

    amx_bf16x2 is marked full: amx_bf16 and amx_bf16x3 have the same code with fewer and with more parts. So
    is amx_bf16 where tiles are emulated, which takes long.
    """
    fastest, *others = instruction_sets() or ("",)
    if not fastest:
        return [pytest.param("", marks=pytest.mark.skip("no native kernels in this build"))]
    marks = {"amx_bf16x2": pytest.mark.full}
    if "amx_tile" not in Path("/proc/cpuinfo").read_text():
        marks["amx_bf16"] = pytest.mark.full
    rest = [name for name in others if name not in without]
    return [fastest, *(pytest.param(name, marks=marks.get(name, pytest.mark.slow)) for name in rest)]


def stored(*shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> torch.Tensor:
    """Random numbers between an odd element of a larger buffer and its end, as in a memory-mapped file."""
    buffer = torch.randn(math.prod(shape) + 1).mul_(spread).to(dtype)
    return buffer[1:].view(shape)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Whether two tensors are equal up to `tolerance` times the largest number."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if wanted.numel():
        assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


def met(native: Kernels, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows as the products of `native` with a weight [o, i] or, of heads, [H, i, o] take them.

    Those in ROUNDING round rows that meet bf16 weights, of heads where the numbers of a sum lie together.
    amx_bf16x2 then takes the sum of two bf16 numbers.
    """
    if weight.dtype is not torch.bfloat16 or weight.stride(1) != 1:
        return rows
    rounded = rows.bfloat16().to(rows.dtype)
    if native.name in ROUNDING_NAMES:
        return rounded
    return rounded + (rows - rounded).bfloat16() if native.name == "native (amx_bf16x2)" else rows


def rounds_attention(native: Kernels, dtype: torch.dtype) -> bool:
    """Whether `native` rounds queries and chances to bf16 over a cache of this type."""
    return native.name in ROUNDING_NAMES and dtype is torch.bfloat16


def close_attention(
    native: Kernels,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    *options: Any,
    plain: Callable[..., torch.Tensor] = REFERENCE.paged_attention,
    tolerance: float = 1e-5,
    **more: Any,
) -> torch.Tensor:
    """Attention of `native`, after a check that it is that of `plain` over the decoded cache.

    It may differ by `tolerance` times the largest number. A rounded chance is off by 2^-8 of itself at most.
    """
    found = native.paged_attention(query, keys, values, *options, **more)
    rounds = rounds_attention(native, keys.dtype)
    seen = query.bfloat16().float() if rounds else query
    own_keys, own_values = decode(keys), None if values is None else decode(values)
    wanted = plain(seen, own_keys, own_values, *options, **more)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if not wanted.numel():
        return found
    allowed = tolerance * wanted.abs().max()
    if rounds:
        of_values = own_keys[..., : wanted.shape[-1]] if own_values is None else own_values
        allowed = allowed + plain(seen, own_keys, of_values.abs(), *options, **more) * 2.0**-8
    assert bool(((found - wanted).abs() <= allowed).all())
    return found


EDGE = 2e-6
"""The possible difference between two orders of a sum, as a share of the largest inner number of an MLP."""


def activated(kind: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The definition of an activation, in double precision."""
    limit = float("inf") if kind.limit is None else kind.limit
    gate, up = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    return (up + kind.up_offset) * gate * torch.sigmoid(kind.alpha * gate)


def close_mlp(
    native: Kernels,
    found: torch.Tensor,
    rows: torch.Tensor,
    mlp: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (None, None, None),
    activation: Activation = SILU,
) -> None:
    """Whether [n, h] is the gated MLP (gate, up, down) of rows [n, h], up to 1e-5 of the largest number.

    biases: of gate, up and down. Where inner numbers are rounded, one on the edge between two bf16 numbers
    may be either of them.
    """
    gate, up, down = (weight.double() for weight in mlp)
    rows = met(native, rows, mlp[0]).double()
    of_gate, of_up, of_down = (0.0 if bias is None else bias for bias in biases)
    inner = activated(activation, rows @ gate.t() + of_gate, rows @ up.t() + of_up)
    edge = EDGE * inner.abs().max() if inner.numel() else 0.0
    low, high = (met(native, one.float(), mlp[2]).double() for one in (inner - edge, inner + edge))
    wanted = met(native, inner.float(), mlp[2]).double() @ down.t() + of_down
    allowed = 1e-5 * wanted.abs().max() if wanted.numel() else 0.0
    assert (found.shape, found.dtype) == (wanted.shape, torch.float32)
    assert bool(((found - wanted).abs() <= allowed + (high - low) @ down.abs().t()).all())


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit. NaN equals NaN, and 0 is not -0."""
    integer = {4: torch.int32, 2: torch.int16, 1: torch.int8}[wanted.dtype.itemsize]
    return found.dtype == wanted.dtype and torch.equal(
        found.contiguous().view(integer), wanted.contiguous().view(integer)
    )
