"""What a rank computes around an exchange of rows: it permutes them, adds them up, restores their order."""

from __future__ import annotations

import functools

import torch


def permute_rows(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Returns [n, h] rows[order], as a reduce-scatter sends them. rows: [n, h]; order: [n] int64."""
    return rows.index_select(0, order)


def restore_rows(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The inverse of `permute_rows`, after an all-gather: row i goes to index order[i]."""
    return torch.empty_like(rows).index_copy_(0, order, rows)


def sum_ranks(addends: torch.Tensor, ranks: int, copies: int = 1) -> torch.Tensor:
    """Returns [copies * m, ...]: the sum of the ranks' addends, in the order of the ranks, so many times.

    addends: [ranks * m, ...] rank after rank. A copy goes to each rank in the exchange that follows. One rank
    has nothing to add: its rows are copied.
    """
    total = functools.reduce(torch.add, addends.chunk(ranks) if ranks > 1 else [addends])
    return torch.cat([total] * copies) if copies > 1 else total
