"""Sends the rows of a batch to the ranks of their experts and back, through a Group's all-to-all-v."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import Group
from moesaic.experts.collectives.packets import NO_EXPERT, FloatArray, Outgoing, Packet


@dataclass(frozen=True)
class Route:
    """The ranks that the (row, expert) pairs of n rows go to.

    Two rows, two experts each: row 0 goes to rank 1 with both, row 1 to ranks 0 and 1. Rank 1 gets each row
    once:

    >>> route = Route(np.array([[4, 6], [1, 7]]), np.array([[1, 1], [0, 1]]))
    >>> route.rows(1), route.experts(1).tolist()
    (array([0, 1]), [[4, 6], [-1, 7]])
    """

    expert_ids: IntArray
    """[n, k] logical ids."""
    owners: IntArray
    """[n, k] rank of the expert, or of the chosen copy."""

    def rows(self, rank: int) -> IntArray:
        """Returns [m] rows with an expert on that rank, ascending."""
        return np.flatnonzero((self.owners == rank).any(axis=1))

    def pairs(self, rank: int) -> tuple[IntArray, IntArray]:
        """Returns [p] row and [p] top-k index of each pair that goes to that rank.

        They are ordered by row, as in `Packet.pairs`.
        """
        row, slot = np.nonzero(self.owners == rank)
        return row, slot

    def experts(self, rank: int) -> npt.NDArray[np.int32]:
        """Returns [m, k] the experts on that rank that its rows need; NO_EXPERT for experts elsewhere."""
        rows = self.rows(rank)
        is_on_rank = self.owners[rows] == rank
        return np.where(is_on_rank, self.expert_ids[rows], NO_EXPERT).astype(np.int32)


def dispatch(group: Group, route: Route, hidden: FloatArray, weights: FloatArray) -> list[Packet]:
    """Sends hidden [n, h] and gate weights [n, k] to the ranks of their experts.

    Returns [ranks] the packets from each rank.
    """
    outgoing = []
    for rank in range(group.size):
        rows = route.rows(rank)
        outgoing.append(Outgoing(hidden, rows, route.experts(rank), weights[rows]))
    return group.all_to_all_v(outgoing)


def combine_pairs(group: Group, route: Route, answers: Sequence[FloatArray]) -> FloatArray:
    """Returns expert outputs [n, k, h], without gate weights, one for each pair.

    answers[r] [p, h] are for `Packet.pairs` of rank r. A merge in top-k order then gives the bits of a single
    process, whatever the placement.
    """
    pairs = [route.pairs(rank) for rank in range(group.size)]
    outputs = np.empty((*route.owners.shape, answers[0].shape[1]), np.float32)
    for place, part in zip(pairs, group.answer(answers, [len(row) for row, _ in pairs]), strict=True):
        outputs[place] = part
    return outputs


def combine_sums(group: Group, route: Route, answers: Sequence[FloatArray]) -> FloatArray:
    """Returns [n, h]: the sum over ranks of one weighted sum per row.

    answers[r] [m, h] are for the rows of rank r's packet. This needs fewer bytes than pairs. Sums are added
    in the order of the ranks, so they equal those of a single process up to rounding.
    """
    rows = [route.rows(rank) for rank in range(group.size)]
    sums = np.zeros((len(route.owners), answers[0].shape[1]), np.float32)
    for place, part in zip(rows, group.answer(answers, list(map(len, rows))), strict=True):
        sums[place] += part
    return sums
