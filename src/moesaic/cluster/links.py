"""On which host each process is, and what the links between hosts are like.

They are those of --topology. Clients choose replicas by them, and requests are dispatched by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moesaic.cluster.member import Member, Role
from moesaic.cluster.members import Members
from moesaic.config import ClusterConfig
from moesaic.core import topology
from moesaic.core.topology import Topology, Way


class Links:
    """The hosts and links of one cluster."""

    def __init__(self, members: Members, cluster: ClusterConfig) -> None:
        """Raises ConfigError for a wrong file of --topology."""
        self._members = members
        self._ranks = cluster.enable_expert_parallel
        file = cluster.topology
        self._given: Topology | None = None if file is None else topology.read(Path(file))

    def ways(self, client: Member) -> dict[int, Way]:
        """Server -> the way from this worker to it. Empty if all processes are on one host."""
        servers = () if self._given is None else self._members.servers
        found = {server.number: self._way(client, server) for server in servers}
        return {} if all(way.near for way in found.values()) else found

    def worth(self, worker: int) -> npt.NDArray[np.float64]:
        """[ranks] worth, 0 to 1, of a pair that each server of a rank computes for this worker.

        See `link_prices.worth_of`. A worker that is gone has no near server.
        """
        workers, servers = self._members.workers, self._members.servers_here
        prices = {one.number: self._prices(one, servers) for one in workers}
        highest = max((float(row.max()) for row in prices.values() if len(row)), default=0.0)
        mine = prices.get(worker, np.full(len(servers), highest))
        found: npt.NDArray[np.float64] = 1.0 - mine / max(highest, 1e-300)
        return found

    def _prices(self, worker: Member, servers: Sequence[Member]) -> npt.NDArray[np.float64]:
        """[S] seconds of a byte to each server. The one of the worker's own rank costs nothing."""
        own = servers[self._members.workers.index(worker)].number if self._ranks else None
        return np.array(
            [
                0.0 if server.number == own else 1 / self._way(worker, server).link.bandwidth
                for server in servers
            ]
        )

    def _way(self, client: Member, server: Member) -> Way:
        one, other = self._host(client), self._host(server)
        assert self._given is not None
        return Way(self._given.link(one, other), one == other)

    def _host(self, member: Member) -> str:
        assert self._given is not None
        match member.role:
            case Role.WORKER:
                return self._given.host_of_worker(member.number)
            case Role.SERVER:
                return self._given.host_of_server(member.number)
        return self._given.hosts[0].name
