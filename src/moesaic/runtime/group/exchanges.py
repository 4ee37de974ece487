"""The exchanges of a step: what its stages need of the other ranks, or of the host in between.

The stages of a rank are a generator. It yields each exchange, is sent the result, and returns hidden
states. So the same stages run operation by operation (`run_at_once`), inside one CUDA graph, or as several
graphs that end where the host has to take part (`between_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from moesaic.runtime.group.rows import RowCollectives


@dataclass(frozen=True)
class Exchange:
    """What the stages of a step wait for."""

    run: Callable[[int], torch.Tensor]
    """Carries it out for so many rows, the first ones of the step. Those behind them are padded rows. Returns
    the result without padded rows."""
    shape: tuple[int, ...]
    """Shape of the result for all rows of the step."""
    is_captured: bool = False
    """Whether a CUDA graph can hold it: the host knows all sizes before the step, and reads nothing."""
    is_kept: bool = False
    """Whether stages behind the next exchange read the result too."""


Stages = Generator[Exchange, torch.Tensor, torch.Tensor]
"""Stages of a step. They are sent the result of each exchange, and return hidden states."""


def next_item(stages: Stages, answer: torch.Tensor | None) -> Exchange | torch.Tensor:
    """The next exchange of `stages`, or what they return. answer: of the exchange before; None: the first."""
    try:
        return next(stages) if answer is None else stages.send(answer)
    except StopIteration as end:
        result: torch.Tensor = end.value
        return result


def run_at_once(stages: Stages, rows: int) -> torch.Tensor:
    """Run the stages of a step of so many rows, with each exchange in its place."""
    item = next_item(stages, None)
    while isinstance(item, Exchange):
        answer = item.run(rows)
        del item  # it holds the rows that it has sent
        item = next_item(stages, answer)
    return item


def between_graphs(stages: Stages, rows: int) -> Stages:
    """The stages of a step of so many rows. Of their exchanges it yields those that no graph can hold.

    The results of these are in memory that later exchanges write to, so some are copied.
    """
    item = next_item(stages, None)
    while isinstance(item, Exchange):
        answer = item.run(rows) if item.is_captured else (yield item)
        if item.is_kept and not item.is_captured:
            answer = answer.clone()
        item = next_item(stages, answer)
    return item


def all_reduce(rows: RowCollectives, addend: torch.Tensor) -> Exchange:
    """The sum of all ranks' addends [n, h], on every rank."""
    return Exchange(
        lambda count: rows.all_reduce(addend[:count]), tuple(addend.shape), is_captured=rows.capturable
    )


def reduce_scatter(rows: RowCollectives, addend: torch.Tensor, sizes: Sequence[int]) -> Exchange:
    """This rank's part of the sum of all ranks' addends [n, h]. sizes: see `RowCollectives`."""
    shape = sizes[rows.group.rank], *addend.shape[1:]

    def run(count: int) -> torch.Tensor:
        return rows.reduce_scatter(addend[:count], without_padding(sizes, count))

    return Exchange(run, shape, is_captured=rows.capturable)


def all_gather(rows: RowCollectives, own_rows: torch.Tensor, sizes: Sequence[int]) -> Exchange:
    """The rows [n, h] of all ranks, of which this one has `own_rows`. sizes: see `RowCollectives`."""

    def run(count: int) -> torch.Tensor:
        real = without_padding(sizes, count)
        return rows.all_gather(own_rows[: real[rows.group.rank]], real)

    return Exchange(run, (sum(sizes), *own_rows.shape[1:]), rows.capturable, is_kept=True)


def without_padding(sizes: Sequence[int], rows: int) -> list[int]:
    """The rows of each rank, where only the first rows of a step are real.

    >>> without_padding([4, 4], 5)
    [4, 1]
    """
    return [min(size, max(0, rows - end + size)) for size, end in zip(sizes, accumulate(sizes), strict=True)]
