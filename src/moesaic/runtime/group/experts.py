"""The routed experts of a group: each rank holds some, and asks the others for the rest.

With `expert_ranks` t above 1 (expert tensor parallelism, the hybrid that both papers use for Mixtral) an
expert is cut along its width over t neighbouring ranks: a row goes to all of them, and their answers, partial
sums of the down projection, are added up in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moesaic.collectives.group import Group, equal_sizes
from moesaic.collectives.packets import FloatArray, Packet
from moesaic.collectives.routing import Route, combine_pairs, dispatch
from moesaic.core.tokens import IntArray
from moesaic.kernels.table import Kernels
from moesaic.kernels.weights import ExpertWeights
from moesaic.models.block import Gated
from moesaic.runtime.group.arrays import to_device, to_host


@dataclass
class GroupCounts:
    """What a rank counts besides the bytes of its transport. The fields are those of GroupStats."""

    pairs: int = 0
    local_pairs: int = 0
    shuffled_rows: int = 0
    kept_rows: int = 0


class GroupExperts:
    """One rank's part of them, and the way to the others."""

    def __init__(
        self,
        group: Group,
        kernels: Kernels,
        weights: Callable[[int], ExpertWeights],
        owners: Mapping[int, IntArray],
        counted: GroupCounts,
        expert_ranks: int = 1,
    ) -> None:
        """weights: layer -> what is held here, cut to this rank's part of the width. owners: layer -> [E] the
        first of the ranks that hold each expert."""
        self._group, self._kernels = group, kernels
        self._weights, self._owners, self._ranks = weights, owners, expert_ranks
        self._counted = counted

    def rows(self, layer: int, gated: Gated) -> torch.Tensor:
        """[m, k, h] unweighted rows of the rows that this rank gated: all-to-all there and back.

        A pair counts as local where a part of its expert is here; its other parts are asked elsewhere.
        """
        assert gated.expert_ids is not None and gated.weights is not None
        ids, weights = to_host(gated.expert_ids), to_host(gated.weights)
        route = self._route(layer, ids)
        self._counted.pairs += ids.size
        self._counted.local_pairs += int(np.count_nonzero(route.owners == self._group.rank))
        hidden, device = to_host(gated.normed), gated.normed.device
        packets = dispatch(self._group, route, hidden, np.repeat(weights, self._ranks, axis=1))
        rows = combine_pairs(self._group, route, self._answers(layer, packets, device))
        if self._ranks > 1:
            rows = _added(rows.reshape(*ids.shape, self._ranks, hidden.shape[1]))
        return to_device(rows, device)

    def share(self, layer: int, gated: Gated) -> torch.Tensor:
        """[n, h] what the experts here contribute to all rows: weighted sums, zeros where there are none.

        Added up for as many rows at a time as a rank has in the other forms: memory is planned for these.
        """
        assert gated.expert_ids is not None and gated.weights is not None
        ids = to_host(gated.expert_ids)
        first = self._owners[layer][ids]
        row, rank = np.nonzero((first <= self._group.rank) & (self._group.rank < first + self._ranks))
        if not len(row):
            return torch.zeros_like(gated.normed)
        found = self._compute(layer, gated.normed[torch.from_numpy(row)], ids[row, rank])
        sums, begin = torch.empty_like(gated.normed), 0
        for size in equal_sizes(len(ids), self._group.size):
            end, first = begin + size, int(np.searchsorted(row, begin))
            last = int(np.searchsorted(row, end))
            rows = found.new_zeros(size, ids.shape[1], found.shape[1])
            rows[row[first:last] - begin, rank[first:last]] = found[first:last]
            none = torch.zeros_like(sums[begin:end])
            sums[begin:end] = self._kernels.merge(none, None, rows, gated.weights[begin:end])
            begin = end
        return sums

    def _route(self, layer: int, ids: IntArray) -> Route:
        """Each pair to the `expert_ranks` ranks that hold its expert, one after another."""
        parts = np.arange(self._ranks)
        owners = (self._owners[layer][ids][:, :, None] + parts).reshape(len(ids), ids.shape[1] * self._ranks)
        return Route(np.repeat(ids, self._ranks, axis=1), owners)

    def _answers(self, layer: int, packets: Sequence[Packet], device: torch.device) -> list[FloatArray]:
        """[p, h] for the pairs of each packet, all computed as one batch."""
        pairs = [packet.pairs for packet in packets]
        hidden = np.concatenate([packet.hidden[row] for packet, (row, _) in zip(packets, pairs, strict=True)])
        ids = np.concatenate([experts for _, experts in pairs]).astype(np.int64)
        if not len(ids):
            return [hidden for _ in packets]
        found = to_host(self._compute(layer, to_device(hidden, device), ids))
        return np.split(found, np.cumsum([len(row) for row, _ in pairs])[:-1])

    def _compute(self, layer: int, hidden: torch.Tensor, ids: IntArray) -> torch.Tensor:
        """hidden [p, h] and one expert each -> [p, h]."""
        chosen = to_device(ids, hidden.device)[:, None]
        return self._kernels.experts(self._weights(layer), hidden, chosen)[:, 0]


def _added(parts: FloatArray) -> FloatArray:
    """[m, k, t, h] -> [m, k, h], in the order of the ranks."""
    total = parts[:, :, 0].copy()
    for part in range(1, parts.shape[2]):
        total += parts[:, :, part]
    return total
