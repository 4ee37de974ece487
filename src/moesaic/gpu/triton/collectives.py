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
def _move(rows, order, out, width, BACK: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, other = columns < width, tl.load(order + row)
    source, target = (row, other) if BACK else (other, row)
    numbers = tl.load(rows + source * width + columns, mask=inside)
    tl.store(out + target * width + columns, numbers, mask=inside)


@triton.jit
def _add(addends, out, numbers, RANKS: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    total = tl.load(addends + at, mask=inside)
    for rank in range(1, RANKS):
        total += tl.load(addends + rank * numbers + at, mask=inside)
    for copy in range(COPIES):
        tl.store(out + copy * numbers + at, total, mask=inside)


def permute_rows(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """As `reference.collectives.permute_rows`."""
    return _moved(rows, order, back=False)


def restore_rows(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """As `reference.collectives.restore_rows`."""
    return _moved(rows, order, back=True)


def sum_ranks(addends: torch.Tensor, ranks: int, copies: int = 1) -> torch.Tensor:
    """As `reference.collectives.sum_ranks`, to the last bit."""
    if ranks == copies == 1:
        return addends
    addends, each = addends.contiguous(), len(addends) // ranks
    out = addends.new_empty(copies * each, *addends.shape[1:])
    numbers = addends.numel() // ranks
    grid = (triton.cdiv(numbers, FLAT),)
    launch(_add, grid, addends, out, numbers, RANKS=ranks, COPIES=copies, BLOCK=FLAT)
    return out


def _moved(rows: torch.Tensor, order: torch.Tensor, back: bool) -> torch.Tensor:
    rows = rows.contiguous()
    out, (count, width) = torch.empty_like(rows), rows.shape
    size = min(WIDE, block(width))
    launch(_move, (count, triton.cdiv(width, size)), rows, order, out, width, BACK=back, BLOCK=size)
    return out
