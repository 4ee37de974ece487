"""Norms, rotary embedding, the merge and the cache's writes in Triton against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import pairs
from tests.support.triton_kernels import DEVICE, ROUNDED, TRITON, close

from moesaic.kernels.reference.cache import decode, encode
from moesaic.kernels.table import REFERENCE

pytestmark = pytest.mark.slow


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


@given(st.integers(0, 4), st.integers(1, 150))
@settings(max_examples=20)
def test_norms(rows: int, width: int) -> None:
    one, other, weight = random(rows, width), random(rows, width), random(width)
    found = TRITON.rms_norm(one.to(DEVICE), weight.to(DEVICE), 1e-6)
    close(found, REFERENCE.rms_norm(one, weight, 1e-6))
    both = TRITON.add_norm(one.to(DEVICE), other.to(DEVICE), weight.to(DEVICE), 1e-6)
    for mine, theirs in zip(both, REFERENCE.add_norm(one, other, weight, 1e-6), strict=True):
        close(mine, theirs)


def test_the_norm_of_heads() -> None:
    heads, weight = random(3, 4, 24), random(24)
    found = TRITON.rms_norm(heads.to(DEVICE), weight.to(DEVICE), 1e-6)
    close(found, REFERENCE.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize(
    ("interleaved", "normed", "turned", "cut"),
    pairs.cover((False, True), (False, True), (8, 12, 24), (False, True)),
)
def test_rope(interleaved: bool, normed: bool, turned: int, cut: bool) -> None:
    rows = random(5, 4, 30)[:, 1:, 2:26] if cut else random(5, 3, 24)
    cosine, sine = random(40, turned // 2), random(40, turned // 2)
    positions = torch.tensor([0, 7, 39, 7, 21])
    norm = random(24) if normed else None
    there = [one.to(DEVICE) for one in (rows, cosine, sine, positions)]
    found = TRITON.rope(*there, interleaved, None if norm is None else norm.to(DEVICE), 1e-6)
    close(found, REFERENCE.rope(rows, cosine, sine, positions, interleaved, norm, 1e-6))


@given(st.integers(0, 3), st.integers(1, 6), st.integers(1, 70), st.booleans())
@settings(max_examples=15)
def test_merge(count: int, top_k: int, width: int, with_dense: bool) -> None:
    residual, rows, weights = random(count, width), random(count, top_k, width), random(count, top_k)
    dense = random(count, width) if with_dense else None
    there = None if dense is None else dense.to(DEVICE)
    found = TRITON.merge(residual.to(DEVICE), there, rows.to(DEVICE), weights.to(DEVICE))
    close(found, REFERENCE.merge(residual, dense, rows, weights))
    close(TRITON.merge(residual.to(DEVICE), there, None, None), REFERENCE.merge(residual, dense, None, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_store(dtype: torch.dtype) -> None:
    rows, slots = random(6, 4, 21)[:, 1:], torch.tensor([3, 9, 0, 15, 7, 12])
    rows[0, 0], rows[1, 1], rows[2, 2] = 0.0, rows[1, 1] * 1e-37, rows[2, 2] * 1e30
    rows[3, 0, 4], rows[4, 1, 2] = torch.nan, torch.inf
    found, wanted = (encode(torch.zeros(4, 4, 3, 21), dtype) for _ in range(2))
    there = found.to(DEVICE)
    TRITON.store(there, rows.to(DEVICE), slots.to(DEVICE))
    REFERENCE.store(wanted, rows, slots)
    tolerance = ROUNDED if dtype is torch.bfloat16 else 0.0
    torch.testing.assert_close(
        decode(there.cpu()), decode(wanted), rtol=tolerance, atol=1e-38, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_rows_without_a_slot_are_not_stored(dtype: torch.dtype) -> None:
    rows = random(3, 2, 21)
    found, wanted = (encode(torch.zeros(4, 4, 2, 21), dtype) for _ in range(2))
    there = found.to(DEVICE)
    TRITON.store(there, rows.to(DEVICE), torch.tensor([-1, 9, -1], device=DEVICE))
    REFERENCE.store(wanted, rows[1:2], torch.tensor([9]))
    close(decode(there.cpu()), decode(wanted))
