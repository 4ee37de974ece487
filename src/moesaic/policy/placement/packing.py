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
    slots: int, experts: int, capacity: FloatArray, old_copies: IntArray, server_hosts: Hosts | None = None
) -> IntArray:
    """[L, N] slots of each server in each layer: its share of `slots`, rounded down or up.

    The sum of each host is its share, too, rounded down or up. Rounding is fair over the layers so far.
    old_copies: [L, N] copies that the servers have now. On a tie, the remaining slot goes to the server
    that has most copies beyond its rounded share. server_hosts: None: all servers are on one host.

    Example: 8 slots and 3 equal servers -> 3 3 2, then 3 2 3, then 2 3 3.
    """
    share = _shares(slots, experts, capacity)
    hosts = Hosts.single(len(capacity)) if server_hosts is None else server_hosts
    ends = hosts.host_of_server[:, None] == np.arange(hosts.count)
    totals = _round_shares(share @ ends, np.full(len(old_copies), slots), old_copies @ ends)
    slots_by_layer = np.zeros_like(old_copies)
    for host, total in enumerate(totals.T):
        slots_by_layer[:, ends[:, host]] = _round_shares(
            share[ends[:, host]], total, old_copies[:, ends[:, host]]
        )
    return slots_by_layer


def _round_shares(share: FloatArray, total: IntArray, old_copies: IntArray) -> IntArray:
    """[L, N] `share` [N] rounded down or up, fair over the layers, so that layer l has the sum total[l]."""
    floor_share = np.floor(share + EXACT)
    part = np.where(share - floor_share > EXACT, share - floor_share, 0.0)
    rounded_slots = np.tile(floor_share.astype(np.int64), (len(old_copies), 1))
    owed_slots = np.zeros(len(share))
    for room, slots, now in zip(rounded_slots, total.tolist(), old_copies, strict=True):
        odd = slots - int(floor_share.sum())
        owed_slots += part
        order = np.lexsort((floor_share - now, -np.round(owed_slots, 6), part == 0))
        room[order[:odd]] += 1
        owed_slots[order[:odd]] -= 1
    return rounded_slots


def _shares(slots: int, max_slots: int, capacity: FloatArray) -> FloatArray:
    """[N] slots in proportion to capacity, but at most `max_slots` each. The excess goes to the others.

    Example: 12 slots, at most 8, capacities 8, 1, 1 -> 8, 2, 2.
    """
    share = np.zeros(len(capacity))
    growing = np.full(len(capacity), True)
    while growing.any():
        left = slots - share[~growing].sum()
        share[growing] = left * capacity[growing] / capacity[growing].sum()
        is_over = growing & (share > max_slots)
        if not is_over.any():
            break
        share[is_over] = max_slots
        growing &= ~is_over
    return share


# ---- copies


def copies(load: FloatArray, room: IntArray, min_replicas: int) -> IntArray:
    """[E] number of copies of each expert. Together they fill all slots: their sum is sum(room).

    room: [N] slots of each server. Example: load 8 4 2 2, room 3 3, min_replicas 1 -> 2 2 1 1.
    """
    experts = len(load)
    max_copies = np.minimum(room[:, None], np.arange(1, experts + 1)).sum(axis=0)
    count = np.full(experts, min_replicas, dtype=np.int64)
    load_per_copy = load / count
    for _ in range(int(room.sum()) - experts * min_replicas):
        while True:
            expert = int(load_per_copy.argmax())
            count[expert] += 1
            if (np.sort(count)[::-1].cumsum() <= max_copies).all():
                load_per_copy[expert] = load[expert] / count[expert]
                break
            count[expert] -= 1
            load_per_copy[expert] = -1.0
    return count


# ---- packing


@dataclass(frozen=True)
class Layer:
    """A layer to pack: copies of E experts for the slots of N servers."""

    load_per_copy: FloatArray
    """[E] load of one copy of each expert."""
    count: IntArray
    """[E] number of copies of each expert."""
    room: IntArray
    """[N] slots of each server; sum(room) == sum(count)."""
    capacity: FloatArray
    """[N] capacity weight of each server."""
    server_hosts: Hosts | None = None
    """The hosts of the servers. None: all are on one host."""

    @property
    def hosts(self) -> Hosts:
        """The hosts of the servers."""
        return Hosts.single(len(self.room)) if self.server_hosts is None else self.server_hosts

    @property
    def order(self) -> list[int]:
        """Experts in order of the load of one copy, heaviest first."""
        order: list[int] = np.argsort(-self.load_per_copy, kind="stable").tolist()
        return order


def keep_copies(layer: Layer, old_copies: BoolArray, limit: float) -> BoolArray:
    """[E, N] True for the copies of `old_copies` that stay: as many as count, room and limit allow.

    limit: maximum load / capacity of a server. Surplus copies are removed from the hosts with most copies of
    the expert, and there from the servers with the largest load / capacity. A server with too many copies or
    too much load drops the lightest copy that suffices. If none suffices, it drops its heaviest copy, and so
    on.

    Example: a server has copies of load 6, 3 and 1, room for 3 and limit 7. The copy of 3 is dropped, 6 and
    1 stay.
    """
    kept_copies = old_copies.copy()
    server_loads = layer.load_per_copy @ kept_copies
    for expert in np.flatnonzero(kept_copies.sum(axis=1) > layer.count).tolist():
        for _ in range(int(kept_copies[expert].sum() - layer.count[expert])):
            of_host = layer.hosts.copies(kept_copies[[expert]])[0, layer.hosts.host_of_server]
            spare = kept_copies[expert] & (of_host == of_host[kept_copies[expert]].max())
            server = int(np.where(spare, server_loads / layer.capacity, -1.0).argmax())
            kept_copies[expert, server] = False
            server_loads[server] -= layer.load_per_copy[expert]
    for server, server_copies in enumerate(kept_copies.T):
        max_load = limit * layer.capacity[server]
        while (carries := layer.load_per_copy @ server_copies) > max_load or server_copies.sum() > layer.room[
            server
        ]:
            is_sufficient = server_copies & (layer.load_per_copy >= carries - max_load)
            lightest = np.where(is_sufficient, layer.load_per_copy, np.inf).argmin()
            heaviest = np.where(server_copies, layer.load_per_copy, -1.0).argmax()
            server_copies[lightest if is_sufficient.any() else heaviest] = False
    return kept_copies


def pack(layer: Layer, kept_copies: BoolArray) -> BoolArray:
    """[E, N] True where a server gets a copy.

    Copies of `kept_copies` stay where possible, the rest are placed by load / capacity. Each host gets a
    copy before another one gets a second, where servers have room.
    """
    has_copy = np.zeros_like(kept_copies)
    left = layer.room.copy()
    free = left - kept_copies.sum(axis=0)
    server_loads = layer.load_per_copy @ kept_copies
    demand = (layer.count[:, None] > np.arange(len(left))).sum(axis=0)
    for expert in layer.order:
        count = int(layer.count[expert])
        demand[:count] -= 1
        raised_load = (server_loads + layer.load_per_copy[expert]) / layer.capacity
        rank = np.lexsort((raised_load, free <= 0, ~kept_copies[expert], left == 0))
        if layer.hosts.count > 1:
            is_blocked = (free <= 0) & ~kept_copies[expert]
            rank = np.lexsort((rank.argsort(), layer.hosts.ordinals(rank), is_blocked, left == 0))
        chosen_servers = _match_servers(rank[:count].tolist(), left, demand)
        has_copy[expert, chosen_servers] = True
        left[chosen_servers] -= 1
        change = has_copy[expert].astype(np.int64) - kept_copies[expert]
        free -= change
        server_loads += layer.load_per_copy[expert] * change
    return has_copy


def _match_servers(servers: list[int], left: IntArray, demand: IntArray) -> list[int]:
    """The servers `servers` for an expert, changed until all remaining copies can still find a server.

    Each change replaces the chosen server with the fewest free slots by the other server with the most.
    Choosing only the servers with the most free slots always succeeds.

    left: [N] free slots before this expert is placed. demand: [N] element k is the number of remaining
    experts with more than k copies.

    Example: left is 2 1 and one expert with 2 copies is to come, so demand is 1 1. Then [1] becomes [0].
    """
    roomiest = np.argsort(-left, kind="stable").tolist()
    while not _fits(servers, left, demand):
        roomier = next(server for server in roomiest if server not in servers)
        servers.remove(min(reversed(servers), key=lambda server: left[server]))
        servers.append(roomier)
    return servers


def _fits(servers: list[int], left: IntArray, demand: IntArray) -> bool:
    slots_after = left.copy()
    slots_after[servers] -= 1
    return bool((np.sort(slots_after)[::-1].cumsum() <= demand.cumsum()).all())


def swap(layer: Layer, has_copy: BoolArray, limit: float) -> BoolArray:
    """Exchange copies with the most loaded server until its load / capacity is at most `limit`.

    Each step makes the exchange that leaves the lowest peak of both servers. It stops when no exchange
    lowers the peak. No exchange lowers the spread over hosts.

    Example: loads 5 4 and 3 2 on two equal servers -> 3 4 and 5 2.
    """
    has_copy = has_copy.copy()
    server_loads = layer.load_per_copy @ has_copy
    for _ in range(has_copy.size):
        ratio = server_loads / layer.capacity
        top = int(ratio.argmax())
        if ratio[top] <= limit:
            break
        options = [
            _exchange(layer, has_copy, server_loads, top, other)
            for other in range(len(ratio))
            if other != top
        ]
        peak, lost_expert, gained_expert, partner = min(options, default=(np.inf, 0, 0, 0))
        if peak >= ratio[top] * (1 - EXACT):
            break
        has_copy[[lost_expert, gained_expert], top] = False, True
        has_copy[[lost_expert, gained_expert], partner] = True, False
        server_loads = layer.load_per_copy @ has_copy
    return has_copy


def _exchange(
    layer: Layer, has_copy: BoolArray, server_loads: FloatArray, top: int, partner: int
) -> tuple[float, int, int, int]:
    """The best exchange between two servers: (peak of both afterwards, expert from `top`, expert from
    `partner`, other)."""
    gives = np.flatnonzero(has_copy[:, top] & ~has_copy[:, partner])
    takes = np.flatnonzero(has_copy[:, partner] & ~has_copy[:, top])
    if not len(gives) or not len(takes):
        return np.inf, 0, 0, partner
    change = layer.load_per_copy[gives][:, None] - layer.load_per_copy[takes]
    peak = np.maximum(
        (server_loads[top] - change) / layer.capacity[top],
        (server_loads[partner] + change) / layer.capacity[partner],
    )
    top_host, partner_host = layer.hosts.host_of_server[[top, partner]].tolist()
    if top_host != partner_host:
        copies = layer.hosts.copies(has_copy)
        spread_gain = layer.hosts.gain(copies, top_host, partner_host)[gives][:, None]
        peak[spread_gain + layer.hosts.gain(copies, partner_host, top_host)[takes] < 0] = np.inf
    best = int(peak.argmin())
    return float(peak.flat[best]), int(gives[best // len(takes)]), int(takes[best % len(takes)]), partner


# ---- hosts


def settle(layer: Layer, has_copy: BoolArray, limit: float) -> BoolArray:
    """Spread over hosts and exchange for balance (`swap`), until no exchange of either kind is left."""
    while True:
        has_copy = swap(layer, has_copy, limit)
        spread_copies = spread(layer, has_copy)
        if (spread_copies == has_copy).all():
            return has_copy
        has_copy = spread_copies


def spread(layer: Layer, has_copy: BoolArray, kept_copies: BoolArray | None = None) -> BoolArray:
    """Exchange copies between hosts as long as that raises the sum of the experts' spreads.

    Each step takes a copy of an expert that has another one on the same host. It makes the exchange that
    gains most. Of several it makes the one that takes the fewest copies of `kept_copies` away, then the
    one that leaves the lowest peak of both servers. With one host, nothing changes.

    Example: servers 0 and 1 are on one host, 2 and 3 on another one. Servers hold experts 0, 0, 1, 1. Servers
    1 and 2 exchange their copies, so each expert is on both hosts.
    """
    has_copy, hosts = has_copy.copy(), layer.hosts
    stays = np.zeros_like(has_copy) if kept_copies is None else kept_copies
    has_changed = hosts.count > 1
    while has_changed:
        has_changed = False
        for expert in layer.order:
            while (exchange := _parting(layer, has_copy, stays, expert)) is not None:
                source, target, returned_expert = exchange
                has_copy[expert, [source, target]] = False, True
                has_copy[returned_expert, [source, target]] = True, False
                has_changed = True
    return has_copy


def _parting(layer: Layer, has_copy: BoolArray, stays: BoolArray, expert: int) -> tuple[int, int, int] | None:
    """The best exchange for the spread of an expert: (the server that gives its copy away, the one that gets
    it, the expert that goes the other way). None if no exchange gains."""
    hosts, copies = layer.hosts, layer.hosts.copies(has_copy)
    if copies[expert].max() < 2 or copies[expert].min() > 0:
        return None
    server_loads, options = layer.load_per_copy @ has_copy, []
    for source in np.flatnonzero(has_copy[expert] & (copies[expert] > 1)[hosts.host_of_server]).tolist():
        host = int(hosts.host_of_server[source])
        return_gain = np.stack([hosts.gain(copies, there, host) for there in range(hosts.count)], axis=1)
        spread_gain = (
            hosts.gain(copies[[expert]], host, int(copies[expert].argmin()))
            + return_gain[:, hosts.host_of_server]
        )
        possible = has_copy & ~has_copy[:, [source]] & (copies[expert] == 0)[hosts.host_of_server]
        spread_gain = np.where(possible, spread_gain, 0.0)
        change = layer.load_per_copy[expert] - layer.load_per_copy[:, None]
        peak = np.maximum(
            (server_loads[source] - change) / layer.capacity[source], (server_loads + change) / layer.capacity
        )
        num_kept_moved = stays.astype(np.int64) + stays[expert, source]
        first = int(np.lexsort((peak.ravel(), num_kept_moved.ravel(), -spread_gain.ravel()))[0])
        returned_expert, target = divmod(first, has_copy.shape[1])
        figures = -spread_gain.flat[first], num_kept_moved.flat[first], peak.flat[first]
        options.append((*map(float, figures), source, target, returned_expert))
    negated_gain, _, _, source, target, returned_expert = min(options)
    return (source, target, returned_expert) if negated_gain < 0 else None
