"""Balances experts over servers: how many copies each expert has, and which server has which copy.

Expert-as-a-Service (section 4.5) names three means of balance: servers with different numbers of experts,
more copies of hot experts, and servers of different capacity. It gives no rule. The rule of this module
handles each layer alone:

 1. *Slots.* The layer's slots are divided among the servers by capacity weight. The remainder goes to
    different servers in different layers, so that the servers' totals are fair too.
 2. *Copies.* Every expert first gets `min_replicas`. Each further slot goes to the expert with the largest
    load per copy, as in DeepSeek EPLB. Cold experts thus have a single copy.
 3. *Packing.* Experts are placed by load per copy, heaviest first. Each goes to the servers where it raises
    load / capacity least, and never twice to one server. Then copies are exchanged as long as that lowers
    the layer's *peak*, its largest load / capacity.
 4. *Hosts.* Where servers are on several hosts, copies are exchanged until an expert's copies are on
    different hosts, as far as the slots allow. No exchange for balance undoes that.
 5. *Few moves.* Copies stay where they are if possible. Only as many are exchanged as it takes to bring the
    peak within `slack` of a placement from scratch, and to have no more experts on one host only.

A layer without any load counts as evenly loaded. The load of an expert is divided evenly among its copies.

Question: How many copies does each expert get, and on which servers (EPLB)?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement, count_copies
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.packing import (
    EXACT,
    BoolArray,
    FloatArray,
    Layer,
    copies,
    keep_copies,
    pack,
    server_slots,
    settle,
    spread,
)
from moesaic.policy.placement.spreading import Hosts

Load = FloatArray | IntArray


def place(
    load: Load,
    layers: Sequence[int],
    servers: Mapping[int, float],
    redundant: int = 0,
    min_replicas: int = 1,
    previous: Placement | None = None,
    slack: float = 0.05,
    model: str = "",
    hosts: Mapping[int, str] | None = None,
) -> Placement:
    """Find a balanced placement. Returns `previous` itself if that is good enough.

    load: [L, E] tokens of each expert, finite, not negative. layers: [L] the layers' ids, ascending.
    servers: id -> capacity weight, the server's share of slots and of load. slack: how far a layer's peak
    may exceed the best one found, relatively, in order to save moves. Without `previous`, the search starts
    from consecutive ranges of experts and slack is 0. model: fingerprint, by default that of `previous`.
    hosts: server -> its host. Those that are not in it are on one more host. None: all are on one host.

    A layer has max(E + redundant, E * min_replicas) slots. `--min-replicas 2` alone is thus enough for two
    copies of every expert. Redundant slots beyond that follow load. At most E * servers slots can be used.
    Further ones stay empty, since redundant slots are a budget and min_replicas is a promise. An expert's
    copies are on several hosts, if slots allow it. With two each, no host may have over half of the capacity.

    Raises ConfigError for fewer servers than min_replicas, and for invalid loads, counts or weights.

    Example: load [[8, 4, 2, 2]], servers {0: 1, 1: 1}, redundant 2. There are six slots, three a server.
    The fifth goes to expert 0, which has the largest load per copy, 8. Then experts 0 and 1 both have 4 per
    copy. Expert 0 cannot have a third copy on two servers, so the sixth slot goes to expert 1. Each server
    gets experts 0, 1 and one of the others, and a load of 8.
    """
    _check(load, layers, servers, redundant, min_replicas, previous)
    load, ids, experts = np.asarray(load, dtype=np.float64), sorted(servers), load.shape[1]
    capacity = np.array([servers[server] for server in ids], dtype=np.float64)
    slots = min(count_copies(experts, redundant, min_replicas), experts * len(ids))
    old_copies = [copy_mask(previous, layer, ids, experts) for layer in layers]
    server_hosts = Hosts.from_names(ids, hosts)
    old_counts = np.array([copies.sum(axis=0) for copies in old_copies])
    room = server_slots(slots, experts, capacity, old_counts, server_hosts)
    experts_by_layer, spare = {}, slack if previous else 0.0
    for row, layer in enumerate(layers):
        start = old_copies[row] if previous else _ranges(experts, room[row])
        has_copy = _place_layer(load[row], room[row], capacity, server_hosts, min_replicas, start, spare)
        columns = zip(ids, has_copy.T, strict=True)
        experts_by_layer[layer] = {server: np.flatnonzero(column).tolist() for server, column in columns}
    if previous is None:
        return Placement(0, experts, experts_by_layer, model)
    new = Placement(previous.version + 1, experts, experts_by_layer, model or previous.model)
    is_same = (previous.experts_by_layer, previous.model) == (new.experts_by_layer, new.model)
    return previous if is_same else new


def _check(
    load: Load,
    layers: Sequence[int],
    servers: Mapping[int, float],
    redundant: int,
    min_replicas: int,
    previous: Placement | None,
) -> None:
    if not load.size or load.shape[0] != len(layers) or list(layers) != sorted(set(layers)):
        raise ValueError(f"load {load.shape} for layers {layers}: one row each, in ascending order")
    if previous is not None and previous.num_experts != load.shape[1]:
        raise ValueError(f"load has {load.shape[1]} experts, the previous placement {previous.num_experts}")
    if not np.isfinite(load).all() or load.min() < 0:
        worst = next(value for value in load.flat if not 0 <= value < np.inf)
        raise ConfigError.field("load", float(worst), "finite numbers from 0 on")
    if not servers:
        raise ConfigError.field("--expert-servers", 0, "at least 1")
    for server, weight in servers.items():
        if not 0 < weight < np.inf:
            raise ConfigError.field(f"capacity of server {server}", weight, "a positive number")
    if redundant < 0:
        raise ConfigError.field("--redundant-experts", redundant, "0 or more")
    if not 1 <= min_replicas <= len(servers):
        raise ConfigError.field("--min-replicas", min_replicas, f"1 to the {len(servers)} expert servers")


def copy_mask(placement: Placement | None, layer: int, ids: Sequence[int], experts: int) -> BoolArray:
    """[E, N] True where the server in `ids` has the expert."""
    has_copy = np.zeros((experts, len(ids)), dtype=np.bool_)
    by_server = placement.experts_by_layer.get(layer, {}) if placement else {}
    for column, server in enumerate(ids):
        has_copy[list(by_server.get(server, ())), column] = True
    return has_copy


def _ranges(experts: int, room: IntArray) -> BoolArray:
    """[E, N] a placement with one copy of each expert, in ranges proportional to the servers' slots."""
    ends = np.cumsum(room) * experts // room.sum()
    owner = np.searchsorted(ends, np.arange(experts), side="right")
    ranges: BoolArray = owner[:, None] == np.arange(len(room))
    return ranges


def _place_layer(
    load: FloatArray,
    room: IntArray,
    capacity: FloatArray,
    hosts: Hosts,
    min_replicas: int,
    old_copies: BoolArray,
    slack: float,
) -> BoolArray:
    """[E, N] the placement of one layer: the first candidate with a peak within `slack` of the best one.

    Candidates are tried in order of the moves that they need, fewest first. One with more experts on one
    host only than another one is left out.
    """
    load = load if load.any() else np.ones(len(load))
    count = copies(load, room, min_replicas)
    layer = Layer(load / count, count, room, capacity, hosts)
    fresh = settle(layer, spread(layer, pack(layer, np.zeros_like(old_copies))), 0.0)
    may_stay = (old_copies.sum(axis=0) == room).all() and old_copies.sum(axis=1).min() >= min_replicas
    stay = (
        spread(replace(layer, load_per_copy=load / old_copies.sum(axis=1)), old_copies) if may_stay else fresh
    )
    fewest = min(hosts.count_on_one_host(fresh), hosts.count_on_one_host(stay))
    safe = [found for found in (stay, fresh) if hosts.count_on_one_host(found) == fewest]
    limit = min(_peak(load, found, capacity) for found in safe) * (1 + slack + EXACT)
    if may_stay and hosts.count_on_one_host(stay) == fewest and _peak(load, stay, capacity) <= limit:
        return stay
    stays = keep_copies(layer, old_copies, limit)
    new_copies = settle(layer, spread(layer, pack(layer, stays), stays), limit)
    if hosts.count_on_one_host(new_copies) <= fewest and _peak(load, new_copies, capacity) <= limit:
        return new_copies
    return safe[-1]


def _peak(load: FloatArray, has_copy: BoolArray, capacity: FloatArray) -> float:
    """Largest load / capacity of a server."""
    return float(((load / has_copy.sum(axis=1)) @ has_copy / capacity).max())


# ---- what a change costs and brings


@dataclass(frozen=True)
class Move:
    """A copy to load: `server` gets `expert` of `layer`."""

    layer: int
    expert: int
    server: int


def moves(old: Placement | None, new: Placement) -> list[Move]:
    """The copies that `new` has and `old` lacks, in order of layer, expert, server."""
    return [
        Move(layer, expert, server)
        for layer in new.layers
        for expert in range(new.num_experts)
        for server in new.holders(layer, expert)
        if old is None
        or server not in old.experts_by_layer.get(layer, {})
        or expert not in old.experts_by_layer[layer][server]
    ]


def server_loads(load: Load, placement: Placement, servers: Sequence[int]) -> FloatArray:
    """[L, N] load of each of `servers`. Rows are in the order of placement.layers.

    The load of an expert, from load [L, E], is divided evenly among its copies on these servers. The load
    of experts without a copy there is dropped.
    """
    loads = np.empty((len(placement.layers), len(servers)))
    for row, layer in enumerate(placement.layers):
        has_copy = copy_mask(placement, layer, servers, placement.num_experts)
        loads[row] = (load[row] / np.maximum(has_copy.sum(axis=1), 1)) @ has_copy
    return loads


def critical_load(load: Load, placement: Placement, servers: Mapping[int, float]) -> float:
    """Sum over the layers of the largest load / capacity of a server.

    Steps in lockstep wait for that server.

    servers: id -> capacity weight of the servers that are alive.
    """
    capacity = np.array(list(servers.values()))
    return float((server_loads(load, placement, list(servers)) / capacity).max(axis=1).sum())


def gain(load: Load, old: Placement, new: Placement, servers: Mapping[int, float]) -> float:
    """Share by which `new` lowers the critical load of load [L, E]. It is negative if `new` raises it.

    Returns 1 if `old` has lost all copies of an expert, since requests would then wait forever.

    Example: critical loads of 20 before and 15 after give 0.25.
    """
    if old.orphans(excluded_servers=set(old.servers) - set(servers)):
        return 1.0
    old_load = critical_load(load, old, servers)
    return 1 - critical_load(load, new, servers) / old_load if old_load else 0.0


def gain_seconds(gain: float, busy: float, horizon: float) -> float:
    """Seconds that a gain saves over `horizon` seconds, if the share `busy` of them is spent on experts.

    Example: gain 0.25, experts take 40 % of the time, and the load is steady for 300 s: 0.25 * 0.4 * 300 =
    30 s.
    """
    return gain * busy * horizon


def worth_moving(gain_seconds: float, move_bytes: int, bandwidth: float, margin: float = 2.0) -> bool:
    """True if gain_seconds > margin * move_bytes / bandwidth.

    move_bytes: bytes for the server that has the most to load, since servers load at the same time.
    bandwidth: bytes/s of that server. The price assumes that it serves nothing while it loads. margin:
    safety factor, since the forecast assumes that the load stays the same.

    Example: 8 GiB at 1 GiB/s cost 2 * 8 = 16 s. A gain of 30 s justifies that.
    """
    return gain_seconds > margin * move_bytes / bandwidth


def busiest_bytes(moves: Iterable[Move], expert_bytes: int) -> int:
    """Bytes for the server that has the most copies to load."""
    return expert_bytes * max(Counter(move.server for move in moves).values(), default=0)


# ---- how even a load is


def balancedness(load: Load) -> FloatArray:
    """[L] mean / max of each row of load [L, servers]. 1 means perfectly even. A row without load gives 1."""
    peak = load.max(axis=1)
    even = np.ones(len(load))
    np.divide(load.mean(axis=1), peak, out=even, where=peak > 0)
    return even


def max_over_median(load: Load) -> FloatArray:
    """[L] max / median of each row of load [L, servers], the papers' measure of imbalance.

    A row without load gives 1.
    """
    peak, median = load.max(axis=1), np.median(load, axis=1)
    uneven: FloatArray = np.where(peak > 0, np.inf, 1.0)
    np.divide(peak, median, out=uneven, where=median > 0)
    return uneven


class LoadWindow:
    """Counts the tokens of each expert over the last `intervals` intervals. Older tokens no longer count."""

    def __init__(self, num_layers: int, num_experts: int, intervals: int) -> None:
        if intervals < 1:
            raise ConfigError.field("intervals", intervals, "at least 1")
        self._counts = np.zeros((intervals, num_layers, num_experts), dtype=np.int64)
        self._next = 0
        self.totals = np.zeros((num_layers, num_experts), dtype=np.int64)
        """[L, E] tokens of each expert, summed over the window."""

    def __len__(self) -> int:
        """Number of intervals in the window."""
        return min(self._next, len(self._counts))

    def add(self, counts: IntArray) -> None:
        """Add the tokens of one interval, [L, E]."""
        slot = self._counts[self._next % len(self._counts)]
        self.totals = self.totals + counts - slot
        slot[:] = counts
        self._next += 1
