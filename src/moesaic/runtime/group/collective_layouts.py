"""The collectives of a group between attention and experts: four layouts behind one switch.

After attention each rank has a partial sum [n, h] of every row. After a block each rank has the hidden state
[n, h] of every row. Between the two the layouts do this:

    deepspeed        all-reduce, each rank keeps its share of the rows, all-to-all to the experts and back,
                     all-gather (DeepSpeed-MoE)
    all-reduce       all-reduce, each rank computes its own experts for every row, all-reduce (SGLang)
    reduce-scatter   reduce-scatter in the batch's order, all-to-all there and back, all-gather
    shuffled         the same, but each row is scattered to the rank where its experts are expected
                     (Speculative MoE, section 4; Sem-MoE, section 3.4)

Payload per rank, for B rows of S bytes on G ranks, where l is the share of a token's experts on its own rank:
all-reduce 2 (G-1) B S / G, reduce-scatter or all-gather half of that, all-to-all k (1-l) B S / G each way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import equal_sizes
from moesaic.kernels.moving import move_array
from moesaic.kernels.table import MOST_RECORDED_ROWS
from moesaic.models.block import Block, GateOutput
from moesaic.policy.placement.shuffle import Shuffle
from moesaic.runtime.group.exchanges import (
    Exchange,
    Stages,
    all_gather,
    all_reduce,
    reduce_scatter,
    without_padding,
)
from moesaic.runtime.group.experts import GroupExperts
from moesaic.runtime.group.forecast import RowAssignment
from moesaic.runtime.group.rows import RowCollectives

MAX_ROWS_BETWEEN_GRAPHS = 64
"""Rows of the largest step whose recording ends at exchanges. What it sends there keeps its memory."""


@dataclass(frozen=True)
class RecordedRows:
    """The rows of recorded steps."""

    multiple: int
    """A recording has a multiple of these rows, so that each rank has some."""
    max_rows: int
    """Steps of more rows are not recorded."""


class CollectiveLayout(Protocol):
    """The collectives of a rank between attention and experts, in one of the four layouts."""

    @property
    def recorded_rows(self) -> RecordedRows:
        """Which decode steps are recorded."""
        ...

    def begin(self, token_ids: IntArray) -> None:
        """A step with these rows [n] begins."""
        ...

    def feed_forward(self, layer: int, block: Block, hidden: torch.Tensor, partial: torch.Tensor) -> Stages:
        """A routed block after its output projection.

        hidden: [n, h] before the block. partial: [n, h] this rank's partial sum of the output projection.
        Both are in the batch's order. Returns [n, h] after the block, equal on every rank.
        """
        ...


def dense_feed_forward(
    rows: RowCollectives, block: Block, hidden: torch.Tensor, partial: torch.Tensor
) -> Stages:
    """A block without routed experts, in every layout: each rank computes all of it."""
    gate_output = block.gate(hidden, (yield all_reduce(rows, partial)))
    return block.merge(gate_output, block.dense(gate_output.normed_rows), None)


class DeepSpeed:
    """`deepspeed`: every rank gets the sum of every row, and keeps its own share of the rows."""

    def __init__(self, rows: RowCollectives, experts: GroupExperts) -> None:
        self._rows, self._experts = rows, experts

    @property
    def recorded_rows(self) -> RecordedRows:
        return RecordedRows(self._rows.group.size, MAX_ROWS_BETWEEN_GRAPHS)

    def begin(self, token_ids: IntArray) -> None:
        """Needs no preparation."""

    def feed_forward(self, layer: int, block: Block, hidden: torch.Tensor, partial: torch.Tensor) -> Stages:
        total, group = (yield all_reduce(self._rows, partial)), self._rows.group
        sizes = equal_sizes(len(hidden), group.size)
        first = sum(sizes[: group.rank])
        own_rows = slice(first, first + sizes[group.rank])
        gate_output = block.gate(hidden[own_rows], total[own_rows])
        del total
        own_hidden = yield from _merge_answers(
            self._experts, _count_own_rows(sizes, group.rank), layer, block, gate_output
        )
        return (yield all_gather(self._rows, own_hidden, sizes))


class AllReduce:
    """`all-reduce`: every rank gates every row and computes the experts that it holds. No row is sent."""

    def __init__(self, rows: RowCollectives, experts: GroupExperts) -> None:
        self._rows, self._experts = rows, experts

    @property
    def recorded_rows(self) -> RecordedRows:
        return RecordedRows(1, MOST_RECORDED_ROWS if self._rows.capturable else MAX_ROWS_BETWEEN_GRAPHS)

    def begin(self, token_ids: IntArray) -> None:
        """Needs no preparation."""

    def feed_forward(self, layer: int, block: Block, hidden: torch.Tensor, partial: torch.Tensor) -> Stages:
        gate_output = block.gate(hidden, (yield all_reduce(self._rows, partial)))
        rows = yield all_reduce(self._rows, self._experts.share(layer, gate_output))
        # The sums of the ranks are weighted already, so the merge must add each of them as it is.
        weighted_once = replace(gate_output, weights=rows.new_ones(len(rows), 1))
        return block.merge(weighted_once, block.dense(gate_output.normed_rows), rows[:, None])


class ReduceScatter:
    """`reduce-scatter`: a row is summed only on the rank that sends it to its experts."""

    def __init__(self, rows: RowCollectives, experts: GroupExperts) -> None:
        self._rows, self._experts = rows, experts

    @property
    def recorded_rows(self) -> RecordedRows:
        return RecordedRows(self._rows.group.size, MAX_ROWS_BETWEEN_GRAPHS)

    def begin(self, token_ids: IntArray) -> None:
        """Needs no preparation."""

    def feed_forward(self, layer: int, block: Block, hidden: torch.Tensor, partial: torch.Tensor) -> Stages:
        group = self._rows.group
        sizes = equal_sizes(len(hidden), group.size)
        first = sum(sizes[: group.rank])
        own_rows = hidden[first : first + sizes[group.rank]]
        gate_output = block.gate(own_rows, (yield reduce_scatter(self._rows, partial, sizes)))
        own_hidden = yield from _merge_answers(
            self._experts, _count_own_rows(sizes, group.rank), layer, block, gate_output
        )
        return (yield all_gather(self._rows, own_hidden, sizes))


class ShuffledReduceScatter:
    """`shuffled`: as `reduce-scatter`, but each row goes to the rank where its experts are expected.

    Which rows a rank gets is known when they are scattered. Recorded stages have room for the most of them.
    """

    def __init__(self, rows: RowCollectives, experts: GroupExperts, assignment: RowAssignment) -> None:
        self._rows, self._experts, self._assignment = rows, experts, assignment

    @property
    def recorded_rows(self) -> RecordedRows:
        return RecordedRows(1, MAX_ROWS_BETWEEN_GRAPHS)

    def begin(self, token_ids: IntArray) -> None:
        self._assignment.begin(token_ids)

    def feed_forward(self, layer: int, block: Block, hidden: torch.Tensor, partial: torch.Tensor) -> Stages:
        """Residual and norm are in the permuted order until the all-gather restores the batch's order."""
        scattered_rows = _ScatteredRows(self._rows, self._assignment, layer)
        max_rows, width = self._assignment.max_rows(len(hidden)), hidden.shape[1]
        places = torch.zeros(max_rows, dtype=torch.int64, device=hidden.device)  # a graph reads all of them
        total = yield Exchange(
            lambda count: scattered_rows.scatter(partial[:count], places), (max_rows, width)
        )
        gate_output = block.gate(hidden.index_select(0, places[: len(total)]), total)
        del total
        own_hidden = yield from _merge_answers(
            self._experts, lambda count: scattered_rows.num_own_rows, layer, block, gate_output
        )
        assert gate_output.expert_ids is not None
        ids = gate_output.expert_ids
        return (
            yield Exchange(
                lambda count: scattered_rows.gather(own_hidden, ids), tuple(hidden.shape), is_kept=True
            )
        )


class _ScatteredRows:
    """The rows of one layer on this rank, and the way back."""

    def __init__(self, rows: RowCollectives, assignment: RowAssignment, layer: int) -> None:
        self._rows, self._assignment, self._layer = rows, assignment, layer
        self._shuffle: Shuffle | None = None

    @property
    def num_own_rows(self) -> int:
        """Rows of this rank."""
        assert self._shuffle is not None
        return int(self._shuffle.sizes[self._rows.group.rank])

    def scatter(self, addend: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Sums the rows of this rank, and writes where they are in the batch to `places`."""
        shuffle = self._shuffle = self._assignment.shuffle(self._layer)
        first, end = shuffle.starts[self._rows.group.rank :][:2].tolist()
        places[: end - first].copy_(move_array(shuffle.order[first:end], places.device))
        return self._rows.reduce_scatter(addend, shuffle.sizes.tolist(), shuffle.order)

    def gather(self, hidden: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """All ranks' rows in the batch's order. The forecast learns the choice of the gate for this one's."""
        shuffle, num_rows = self._shuffle, self.num_own_rows
        assert shuffle is not None
        gathered = self._rows.all_gather(hidden[:num_rows], shuffle.sizes.tolist(), shuffle.order)
        self._assignment.learn(self._layer, expert_ids[:num_rows], shuffle)
        return gathered


def _count_own_rows(sizes: Sequence[int], rank: int) -> Callable[[int], int]:
    """How many rows a rank has in a step of so many. sizes: those of a step without padded rows."""
    return lambda count: without_padding(sizes, count)[rank]


def _merge_answers(
    experts: GroupExperts, count_rows: Callable[[int], int], layer: int, block: Block, gate_output: GateOutput
) -> Stages:
    """Rows of this rank after the block. count_rows: how many it has in a step of so many rows."""
    dense = block.dense(gate_output.normed_rows)
    assert gate_output.expert_ids is not None
    shape = *gate_output.expert_ids.shape, gate_output.normed_rows.shape[1]
    answers = yield Exchange(lambda count: experts.rows(layer, gate_output.first(count_rows(count))), shape)
    return block.merge(gate_output, dense, answers)
