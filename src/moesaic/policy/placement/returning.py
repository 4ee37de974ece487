"""Places experts on servers that have some of them in memory already, so that few are loaded.

Servers that joined keep their experts when their supervisor is gone. The next supervisor knows no load. But
the last one gave more copies to hot experts. So the number of copies that the servers have stands for load.

Question: Which experts does a server get if some are in its memory already?
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from moesaic.core.placement import Placement
from moesaic.policy.placement import balance

Kept = Mapping[int, Sequence[int]]
"""Layer -> the experts that a server has in memory, as it says."""


def place(
    resident_experts: Mapping[int, Kept],
    layers: Sequence[int],
    num_experts: int,
    servers: Mapping[int, float],
    redundant: int = 0,
    min_replicas: int = 1,
    model: str = "",
    hosts: Mapping[int, str] | None = None,
) -> Placement:
    """The first placement of a new supervisor: each server keeps what it has, as far as its share allows.

    resident_experts: server -> what it has in memory. Servers, layers and experts that do not exist are
    ignored.
    The other parameters are those of `balance.place`. Shares, copies and hosts follow its rules too, but no
    expert moves for its load. Raises what that raises.

    Example: two equal servers, four experts. Server 0 has experts 2 and 3, server 1 has 1. Server 1 gets 0.
    """
    joined_placement = add_servers(
        Placement(0, num_experts, {layer: {} for layer in layers}, model), resident_experts, servers
    )
    copies = np.array([joined_placement.replicas(layer) for layer in layers])
    load = np.maximum(copies, max(1, min_replicas))
    previous = joined_placement if copies.any() else None
    rules = redundant, min_replicas, previous, math.inf, model, hosts  # any slack, as no load is known
    return replace(balance.place(load, layers, servers, *rules), version=0)


def add_servers(
    placement: Placement, resident_experts: Mapping[int, Kept], servers: Mapping[int, float]
) -> Placement:
    """`placement` as if these servers had a place in it with the experts that they have in memory.

    It is a placement to stay close to, not one to serve by. Its version is one higher. resident_experts,
    servers: as of `place`.
    """
    experts_by_layer = {layer: dict(by_server) for layer, by_server in placement.experts_by_layer.items()}
    for server, experts in resident_experts.items():
        for layer in experts_by_layer if server in servers else ():
            known_experts = {one for one in experts.get(layer, ()) if 0 <= one < placement.num_experts}
            experts_by_layer[layer][server] = sorted(
                known_experts | set(experts_by_layer[layer].get(server, ()))
            )
    return replace(placement, version=placement.version + 1, experts_by_layer=experts_by_layer)


def count_missing(placement: Placement, resident_experts: Mapping[int, Kept]) -> int:
    """The number of copies of `placement` that its servers have to load. resident_experts: as of `place`."""
    return sum(
        len(set(experts) - set(resident_experts.get(server, {}).get(layer, ())))
        for layer, by_server in placement.experts_by_layer.items()
        for server, experts in by_server.items()
    )
