"""Packs the experts of one layer: slots of each server, copies of each expert, and which server gets which
copy.

The slots can always be filled without an expert twice on a server. This rests on two conditions (Gale and
Ryser), where n are the servers' slots and c the experts' copies:

 - Copies fit slots exactly if both have the same sum and any k servers have at most sum(min(c, k)) slots.
   `pack` ensures this.
 - More copies can be added until they fit exactly if any k experts have at most sum(min(n, k)) copies.
   `copies` ensures this.

Where servers are on several hosts, `spread` exchanges copies so that an expert's copies are on several of
them. No later exchange makes that worse.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray
from moesaic.policy.placement.spreading import Hosts

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

EXACT = 1e-9
"""Numbers count as equal if their relative difference is smaller."""


# ---- slots


def server_slots(
    slots: int, experts: int, capacity: FloatArray, before: IntArray, where: Hosts | None = None
) -> IntArray:
    """[L, N] slots of each server in each layer: its share of `slots`, rounded down or up.

    The sum of each host is its share, too, rounded down or up. Rounding is fair over the layers so far.
    before: [L, N] copies that the servers have now. On a tie, the remaining slot goes to the server that has
    most copies beyond its rounded share. where: None: all servers are on one host.

    Example: 8 slots and 3 equal servers -> 3 3 2, then 3 2 3, then 2 3 3.
    """
    share = _shares(slots, experts, capacity)
    hosts = Hosts.one(len(capacity)) if where is None else where
    ends = hosts.of[:, None] == np.arange(hosts.count)
    totals = _rounded(share @ ends, np.full(len(before), slots), before @ ends)
    found = np.zeros_like(before)
    for host, total in enumerate(totals.T):
        found[:, ends[:, host]] = _rounded(share[ends[:, host]], total, before[:, ends[:, host]])
    return found


def _rounded(share: FloatArray, total: IntArray, before: IntArray) -> IntArray:
    """[L, N] `share` [N] rounded down or up, fair over the layers, so that layer l has the sum total[l]."""
    whole = np.floor(share + EXACT)
    part = np.where(share - whole > EXACT, share - whole, 0.0)
    found = np.tile(whole.astype(np.int64), (len(before), 1))
    owed = np.zeros(len(share))
    for room, slots, now in zip(found, total.tolist(), before, strict=True):
        odd = slots - int(whole.sum())
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
    where: Hosts | None = None
    """The hosts of the servers. None: all are on one host."""

    @property
    def hosts(self) -> Hosts:
        """The hosts of the servers."""
        return Hosts.one(len(self.room)) if self.where is None else self.where

    @property
    def order(self) -> list[int]:
        """Experts in order of the load of one copy, heaviest first."""
        order: list[int] = np.argsort(-self.each, kind="stable").tolist()
        return order


def kept(layer: Layer, before: BoolArray, limit: float) -> BoolArray:
    """[E, N] True for the copies of `before` that stay: as many as count, room and limit allow.

    limit: maximum load / capacity of a server. Surplus copies are removed from the hosts with most copies of
    the expert, and there from the servers with the largest load / capacity. A server with too many copies or
    too much load drops the lightest copy that suffices. If none suffices, it drops its heaviest copy, and so
    on.

    Example: a server has copies of load 6, 3 and 1, room for 3 and limit 7. The copy of 3 is dropped, 6 and
    1 stay.
    """
    kept = before.copy()
    carried = layer.each @ kept
    for expert in np.flatnonzero(kept.sum(axis=1) > layer.count).tolist():
        for _ in range(int(kept[expert].sum() - layer.count[expert])):
            of_host = layer.hosts.copies(kept[[expert]])[0, layer.hosts.of]
            spare = kept[expert] & (of_host == of_host[kept[expert]].max())
            server = int(np.where(spare, carried / layer.capacity, -1.0).argmax())
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

    Copies of `kept` stay where possible, the rest are placed by load / capacity. Each host gets a copy before
    another one gets a second, where servers have room.
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
        if layer.hosts.count > 1:
            taken = (free <= 0) & ~kept[expert]
            rank = np.lexsort((rank.argsort(), layer.hosts.ordinals(rank), taken, left == 0))
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
    lowers the peak. No exchange lowers the spread over hosts.

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
    here, there = layer.hosts.of[[top, other]].tolist()
    if here != there:
        copies = layer.hosts.copies(held)
        gained = layer.hosts.gain(copies, here, there)[gives][:, None]
        peak[gained + layer.hosts.gain(copies, there, here)[takes] < 0] = np.inf
    best = int(peak.argmin())
    return float(peak.flat[best]), int(gives[best // len(takes)]), int(takes[best % len(takes)]), other


# ---- hosts


def settle(layer: Layer, held: BoolArray, limit: float) -> BoolArray:
    """Spread over hosts and exchange for balance (`swap`), until no exchange of either kind is left."""
    while True:
        held = swap(layer, held, limit)
        wider = spread(layer, held)
        if (wider == held).all():
            return held
        held = wider


def spread(layer: Layer, held: BoolArray, kept: BoolArray | None = None) -> BoolArray:
    """Exchange copies between hosts as long as that raises the sum of the experts' spreads.

    Each step takes a copy of an expert that has another one on the same host. It makes the exchange that
    gains most. Of several it makes the one that takes the fewest copies of `kept` away, then the one that
    leaves the lowest peak of both servers. With one host, nothing changes.

    Example: servers 0 and 1 are on one host, 2 and 3 on another one. Servers hold experts 0, 0, 1, 1. Servers
    1 and 2 exchange their copies, so each expert is on both hosts.
    """
    held, hosts = held.copy(), layer.hosts
    stays = np.zeros_like(held) if kept is None else kept
    changed = hosts.count > 1
    while changed:
        changed = False
        for expert in layer.order:
            while (found := _parting(layer, held, stays, expert)) is not None:
                source, target, other = found
                held[expert, [source, target]] = False, True
                held[other, [source, target]] = True, False
                changed = True
    return held


def _parting(layer: Layer, held: BoolArray, stays: BoolArray, expert: int) -> tuple[int, int, int] | None:
    """The best exchange for the spread of an expert: (the server that gives its copy away, the one that gets
    it, the expert that goes the other way). None if no exchange gains."""
    hosts, copies = layer.hosts, layer.hosts.copies(held)
    if copies[expert].max() < 2 or copies[expert].min() > 0:
        return None
    carried, found = layer.each @ held, []
    for source in np.flatnonzero(held[expert] & (copies[expert] > 1)[hosts.of]).tolist():
        here = int(hosts.of[source])
        back = np.stack([hosts.gain(copies, there, here) for there in range(hosts.count)], axis=1)
        gained = hosts.gain(copies[[expert]], here, int(copies[expert].argmin())) + back[:, hosts.of]
        possible = held & ~held[:, [source]] & (copies[expert] == 0)[hosts.of]
        gained = np.where(possible, gained, 0.0)
        change = layer.each[expert] - layer.each[:, None]
        peak = np.maximum(
            (carried[source] - change) / layer.capacity[source], (carried + change) / layer.capacity
        )
        taken = stays.astype(np.int64) + stays[expert, source]
        first = int(np.lexsort((peak.ravel(), taken.ravel(), -gained.ravel()))[0])
        other, target = divmod(first, held.shape[1])
        figures = -gained.flat[first], taken.flat[first], peak.flat[first]
        found.append((*map(float, figures), source, target, other))
    lost, _, _, source, target, other = min(found)
    return (source, target, other) if lost < 0 else None
