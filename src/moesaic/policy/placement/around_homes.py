"""Copies of experts beside those of a placement from a file: the file's stay, and the others follow load.

The file says on which servers each expert is at home, for reasons that loads do not show, such as which
tokens come to which rank. Copies protect against deaths and share load, so they may be anywhere. Each layer
alone:

 1. *Promise.* An expert with fewer than `min_replicas` copies, heaviest first, gets more, each on the server
    with the least load / capacity that does not have it, if possible on a host that does not have it.
 2. *Budget.* Each further copy is of the expert with the largest load per copy, on the server with the least
    load / capacity that does not have it, if possible on a host that does not have it. No server gets more
    than its share of them, rounded up.
 3. *Few moves.* The copies before stay if the layer's largest load / capacity is then within `slack`, and if
    no more experts have all of their copies on one host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moesaic.core.placement import Placement
from moesaic.policy.placement.balance import Load, copy_mask
from moesaic.policy.placement.packing import EXACT, BoolArray, FloatArray
from moesaic.policy.placement.spreading import Hosts


def place(
    homes: Placement,
    load: Load,
    layers: Sequence[int],
    servers: Mapping[int, float],
    redundant: int = 0,
    min_replicas: int = 1,
    previous: Placement | None = None,
    slack: float = 0.05,
    hosts: Mapping[int, str] | None = None,
) -> Placement:
    """Add copies to `homes`. Returns `previous` itself if that is good enough.

    load: [L, E] tokens of each expert. layers: [L] the layers' ids. servers: id -> capacity weight; among
    them must be those of `homes`. A layer has max(copies in homes + redundant, E * min_replicas) copies, or
    fewer where the servers have no place for them. min_replicas: at most the number of servers. hosts: as of
    `balance.place`.

    Example: experts 0 and 1 at home on server 0, 2 and 3 on server 1, loads 8 1 2 2, redundant 1. Expert 0
    has the largest load per copy, 8, so server 1 gets a copy, which takes 4 of its tokens.
    """
    ids = sorted(servers)
    capacity = np.array([servers[server] for server in ids], dtype=np.float64)
    held, there = {}, Hosts.where(ids, hosts)
    for row, layer in enumerate(layers):
        weight = np.asarray(load[row], dtype=np.float64)
        weight = weight if weight.any() else np.ones(len(weight))
        home = copy_mask(homes, layer, ids, homes.num_experts)
        found = _copied(weight, home, capacity, there, redundant, min_replicas)
        before = copy_mask(previous, layer, ids, homes.num_experts)
        safe = there.on_one(before) <= there.on_one(found)
        if safe and _may_stay(before, home, found, min_replicas):
            limit = _peak(weight, found, capacity) * (1 + slack + EXACT)
            found = before if _peak(weight, before, capacity) <= limit else found
        held[layer] = {server: np.flatnonzero(found[:, at]).tolist() for at, server in enumerate(ids)}
    new = Placement(
        homes.version if previous is None else previous.version + 1,
        homes.num_experts,
        held,
        homes.model,
        homes.tables,
    )
    return previous if previous is not None and previous.experts_by_layer == new.experts_by_layer else new


def _copied(
    load: FloatArray, home: BoolArray, capacity: FloatArray, hosts: Hosts, redundant: int, min_replicas: int
) -> BoolArray:
    """[E, N] the copies of one layer."""
    held, servers = home.copy(), len(capacity)
    total = min(max(home.sum() + redundant, held.shape[0] * min_replicas), held.size)
    for expert in np.argsort(-load, kind="stable"):
        while held[expert].sum() < min_replicas:
            among = hosts.preferred(held[expert], ~held[expert])
            held[expert, _coolest(load, held, capacity, among)] = True
    left = int(total - held.sum())
    room = np.full(servers, -(-left // servers))
    for _ in range(left):
        lacking = ~held & (room > 0)
        each = np.where(lacking.any(axis=1), load / held.sum(axis=1), -1.0)
        expert = int(each.argmax())
        if each[expert] < 0:
            break
        at = _coolest(load, held, capacity, hosts.preferred(held[expert], lacking[expert]))
        held[expert, at] = True
        room[at] -= 1
    return held


def _coolest(load: FloatArray, held: BoolArray, capacity: FloatArray, among: BoolArray) -> int:
    """The server of `among` with the least load / capacity."""
    return int(np.where(among, _loads(load, held) / capacity, np.inf).argmin())


def _loads(load: FloatArray, held: BoolArray) -> FloatArray:
    """[N] load of each server. An expert's load is divided evenly among its copies."""
    loads: FloatArray = (load / held.sum(axis=1)) @ held
    return loads


def _peak(load: FloatArray, held: BoolArray, capacity: FloatArray) -> float:
    return float((_loads(load, held) / capacity).max())


def _may_stay(before: BoolArray, home: BoolArray, found: BoolArray, min_replicas: int) -> bool:
    """Whether `before` has all homes, as many copies as `found`, and enough of each expert."""
    enough = before.sum(axis=1).min() >= min_replicas
    return bool(enough and (before >= home).all() and before.sum() == found.sum())
