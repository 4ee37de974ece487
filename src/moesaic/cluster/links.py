"""On which host each process is, and what the links between hosts are like.

With --topology the file says both. Without it, a process that joins says its host, and the link between its
host and this one is measured (`transport.link_test`). Between two other hosts nothing is measured: their way
counts as one over this host. Clients choose replicas by these links, and requests are dispatched by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from moesaic.cluster.balancing import LINK
from moesaic.cluster.member import Member, Role
from moesaic.cluster.members import Members
from moesaic.config import ClusterConfig
from moesaic.core import topology
from moesaic.core.cluster_status import HostStatus, LinkStatus
from moesaic.core.paced import LinkModel
from moesaic.core.topology import FloatArray, Host, HostLink, Topology, Way

HERE = ""
"""Name of the host of `moesaic serve`, where no file names it."""
INSIDE = LinkModel(0.0, LINK)
"""What is assumed of the link between two processes of a host."""
BETWEEN = LinkModel(1e-4, 1.25e9)
"""What is assumed of the link to a host that could not be measured: 10 Gbit/s."""


class Links:
    """The hosts and links of one cluster. `measured` and the queries may be called from any thread."""

    def __init__(self, members: Members, cluster: ClusterConfig) -> None:
        """Raises ConfigError for a wrong file of --topology."""
        self._members = members
        self._ranks = cluster.enable_expert_parallel
        file = cluster.topology
        self._given: Topology | None = None if file is None else topology.read(Path(file))
        self._measured: Mapping[str, LinkModel] = {}
        """Host -> its link to this host."""

    def measured(self, host: str, link: LinkModel) -> None:
        """Keep what was measured. host: as of `Member.host_id`."""
        self._measured = {**self._measured, host: link}

    def ways(self, client: Member) -> dict[int, Way]:
        """Server -> the way from this worker to it. Empty if all processes are on one host."""
        found = {server.number: self._way(client, server) for server in self._members.servers}
        return {} if all(way.near for way in found.values()) else found

    def worth(self, worker: int, servers: Sequence[int]) -> FloatArray:
        """[S] worth, 0 to 1, of a pair that each of the servers computes for this worker.

        See `link_prices.worth_of`: the own rank's server has 1, and the slowest link of all has 0. A worker
        or a server that is gone has no near one.
        """
        known = {member.number: member for member in self._members.servers}
        found = [known[number] for number in servers if number in known]
        workers = self._members.workers
        prices = np.array([[self._price(one, server) for server in found] for one in workers])
        highest = max(1e-300, float(prices.max(initial=0.0)))
        rows = {one.number: row for one, row in zip(workers, prices, strict=True)}
        mine = dict(zip((server.number for server in found), rows.get(worker, ()), strict=False))
        return np.array([1.0 - mine.get(number, highest) / highest for number in servers])

    def prices(self, workers: Sequence[Member], servers: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        """[W][S] seconds of a byte from each worker to each server. Empty if all are on one host."""
        known = {member.number: member for member in self._members.servers}
        if not any(self.ways(worker) for worker in workers):
            return ()
        return tuple(tuple(self._price(worker, known[number]) for number in servers) for worker in workers)

    # ---- the status

    def hosts(self) -> list[HostStatus]:
        """The hosts that have processes, or that the file names, and the names of their processes."""
        names = [host.name for host in self._given.hosts] if self._given else [HERE]
        found: dict[str, list[str]] = {name: [] for name in names}
        for member in self._members.all:
            found.setdefault(self._host(member), []).append(member.name)
        return [HostStatus(name, processes) for name, processes in found.items()]

    def links(self) -> list[LinkStatus]:
        """The links between any two of these hosts, and what is known of them."""
        found, names = self._topology, self._names
        measured = {names.get(host) for host in self._measured}
        known = []
        for one, other in combinations([host.name for host in self.hosts()], 2):
            ends = {one, other} - {HERE}
            source = "measured" if len(ends) == 1 and ends <= measured else "assumed"
            link = found.link(one, other)
            source = "file" if self._given else source
            known.append(LinkStatus(one, other, link.latency, link.bandwidth, source))
        return known

    # ---- internal

    def _price(self, worker: Member, server: Member) -> float:
        """Seconds of a byte. The server of the worker's own rank costs nothing."""
        if self._ranks and not worker.elsewhere:
            here = [member for member in self._members.workers if not member.elsewhere]
            own = self._members.servers_here[here.index(worker) : here.index(worker) + 1]
            if server in own:
                return 0.0
        return 1 / self._way(worker, server).link.bandwidth

    def _way(self, client: Member, server: Member) -> Way:
        one, other = self._host(client), self._host(server)
        return Way(self._topology.link(one, other), one == other)

    def _host(self, member: Member) -> str:
        """The name of a process's host."""
        if self._given is None:
            return self._names.get(member.host_id, HERE)
        match member.role:
            case Role.WORKER:
                return self._given.host_of_worker(member.number)
            case Role.SERVER:
                return self._given.host_of_server(member.number)
        return self._given.hosts[0].name

    @property
    def _names(self) -> dict[str, str]:
        """Other hosts' ids -> their names: their addresses, with a number if two have the same one."""
        found: dict[str, str] = {}
        for member in self._members.all:
            if member.host_id and member.host_id not in found:
                alike = sum(name.split(" ")[0] == member.host for name in found.values())
                found[member.host_id] = f"{member.host} {alike + 1}" if alike else member.host
        return found

    @property
    def _topology(self) -> Topology:
        if self._given is not None:
            return self._given
        names, measured = self._names, self._measured
        own = {name: measured.get(host, BETWEEN) for host, name in names.items()}
        links = [HostLink(HERE, name, link) for name, link in own.items()]
        links += [HostLink(one, other, _chained(own[one], own[other])) for one, other in combinations(own, 2)]
        return Topology(tuple(map(Host, (HERE, *own))), INSIDE, BETWEEN, tuple(links))


def _chained(one: LinkModel, other: LinkModel) -> LinkModel:
    """One link after the other."""
    return LinkModel(one.latency + other.latency, min(one.bandwidth, other.bandwidth))
