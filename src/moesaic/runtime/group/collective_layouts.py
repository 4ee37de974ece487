"""How the ranks of a group meet between attention and experts: four forms behind one switch.

Attention leaves each rank with a partial sum [n, h] of every row; after a block each has the hidden state
[n, h] of every row. Between the two

    deepspeed        all-reduce, each rank keeps its share of the rows, all-to-all to the experts and back,
                     all-gather (DeepSpeed-MoE)
    all-reduce       all-reduce, each rank computes its own experts for every row, all-reduce (SGLang)
    reduce-scatter   reduce-scatter in the batch's order, all-to-all there and back, all-gather
    shuffled         the same, but each row is scattered to the rank where its experts are expected
                     (Speculative MoE, section 4; Sem-MoE, section 3.4)

Payload of B rows of S bytes on G ranks, l being the share of a token's experts on its own rank, per rank:
all-reduce 2 (G-1) B S / G, reduce-scatter or all-gather half of that, all-to-all k (1-l) B S / G each way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from moesaic.collectives.group import Group, equal_sizes
from moesaic.core.tokens import IntArray
from moesaic.models.block import Block, Gated
from moesaic.runtime.group.arrays import to_device, to_host
from moesaic.runtime.group.experts import GroupExperts
from moesaic.runtime.group.forecast import RowAssignment


class CollectiveLayout(Protocol):
    """One of the four, on one rank."""

    def begin(self, token_ids: IntArray) -> None:
        """A step of these rows [n] begins."""
        ...

    def feed_forward(
        self, layer: int, block: Block, hidden: torch.Tensor, partial: torch.Tensor
    ) -> torch.Tensor:
        """A routed block from its output projection on.

        hidden: [n, h] before the block, and partial: [n, h] this rank's addend of the output projection, in
        the batch's order. Returns [n, h] after the block, equal on every rank.
        """
        ...


def dense_feed_forward(
    group: Group, block: Block, hidden: torch.Tensor, partial: torch.Tensor
) -> torch.Tensor:
    """A block without routed experts, in every form: each rank computes all of it."""
    gated = block.gate(hidden, _summed(group, partial))
    return block.merge(gated, block.dense(gated.normed), None)


class DeepSpeed:
    """`deepspeed`: every rank has every row's sum, and drops the rows of the others."""

    def __init__(self, group: Group, experts: GroupExperts) -> None:
        self._group, self._experts = group, experts

    def begin(self, token_ids: IntArray) -> None:
        """Nothing to prepare."""

    def feed_forward(
        self, layer: int, block: Block, hidden: torch.Tensor, partial: torch.Tensor
    ) -> torch.Tensor:
        total = _summed(self._group, partial)
        sizes = equal_sizes(len(hidden), self._group.size)
        first = sum(sizes[: self._group.rank])
        mine = slice(first, first + sizes[self._group.rank])
        merged = _merged(self._experts, layer, block, block.gate(hidden[mine], total[mine]))
        return to_device(self._group.all_gather(to_host(merged)), hidden.device)


class AllReduce:
    """`all-reduce`: no token travels; every rank gates every row and computes what it has the experts for."""

    def __init__(self, group: Group, experts: GroupExperts) -> None:
        self._group, self._experts = group, experts

    def begin(self, token_ids: IntArray) -> None:
        """Nothing to prepare."""

    def feed_forward(
        self, layer: int, block: Block, hidden: torch.Tensor, partial: torch.Tensor
    ) -> torch.Tensor:
        gated = block.gate(hidden, _summed(self._group, partial))
        rows = _summed(self._group, self._experts.share(layer, gated))
        once = replace(gated, weights=rows.new_ones(len(rows), 1))
        return block.merge(once, block.dense(gated.normed), rows[:, None])


class ReduceScatter:
    """`reduce-scatter` and `shuffled`: a row is summed up only where its experts are asked from."""

    def __init__(self, group: Group, experts: GroupExperts, scattering: RowAssignment) -> None:
        self._group, self._experts, self._scattering = group, experts, scattering

    def begin(self, token_ids: IntArray) -> None:
        self._scattering.begin(token_ids)

    def feed_forward(
        self, layer: int, block: Block, hidden: torch.Tensor, partial: torch.Tensor
    ) -> torch.Tensor:
        """Residual and norm follow the permuted order until the all-gather undoes it."""
        shuffle = self._scattering.shuffle(layer)
        first, end = shuffle.starts[self._group.rank : self._group.rank + 2]
        mine = to_device(shuffle.order[first:end], hidden.device)
        addend = self._group.reduce_scatter(to_host(partial), shuffle.sizes.tolist(), shuffle.order)
        gated = block.gate(hidden[mine], to_device(addend, hidden.device))
        merged = _merged(self._experts, layer, block, gated)
        out = to_device(self._group.all_gather(to_host(merged), shuffle.order), hidden.device)
        assert gated.expert_ids is not None
        self._scattering.learn(layer, to_host(gated.expert_ids), shuffle)
        return out


def _summed(group: Group, partial: torch.Tensor) -> torch.Tensor:
    return to_device(group.all_reduce(to_host(partial)), partial.device)


def _merged(experts: GroupExperts, layer: int, block: Block, gated: Gated) -> torch.Tensor:
    """Rows of this rank after the block."""
    return block.merge(gated, block.dense(gated.normed), experts.rows(layer, gated))
