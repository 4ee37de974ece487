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
    experts_by_layer, server_hosts = {}, Hosts.from_names(ids, hosts)
    for row, layer in enumerate(layers):
        weight = np.asarray(load[row], dtype=np.float64)
        weight = weight if weight.any() else np.ones(len(weight))
        home = copy_mask(homes, layer, ids, homes.num_experts)
        new_copies = _add_copies(weight, home, capacity, server_hosts, redundant, min_replicas)
        old_copies = copy_mask(previous, layer, ids, homes.num_experts)
        safe = server_hosts.count_on_one_host(old_copies) <= server_hosts.count_on_one_host(new_copies)
        if safe and _may_stay(old_copies, home, new_copies, min_replicas):
            limit = _peak(weight, new_copies, capacity) * (1 + slack + EXACT)
            new_copies = old_copies if _peak(weight, old_copies, capacity) <= limit else new_copies
        experts_by_layer[layer] = {
            server: np.flatnonzero(new_copies[:, at]).tolist() for at, server in enumerate(ids)
        }
    new = Placement(
        homes.version if previous is None else previous.version + 1,
        homes.num_experts,
        experts_by_layer,
        homes.model,
        homes.tables,
    )
    return previous if previous is not None and previous.experts_by_layer == new.experts_by_layer else new


def _add_copies(
    load: FloatArray, home: BoolArray, capacity: FloatArray, hosts: Hosts, redundant: int, min_replicas: int
) -> BoolArray:
    """[E, N] the copies of one layer."""
    has_copy, servers = home.copy(), len(capacity)
    total = min(max(home.sum() + redundant, has_copy.shape[0] * min_replicas), has_copy.size)
    for expert in np.argsort(-load, kind="stable"):
        while has_copy[expert].sum() < min_replicas:
            candidates = hosts.choose_servers(has_copy[expert], ~has_copy[expert])
            has_copy[expert, _coolest(load, has_copy, capacity, candidates)] = True
    left = int(total - has_copy.sum())
    room = np.full(servers, -(-left // servers))
    for _ in range(left):
        lacking = ~has_copy & (room > 0)
        load_per_copy = np.where(lacking.any(axis=1), load / has_copy.sum(axis=1), -1.0)
        expert = int(load_per_copy.argmax())
        if load_per_copy[expert] < 0:
            break
        at = _coolest(load, has_copy, capacity, hosts.choose_servers(has_copy[expert], lacking[expert]))
        has_copy[expert, at] = True
        room[at] -= 1
    return has_copy


def _coolest(load: FloatArray, has_copy: BoolArray, capacity: FloatArray, candidates: BoolArray) -> int:
    """The server of `candidates` with the least load / capacity."""
    return int(np.where(candidates, _loads(load, has_copy) / capacity, np.inf).argmin())


def _loads(load: FloatArray, has_copy: BoolArray) -> FloatArray:
    """[N] load of each server. An expert's load is divided evenly among its copies."""
    loads: FloatArray = (load / has_copy.sum(axis=1)) @ has_copy
    return loads


def _peak(load: FloatArray, has_copy: BoolArray, capacity: FloatArray) -> float:
    return float((_loads(load, has_copy) / capacity).max())


def _may_stay(old_copies: BoolArray, home: BoolArray, new_copies: BoolArray, min_replicas: int) -> bool:
    """Whether `old_copies` has all homes, as many copies as `new_copies`, and enough of each expert."""
    has_min_replicas = old_copies.sum(axis=1).min() >= min_replicas
    return bool(has_min_replicas and (old_copies >= home).all() and old_copies.sum() == new_copies.sum())
