"""Packs the experts of one layer: slots of each server, copies of each expert, and which server gets which
copy.

The slots can always be filled without an expert twice on a server. This rests on two conditions (Gale and
Ryser), where n are the servers' slots and c the experts' copies:

 - Copies fit slots exactly if both have the same sum and any k servers have at most sum(min(c, k)) slots.
   `pack` ensures this.
 - More copies can be added until they fit exactly if any k experts have at most sum(min(n, k)) copies.
   `copies` ensures this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

EXACT = 1e-9
"""Numbers count as equal if their relative difference is smaller."""


# ---- slots


def server_slots(slots: int, experts: int, capacity: FloatArray, before: IntArray) -> IntArray:
    """[L, N] slots of each server in each layer: its share of `slots`, rounded down or up.

    Rounding is fair over the layers so far. before: [L, N] copies that the servers have now. On a tie, the
    remaining slot goes to the server that has most copies beyond its rounded share.

    Example: 8 slots and 3 equal servers -> 3 3 2, then 3 2 3, then 2 3 3.
    """
    share = _shares(slots, experts, capacity)
    whole = np.floor(share + EXACT)
    part = np.where(share - whole > EXACT, share - whole, 0.0)
    odd = slots - int(whole.sum())
    found = np.tile(whole.astype(np.int64), (len(before), 1))
    owed = np.zeros(len(capacity))
    for room, now in zip(found, before, strict=True):
        owed += part
        order = np.lexsort((whole - now, -np.round(owed, 6), part == 0))
        room[order[:odd]] += 1
        owed[order[:odd]] -= 1
    return found


def _shares(slots: int, most: int, capacity: FloatArray) -> FloatArray:
    """[N] slots in proportion to capacity, but at most `most` each. The excess goes to the others.

    Example: 12 slots, at most 8, capacities 8, 1, 1 -> 8, 2, 2.
    """
    share = np.zeros(len(capacity))
    growing = np.full(len(capacity), True)
    while growing.any():
        left = slots - share[~growing].sum()
        share[growing] = left * capacity[growing] / capacity[growing].sum()
        over = growing & (share > most)
        if not over.any():
            break
        share[over] = most
        growing &= ~over
    return share


# ---- copies


def copies(load: FloatArray, room: IntArray, min_replicas: int) -> IntArray:
    """[E] number of copies of each expert. Together they fill all slots: their sum is sum(room).

    room: [N] slots of each server. Example: load 8 4 2 2, room 3 3, min_replicas 1 -> 2 2 1 1.
    """
    experts = len(load)
    most = np.minimum(room[:, None], np.arange(1, experts + 1)).sum(axis=0)
    count = np.full(experts, min_replicas, dtype=np.int64)
    each = load / count
    for _ in range(int(room.sum()) - experts * min_replicas):
        while True:
            expert = int(each.argmax())
            count[expert] += 1
            if (np.sort(count)[::-1].cumsum() <= most).all():
                each[expert] = load[expert] / count[expert]
                break
            count[expert] -= 1
            each[expert] = -1.0
    return count


# ---- packing


@dataclass(frozen=True)
class Layer:
    """One layer to pack: copies of E experts for the slots of N servers."""

    each: FloatArray
    """[E] load of one copy of each expert."""
    count: IntArray
    """[E] number of copies of each expert."""
    room: IntArray
    """[N] slots of each server; sum(room) == sum(count)."""
    capacity: FloatArray
    """[N] capacity weight of each server."""

    @property
    def order(self) -> list[int]:
        """Experts in order of the load of one copy, heaviest first."""
        order: list[int] = np.argsort(-self.each, kind="stable").tolist()
        return order


def kept(layer: Layer, before: BoolArray, limit: float) -> BoolArray:
    """[E, N] True for the copies of `before` that stay: as many as count, room and limit allow.

    limit: maximum load / capacity of a server. Surplus copies are removed from the servers with the largest
    load / capacity. A server with too many copies or too much load drops the lightest copy that suffices.
    If none suffices, it drops its heaviest copy, and so on.

    Example: a server has copies of load 6, 3 and 1, room for 3 and limit 7. The copy of 3 is dropped, 6 and
    1 stay.
    """
    kept = before.copy()
    carried = layer.each @ kept
    for expert in np.flatnonzero(kept.sum(axis=1) > layer.count).tolist():
        for _ in range(int(kept[expert].sum() - layer.count[expert])):
            server = int(np.where(kept[expert], carried / layer.capacity, -1.0).argmax())
            kept[expert, server] = False
            carried[server] -= layer.each[expert]
    for server, mine in enumerate(kept.T):
        most = limit * layer.capacity[server]
        while (carries := layer.each @ mine) > most or mine.sum() > layer.room[server]:
            enough = mine & (layer.each >= carries - most)
            lightest = np.where(enough, layer.each, np.inf).argmin()
            heaviest = np.where(mine, layer.each, -1.0).argmax()
            mine[lightest if enough.any() else heaviest] = False
    return kept


def pack(layer: Layer, kept: BoolArray) -> BoolArray:
    """[E, N] True where a server gets a copy.

    Copies of `kept` stay where possible, the rest are placed by load / capacity.
    """
    held = np.zeros_like(kept)
    left = layer.room.copy()
    free = left - kept.sum(axis=0)
    carried = layer.each @ kept
    demand = (layer.count[:, None] > np.arange(len(left))).sum(axis=0)
    for expert in layer.order:
        count = int(layer.count[expert])
        demand[:count] -= 1
        raised = (carried + layer.each[expert]) / layer.capacity
        rank = np.lexsort((raised, free <= 0, ~kept[expert], left == 0))
        chosen = _matched(rank[:count].tolist(), left, demand)
        held[expert, chosen] = True
        left[chosen] -= 1
        change = held[expert].astype(np.int64) - kept[expert]
        free -= change
        carried += layer.each[expert] * change
    return held


def _matched(chosen: list[int], left: IntArray, demand: IntArray) -> list[int]:
    """The servers `chosen` for an expert, changed until all remaining copies can still find a server.

    Each change replaces the chosen server with the fewest free slots by the other server with the most.
    Choosing only the servers with the most free slots always succeeds.

    left: [N] free slots before this expert is placed. demand: [N] element k is the number of remaining
    experts with more than k copies.

    Example: left is 2 1 and one expert with 2 copies is to come, so demand is 1 1. Then [1] becomes [0].
    """
    roomiest = np.argsort(-left, kind="stable").tolist()
    while not _fits(chosen, left, demand):
        roomier = next(server for server in roomiest if server not in chosen)
        chosen.remove(min(reversed(chosen), key=lambda server: left[server]))
        chosen.append(roomier)
    return chosen


def _fits(chosen: list[int], left: IntArray, demand: IntArray) -> bool:
    after = left.copy()
    after[chosen] -= 1
    return bool((np.sort(after)[::-1].cumsum() <= demand.cumsum()).all())


def swap(layer: Layer, held: BoolArray, limit: float) -> BoolArray:
    """Exchange copies with the most loaded server until its load / capacity is at most `limit`.

    Each step makes the exchange that leaves the lowest peak of both servers. It stops when no exchange
    lowers the peak.

    Example: loads 5 4 and 3 2 on two equal servers -> 3 4 and 5 2.
    """
    held = held.copy()
    carried = layer.each @ held
    for _ in range(held.size):
        ratio = carried / layer.capacity
        top = int(ratio.argmax())
        if ratio[top] <= limit:
            break
        options = [_exchange(layer, held, carried, top, other) for other in range(len(ratio)) if other != top]
        peak, less, more, other = min(options, default=(np.inf, 0, 0, 0))
        if peak >= ratio[top] * (1 - EXACT):
            break
        held[[less, more], top] = False, True
        held[[less, more], other] = True, False
        carried = layer.each @ held
    return held


def _exchange(
    layer: Layer, held: BoolArray, carried: FloatArray, top: int, other: int
) -> tuple[float, int, int, int]:
    """The best exchange between two servers: (peak of both afterwards, expert from `top`, expert from
    `other`, other)."""
    gives = np.flatnonzero(held[:, top] & ~held[:, other])
    takes = np.flatnonzero(held[:, other] & ~held[:, top])
    if not len(gives) or not len(takes):
        return np.inf, 0, 0, other
    change = layer.each[gives][:, None] - layer.each[takes]
    peak = np.maximum(
        (carried[top] - change) / layer.capacity[top], (carried[other] + change) / layer.capacity[other]
    )
    best = int(peak.argmin())
    return float(peak.flat[best]), int(gives[best // len(takes)]), int(takes[best % len(takes)]), other
