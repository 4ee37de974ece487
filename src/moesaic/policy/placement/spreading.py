"""Spreads the copies of an expert over hosts, so that an expert with two copies outlives any one host.

A host is what fails as a whole (Kubernetes: a topology domain of its `topologySpreadConstraints`). The spread
of an expert whose copies are on d hosts is 1 - 1 / 2^d. The second host thus counts more than all further
ones together. `packing.spread` raises the sum over a layer's experts as long as an exchange of two copies
does.

Question: On how many hosts are the copies of an expert?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.placement import NO_SERVER, Placement
from moesaic.core.tokens import IntArray

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Hosts:
    """The hosts of N servers."""

    host_of_server: IntArray
    """[N] number of each server's host, from 0 on."""

    @classmethod
    def from_names(cls, servers: Sequence[int], hosts: Mapping[int, str] | None) -> Hosts:
        """The hosts of these servers. hosts: server -> host; who is not in it is on the host "".

        None: all servers are on one host.
        """
        names = [(hosts or {}).get(server, "") for server in servers]
        return cls(np.unique(names, return_inverse=True)[1].astype(np.int64))

    @classmethod
    def single(cls, servers: int) -> Hosts:
        """So many servers, all on one host."""
        return cls(np.zeros(servers, dtype=np.int64))

    @property
    def count(self) -> int:
        """Number of hosts."""
        return int(self.host_of_server.max(initial=0)) + 1

    def copies(self, has_copy: BoolArray) -> IntArray:
        """[E, hosts] number of copies on each host. has_copy: [E, N] True where a server has the expert."""
        counts: IntArray = has_copy.astype(np.int64) @ np.eye(self.count, dtype=np.int64)[self.host_of_server]
        return counts

    def count_on_one_host(self, has_copy: BoolArray) -> int:
        """Number of experts with several copies, all of them on one host. 0 if there is one host only."""
        copies = self.copies(has_copy)
        on_one_host = ((copies > 0).sum(axis=1) == 1) & (copies.sum(axis=1) > 1)
        return int(on_one_host.sum()) if self.count > 1 else 0

    def ordinals(self, order: IntArray) -> IntArray:
        """[N] how many servers of the same host stand before each server in `order`.

        Example: servers 0 and 1 on host 0, 2 on host 1, order 1 0 2 -> 1 0 0.
        """
        found = np.zeros(len(order), dtype=np.int64)
        num_seen = np.zeros(self.count, dtype=np.int64)
        for server in order.tolist():
            found[server] = num_seen[self.host_of_server[server]]
            num_seen[self.host_of_server[server]] += 1
        return found

    def choose_servers(self, has_copy: BoolArray, candidates: BoolArray) -> BoolArray:
        """[N] servers of `candidates` [N] on the hosts with the fewest copies of an expert. has_copy: [N]."""
        copies = self.copies(has_copy[None])[0, self.host_of_server]
        servers: BoolArray = candidates & (copies == copies[candidates].min(initial=len(has_copy)))
        return servers

    def gain(self, copies: IntArray, source: int, target: int) -> FloatArray:
        """[E] what the spread of each expert gains if a copy moves from one host to another.

        copies: [E, hosts]. Only the rows of experts with a copy at `source` mean something.
        """
        hosts = (copies > 0).sum(axis=1)
        if source == target:
            return np.zeros(len(copies))
        hosts_after = hosts - (copies[:, source] == 1) + (copies[:, target] == 0)
        spread_gain: FloatArray = 0.5**hosts - 0.5**hosts_after
        return spread_gain


def on_one_host(
    placement: Placement, layer: int, servers: Sequence[int], hosts: Mapping[int, str] | None
) -> int:
    """Number of the layer's experts that have several copies on these servers, all of them on one host.

    hosts: as `Hosts.host_of_server`. Returns 0 if all of these servers are on one host.
    """
    table = placement.table(layer)
    mask = np.zeros(
        (placement.num_experts, max(NO_SERVER + 1, int(table.max()), *servers) + 2), dtype=np.bool_
    )
    np.put_along_axis(mask, table, True, axis=1)  # NOBODY, -1, marks the last column, which is no server
    return Hosts.from_names(servers, hosts).count_on_one_host(mask[:, list(servers)])


def count_exposed(placement: Placement, servers: Sequence[int], hosts: Mapping[int, str] | None) -> int:
    """The sum of `on_one_host` over all layers."""
    return sum(on_one_host(placement, layer, servers, hosts) for layer in placement.layers)
