"""The routed experts of a group: each rank holds some and sends rows to the other ranks for the rest.

With `expert_ranks` t above 1 (expert tensor parallelism, the hybrid that both papers use for Mixtral) an
expert is split along its width over t neighbouring ranks. A row goes to all of them. Their answers are
partial sums of the down projection, and are added in the order of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import equal_sizes
from moesaic.experts.collectives.routing import Route
from moesaic.kernels.moving import move_array, to_host_arrays
from moesaic.kernels.table import MOST_RECORDED_ROWS, Kernels
from moesaic.kernels.weights import ExpertWeights
from moesaic.models.block import GateOutput
from moesaic.runtime.group.arrays import to_host
from moesaic.runtime.group.rows import RowCollectives


@dataclass
class GroupCounts:
    """What a rank counts besides the bytes of its transport. The fields are those of GroupStats."""

    pairs: int = 0
    local_pairs: int = 0
    shuffled_rows: int = 0
    kept_rows: int = 0


class GroupExperts:
    """The experts of this rank, and the exchange of rows with the other ranks."""

    def __init__(
        self,
        rows: RowCollectives,
        kernels: Kernels,
        weights: Callable[[int], ExpertWeights],
        owners: Mapping[int, IntArray],
        counts: GroupCounts,
        expert_ranks: int = 1,
    ) -> None:
        """weights: layer -> the experts of this rank, cut to its part of the width.

        owners: layer -> [E] the first of the ranks that hold each expert.
        """
        self._rows, self._group, self._kernels = rows, rows.group, kernels
        self._weights, self._owners, self._ranks = weights, owners, expert_ranks
        self._counts = counts

    def rows(self, layer: int, gate_output: GateOutput) -> torch.Tensor:
        """[m, k, h] unweighted answers for the rows that this rank gate_output: an all-to-all there and back.

        A pair counts as local if this rank holds a part of its expert, even if other ranks hold other parts.
        """
        assert gate_output.expert_ids is not None and gate_output.weights is not None
        ids, weights = to_host_arrays((gate_output.expert_ids, gate_output.weights))
        assert ids is not None and weights is not None
        route = self._route(layer, ids)
        self._counts.pairs += ids.size
        self._counts.local_pairs += int(np.count_nonzero(route.owners == self._group.rank))
        # A pair goes to every rank that has a part of its expert, each time with the same weight.
        arrived_pairs = self._rows.dispatch(
            route, gate_output.normed_rows, np.repeat(weights, self._ranks, axis=1)
        )
        answers = arrived_pairs.hidden
        if len(arrived_pairs.experts):
            answers = self._compute(layer, arrived_pairs.hidden, arrived_pairs.experts)
        rows = self._rows.combine(route, answers, arrived_pairs)
        if self._ranks > 1:
            rows = _sum_over_ranks(rows.view(*ids.shape, self._ranks, rows.shape[-1]))
        return rows

    def share(self, layer: int, gate_output: GateOutput) -> torch.Tensor:
        """[n, h] the weighted sums of this rank's experts, for all rows; zeros where a row has none here.

        Where kernels spare the rows of experts that are not held, the host does not read the gate's choice.
        """
        return (
            self._share_sparing_rows(layer, gate_output)
            if self._kernels.can_skip_absent
            else self._share_own_pairs(layer, gate_output)
        )

    def _share_sparing_rows(self, layer: int, gate_output: GateOutput) -> torch.Tensor:
        """`share` for kernels that are given the choice of all ranks and compute what is held here."""
        assert gate_output.expert_ids is not None and gate_output.weights is not None
        weights, count = self._weights(layer), len(gate_output.expert_ids)
        if not weights.resident_ids:
            return torch.zeros_like(gate_output.normed_rows)
        if count <= MOST_RECORDED_ROWS:
            return self._sum_resident(
                weights, gate_output.normed_rows, gate_output.expert_ids, gate_output.weights
            )
        sums = torch.empty_like(gate_output.normed_rows)
        for part in self._parts(count):
            inputs = gate_output.normed_rows[part], gate_output.expert_ids[part], gate_output.weights[part]
            sums[part] = self._sum_resident(weights, *inputs)
        return sums

    def _sum_resident(
        self, resident_weights: ExpertWeights, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """[n, h] the weighted sums of the experts that are held here. ids, weights: [n, k]."""
        rows = hidden.new_zeros(*ids.shape, hidden.shape[1])
        rows = self._kernels.experts(resident_weights, hidden, ids, rows)
        return self._kernels.merge(torch.zeros_like(hidden), None, rows, weights)

    def _share_own_pairs(self, layer: int, gate_output: GateOutput) -> torch.Tensor:
        """`share` for kernels that are given pairs with experts of this rank only."""
        assert gate_output.expert_ids is not None and gate_output.weights is not None
        ids = to_host(gate_output.expert_ids)
        first = self._owners[layer][ids]
        row, slot = np.nonzero((first <= self._group.rank) & (self._group.rank < first + self._ranks))
        if not len(row):
            return torch.zeros_like(gate_output.normed_rows)
        answers = self._compute(layer, gate_output.normed_rows[torch.from_numpy(row)], ids[row, slot])
        sums = torch.empty_like(gate_output.normed_rows)
        for part in self._parts(len(ids)):
            first, last = np.searchsorted(row, (part.start, part.stop)).tolist()
            rows = answers.new_zeros(part.stop - part.start, ids.shape[1], answers.shape[1])
            rows[row[first:last] - part.start, slot[first:last]] = answers[first:last]
            zeros = torch.zeros_like(sums[part])
            sums[part] = self._kernels.merge(zeros, None, rows, gate_output.weights[part])
        return sums

    def _parts(self, rows: int) -> list[slice]:
        """Rows that are summed at a time: as many as a rank has in the other layouts, since memory is planned
        for those."""
        sizes = equal_sizes(rows, self._group.size)
        ends = np.cumsum(sizes).tolist()
        return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def _route(self, layer: int, ids: IntArray) -> Route:
        """Each pair goes to the `expert_ranks` consecutive ranks that hold its expert."""
        parts = np.arange(self._ranks)
        owners = (self._owners[layer][ids][:, :, None] + parts).reshape(len(ids), ids.shape[1] * self._ranks)
        return Route(np.repeat(ids, self._ranks, axis=1), owners)

    def _compute(self, layer: int, hidden: torch.Tensor, ids: IntArray) -> torch.Tensor:
        """hidden [p, h], one expert for each row -> [p, h]."""
        expert_ids = move_array(ids, hidden.device)[:, None]
        return self._kernels.experts(self._weights(layer), hidden, expert_ids)[:, 0]


def _sum_over_ranks(parts: torch.Tensor) -> torch.Tensor:
    """Sums over the ranks, in their order: [m, k, t, h] -> [m, k, h]."""
    return functools.reduce(torch.add, parts.unbind(2))
