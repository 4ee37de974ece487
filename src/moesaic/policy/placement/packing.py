"""Packs one layer's copies: slots of servers, copies of experts, and which server gets which copy.

Slots can always be filled without an expert twice on a server. Copies c of the experts match slots n of the
servers exactly if both have the same sum and any k servers have at most sum(min(c, k)) slots (Gale and
Ryser); `pack` ensures this. Copies can be increased until they match exactly if any k experts have at most
sum(min(n, k)) copies; `copies` ensures this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

EXACT = 1e-9
"""Numbers that differ by less, relatively, count as equal."""


# ---- rooms


def rooms(slots: int, experts: int, capacity: FloatArray, before: IntArray) -> IntArray:
    """[L, N] slots of each server: its share rounded down or up, fair over the layers before.

    before: [L, N] what they hold now. Ties for a remaining slot go to the server that holds most above its
    rounded share.

    Example: 8 slots, 3 equal servers -> 3 3 2, then 3 2 3, then 2 3 3.
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
    """[N] slots in proportion to capacity, at most `most` each; the excess goes to the others.

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
    """[E] copies of each expert, sum(room) in all.

    Example: load 8 4 2 2, room 3 3, min_replicas 1 -> 2 2 1 1.
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
    """One layer to be packed: c copies of load `each` of E experts into N servers."""

    each: FloatArray
    """[E] load of one copy."""
    count: IntArray
    """[E] copies."""
    room: IntArray
    """[N] slots; sum(room) == sum(count)."""
    capacity: FloatArray
    """[N] weights."""

    @property
    def order(self) -> list[int]:
        """Experts by the load of a copy, heaviest first."""
        order: list[int] = np.argsort(-self.each, kind="stable").tolist()
        return order


def kept(layer: Layer, before: BoolArray, limit: float) -> BoolArray:
    """[E, N] the copies of `before` that stay, as many as count, room and load / capacity <= limit allow.

    Surplus copies are removed from the servers with the largest load / capacity. A server beyond its room
    or the limit gives up the lightest copy that is enough, or else its heaviest, and so on.

    Example: copies of load 6 3 1 on a server with room for 3 and limit 7: 3 goes, 6 and 1 stay.
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
    """[E, N] which server holds what: `kept` wherever possible, the rest by load / capacity."""
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
    """`chosen`, its least roomy servers replaced by the roomiest others until all remaining copies find a
    server.

    left: [N] room before this expert is placed. demand: [N] element k counts the remaining experts with
    more than k copies. Taking just the roomiest servers is always possible.

    Example: left 2 1, and one expert with 2 copies to come (demand 1 1): [1] becomes [0].
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
    """Exchange copies with the server of the largest load / capacity until that is at most `limit`.

    Each step makes the exchange that leaves the smallest peak of both servers. It makes none that does not
    lower the peak.

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
    """The best exchange: (peak of both afterwards, expert that `top` gives, expert that it gets, other)."""
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
