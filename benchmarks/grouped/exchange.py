"""One feed-forward exchange of the shuffled form, and the same without some of what it saves.

reduce-scatter, rows to their experts, answers back, all-gather. What takes a saving away lives here alone: a
row for each pair in place of one for each rank, and a round for the metadata before that of the activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import Group
from moesaic.experts.collectives.packets import FloatArray, Outgoing, Packet
from moesaic.experts.collectives.routing import Route, combine_pairs
from moesaic.policy.placement.shuffle import Shuffle, plan
from moesaic.runtime.group.forecast import NO_TOKENS, RowAssignment
from moesaic.transport.peers import Peers

Answer = Callable[[Packet], FloatArray]
"""A function from a packet to the answers [p, h] of its pairs."""
Merge = Callable[[FloatArray, FloatArray, FloatArray], FloatArray]
"""A function from rows [m, h], weights [m, k] and answers [m, k, h] to the merged rows [m, h]."""


@dataclass(frozen=True)
class Variant:
    """Which of the four savings an exchange has."""

    shuffle: bool = True
    """True: rows are scattered to the ranks where their experts are expected. False: in the batch's order."""
    placement: bool = True
    """True: experts are where a solver puts them. False: in consecutive ranges."""
    once: bool = True
    """True: a row is sent once to a rank. False: once for each of its experts there."""
    one_packet: bool = True
    """True: metadata travels with the activations. False: in a round before."""


CASES = {
    "all four": Variant(),
    "no shuffle": Variant(shuffle=False),
    "no placement": Variant(placement=False),
    "no de-duplication": Variant(once=False),
    "no single packet": Variant(one_packet=False),
    "none of them": Variant(False, False, False, False),
}


class BatchOrder:
    """Without a forecast: rows are scattered in the batch's order."""

    def __init__(self, group: Group) -> None:
        self._ranks = group.size
        self._shuffle = plan(NO_TOKENS, NO_TOKENS, self._ranks, "none")

    def begin(self, token_ids: IntArray) -> None:
        zeros = np.zeros(len(token_ids), dtype=np.int64)
        self._shuffle = plan(zeros, zeros, self._ranks, "none")

    def most(self, rows: int) -> int:
        """See `RowAssignment`."""
        return -(-rows // self._ranks)

    def shuffle(self, layer: int) -> Shuffle:
        """See `RowAssignment`."""
        return self._shuffle

    def learn(self, layer: int, expert_ids: torch.Tensor, shuffle: Shuffle) -> None:
        """Ignores it."""


class Exchange:
    """The exchange of one rank."""

    def __init__(
        self,
        peers: Peers,
        group: Group,
        variant: Variant,
        forecast: RowAssignment,
        owners: IntArray,
        answer: Answer,
        merge: Merge,
    ) -> None:
        """group: a group over `peers`. owners: [layers, E] the rank of each expert."""
        self._peers, self._group, self._variant = peers, group, variant
        self._forecast, self._owners = forecast, owners
        self._answer, self._merge = answer, merge
        self.local_pairs = self.pairs = 0

    def begin(self, token_ids: IntArray) -> None:
        """Begins another step, with these rows [n]."""
        self._forecast.begin(token_ids)

    def layer(
        self, number: int, index: int, experts: IntArray, weights: FloatArray, rows: FloatArray
    ) -> FloatArray:
        """A layer by its number in the model and its index over those with routed experts.

        experts, weights: [n, k] of the whole batch. rows: [n, h] this rank's addends. Returns [n, h], merged.
        """
        shuffle = self._forecast.shuffle(number)
        mine = shuffle.order[shuffle.starts[self._group.rank] : shuffle.starts[self._group.rank + 1]]
        hidden = self._group.reduce_scatter(rows, shuffle.sizes.tolist(), shuffle.order)
        route = Route(experts[mine], self._owners[index][experts[mine]])
        self.pairs += route.owners.size
        self.local_pairs += int((route.owners == self._group.rank).sum())
        packets = self._dispatch(route, hidden, weights[mine])
        pairs = combine_pairs(self._group, route, [self._answer(packet) for packet in packets])
        merged = self._merge(hidden, weights[mine], pairs)
        out = self._group.all_gather(merged, shuffle.order)
        self._forecast.learn(number, torch.as_tensor(route.expert_ids), shuffle)
        return out

    def _dispatch(self, route: Route, hidden: FloatArray, weights: FloatArray) -> list[Packet]:
        make = row_once if self._variant.once else row_for_each_pair
        outgoing = [make(route, rank, hidden, weights) for rank in range(self._group.size)]
        if self._variant.one_packet:
            return self._group.all_to_all_v(outgoing)
        return two_rounds(self._peers, self._group, outgoing)


def row_once(route: Route, rank: int, hidden: FloatArray, weights: FloatArray) -> Outgoing:
    """Sends rows as `routing.dispatch` does."""
    rows = route.rows(rank)
    return Outgoing(hidden, rows, route.experts(rank), weights[rows])


def row_for_each_pair(route: Route, rank: int, hidden: FloatArray, weights: FloatArray) -> Outgoing:
    """Sends the same pairs in the same order, with k = 1."""
    row, chosen = route.pairs(rank)
    experts = route.expert_ids[row, chosen].astype(np.int32)
    return Outgoing(hidden, row, experts[:, None], weights[row, chosen][:, None])


def two_rounds(peers: Peers, group: Group, outgoing: Sequence[Outgoing]) -> list[Packet]:
    """Does what `all_to_all_v` does, in one round for the metadata and one for the activations."""
    bare = [replace(each, hidden=each.hidden[:, :0]) for each in outgoing]
    heads = [
        replace(head, rows=head.rows.copy(), experts=head.experts.copy(), weights=head.weights.copy())
        for head in group.all_to_all_v(bare)
    ]
    width, own = outgoing[0].hidden.shape[1], peers.rank
    sizes = [0 if rank == own else 4 * width * len(each.rows) for rank, each in enumerate(outgoing)]
    for rank, view in enumerate(peers.open(sizes)):
        if rank != own:
            out = np.frombuffer(view, np.float32).reshape(-1, width)
            np.take(outgoing[rank].hidden, outgoing[rank].rows, axis=0, out=out, mode="clip")
    found = []
    for rank, part in enumerate(peers.exchange()):
        mine = rank == own
        rows = outgoing[own].hidden[outgoing[own].rows] if mine else np.frombuffer(part, np.float32)
        found.append(replace(heads[rank], hidden=rows.reshape(-1, width)))
    return found
