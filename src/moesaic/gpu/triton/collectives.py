"""What a rank computes around an exchange of rows, one launch each: permute, restore, add up and repeat."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.gpu.triton.launching import block, launch
from moesaic.gpu.triton.rows import WIDE

FLAT = 1024
"""Numbers of a program that adds up."""


@triton.jit
def _move(rows, order, out, width, IS_INVERSE: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, permuted_row = columns < width, tl.load(order + row)
    source, target = (row, permuted_row) if IS_INVERSE else (permuted_row, row)
    numbers = tl.load(rows + source * width + columns, mask=mask)
    tl.store(out + target * width + columns, numbers, mask=mask)


@triton.jit
def _add(addends, out, numbers, RANKS: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numbers
    total = tl.load(addends + offsets, mask=mask)
    for rank in range(1, RANKS):
        total += tl.load(addends + rank * numbers + offsets, mask=mask)
    for copy in range(COPIES):
        tl.store(out + copy * numbers + offsets, total, mask=mask)


def permute_rows(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Computes what `reference.collectives.permute_rows` computes."""
    return _move_rows(rows, order, is_inverse=False)


def restore_rows(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Computes what `reference.collectives.restore_rows` computes."""
    return _move_rows(rows, order, is_inverse=True)


def sum_ranks(addends: torch.Tensor, ranks: int, copies: int = 1) -> torch.Tensor:
    """Computes what `reference.collectives.sum_ranks` computes, to the last bit."""
    if ranks == copies == 1:
        return addends
    addends, rows_per_rank = addends.contiguous(), len(addends) // ranks
    out = addends.new_empty(copies * rows_per_rank, *addends.shape[1:])
    numbers = addends.numel() // ranks
    grid = (triton.cdiv(numbers, FLAT),)
    launch(_add, grid, addends, out, numbers, RANKS=ranks, COPIES=copies, BLOCK=FLAT)
    return out


def _move_rows(rows: torch.Tensor, order: torch.Tensor, is_inverse: bool) -> torch.Tensor:
    rows = rows.contiguous()
    out, (count, width) = torch.empty_like(rows), rows.shape
    size = min(WIDE, block(width))
    launch(
        _move, (count, triton.cdiv(width, size)), rows, order, out, width, IS_INVERSE=is_inverse, BLOCK=size
    )
    return out
