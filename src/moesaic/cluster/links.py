"""Knows the host of each process, and the links between hosts.

With --topology the file says both. Without it, a process that joins says its host, and the link between its
host and this one is measured (`transport.link_test`). Between two other hosts nothing is measured: their link
counts as one over this host. Clients choose replicas by these links, and requests are dispatched by them.

Question: Which process is on which host?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from moesaic.cluster.member import Member, Role
from moesaic.cluster.members import Members
from moesaic.config import ClusterConfig
from moesaic.core import topology
from moesaic.core.cluster_status import HostStatus, LinkStatus
from moesaic.core.paced_devices import LinkModel
from moesaic.core.topology import FloatArray, Host, HostLink, Topology, Way

LOCAL_HOST = ""
"""Name of the host of `moesaic serve`, where no file names it."""
LOCAL_LINK = topology.ASSUMED_INTRA_HOST_LINK
ASSUMED_LINK = LinkModel(1e-4, 1.25e9)
"""What is assumed of the link to a host that could not be measured: 10 Gbit/s."""


class Links:
    """The hosts and links of one cluster. `record_link` and the queries may be called from any thread."""

    def __init__(self, members: Members, cluster: ClusterConfig) -> None:
        """Raises ConfigError for a wrong file of --topology."""
        self._members = members
        self._ranks = cluster.enable_expert_parallel
        file = cluster.topology
        self._file_topology: Topology | None = None if file is None else topology.read(Path(file))
        self._measured_links: Mapping[str, LinkModel] = {}
        """Host -> its link to this host."""
        self._worth: tuple[object, dict[int, FloatArray]] = (None, {})
        """What the last answers of `worth` depend on, and these answers by worker."""

    def record_link(self, host: str, link: LinkModel) -> None:
        """Keep what was measured. host: as of `Member.host_id`."""
        self._measured_links = {**self._measured_links, host: link}

    def ways(self, client: Member) -> dict[int, Way]:
        """Server -> the way from this worker to it. Empty if all processes are on one host."""
        host_map = self._build_host_map()
        ways = {server.number: host_map.way(client, server) for server in self._members.servers}
        return {} if all(way.on_one_host for way in ways.values()) else ways

    def worth(self, worker: int, servers: Sequence[int]) -> FloatArray:
        """[S] worth, 0 to 1, of a pair that each of the servers computes for this worker.

        See `link_prices.worth_of`: the own rank's server has 1, and the slowest link of all has 0. A worker
        or a server that is gone has no near one.
        """
        workers, all_servers = tuple(self._members.workers), tuple(self._members.servers)
        places = [(member.number, member.host_id, member.is_external) for member in (*workers, *all_servers)]
        depends = (len(workers), places, tuple(servers), self._measured_links)
        if self._worth[0] != depends:
            self._worth = (depends, self._worths(workers, all_servers, servers))
        return self._worth[1].get(worker, np.zeros(len(servers)))

    def prices(self, workers: Sequence[Member], servers: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        """[W][S] seconds of a byte from each worker to each server. Empty if all are on one host."""
        servers_by_number, host_map = (
            {member.number: member for member in self._members.servers},
            self._build_host_map(),
        )
        if not any(self.ways(worker) for worker in workers):
            return ()
        return tuple(
            tuple(self._price(host_map, worker, servers_by_number[number]) for number in servers)
            for worker in workers
        )

    def server_hosts(self) -> dict[int, str]:
        """Server -> a word for its host: the name in the file, or `Member.host_id`."""
        topology_file, servers = self._file_topology, self._members.servers
        if topology_file is not None:
            return {server.number: topology_file.host_of_server(server.number) for server in servers}
        return {server.number: server.host_id for server in servers}

    # ---- the status

    def hosts(self) -> list[HostStatus]:
        """The hosts that have processes, or that the file names, and the names of their processes."""
        host_map = self._build_host_map()
        names = [host.name for host in self._file_topology.hosts] if self._file_topology else [LOCAL_HOST]
        processes_by_host: dict[str, list[str]] = {name: [] for name in names}
        for member in self._members.all_members:
            processes_by_host.setdefault(host_map.host(member), []).append(member.name)
        return [HostStatus(name, processes) for name, processes in processes_by_host.items()]

    def links(self) -> list[LinkStatus]:
        """The links between any two of these hosts, and what is known of them."""
        host_map = self._build_host_map()
        measured_hosts = {host_map.names.get(host) for host in self._measured_links}
        statuses = []
        for first, second in combinations([host.name for host in self.hosts()], 2):
            ends = {first, second} - {LOCAL_HOST}
            source = "measured" if len(ends) == 1 and ends <= measured_hosts else "assumed"
            link = host_map.topology.link(first, second)
            source = "file" if self._file_topology else source
            statuses.append(LinkStatus(first, second, link.latency, link.bandwidth, source))
        return statuses

    # ---- internal

    def _worths(
        self, workers: Sequence[Member], all_servers: Sequence[Member], servers: Sequence[int]
    ) -> dict[int, FloatArray]:
        """Worker -> [S] the answer of `worth`. all_servers: all servers there are."""
        host_map, servers_by_number = (
            self._build_host_map(),
            {member.number: member for member in all_servers},
        )
        prices = np.full((len(workers), len(servers)), np.nan)
        for row, worker in enumerate(workers):
            for column, number in enumerate(servers):
                if number in servers_by_number:
                    prices[row, column] = self._price(host_map, worker, servers_by_number[number])
        # The smallest price avoids a division by 0 when all links are free. NaN is a server that is gone.
        highest = max(1e-300, float(np.nanmax(prices, initial=0.0)))
        worth = np.nan_to_num(1.0 - prices / highest, nan=0.0)
        return {worker.number: row for worker, row in zip(workers, worth, strict=True)}

    def _price(self, host_map: _HostMap, worker: Member, server: Member) -> float:
        """Seconds of a byte. The server of the worker's own rank costs nothing."""
        if self._ranks and not worker.is_external:
            local_workers = [member for member in self._members.workers if not member.is_external]
            place = local_workers.index(worker) if worker in local_workers else len(local_workers)
            if server in self._members.servers_of_launcher[place : place + 1]:
                return 0.0
        return 1 / host_map.way(worker, server).link.bandwidth

    def _build_host_map(self) -> _HostMap:
        """The hosts of all processes now."""
        names: dict[str, str] = {}
        for member in self._members.all_members:
            if member.host_id and member.host_id not in names:
                alike = sum(name.split(" ")[0] == member.host for name in names.values())
                names[member.host_id] = f"{member.host} {alike + 1}" if alike else member.host
        if self._file_topology is not None:
            return _HostMap(self._file_topology, names, is_from_file=True)
        links_by_host = {name: self._measured_links.get(host, ASSUMED_LINK) for host, name in names.items()}
        links = [HostLink(LOCAL_HOST, name, link) for name, link in links_by_host.items()]
        links += [
            HostLink(first, second, _chain_links(links_by_host[first], links_by_host[second]))
            for first, second in combinations(links_by_host, 2)
        ]
        measured_topology = Topology(
            tuple(map(Host, (LOCAL_HOST, *links_by_host))), LOCAL_LINK, ASSUMED_LINK, tuple(links)
        )
        return _HostMap(measured_topology, names, is_from_file=False)


@dataclass(frozen=True)
class _HostMap:
    """Where the processes are at one moment."""

    topology: Topology
    names: Mapping[str, str]
    """Other hosts' ids -> their names: their addresses, with a number if two have the same one."""
    is_from_file: bool
    """Whether the topology says where processes are, as --topology does."""

    def host(self, member: Member) -> str:
        """The name of a process's host."""
        if not self.is_from_file:
            return self.names.get(member.host_id, LOCAL_HOST)
        match member.role:
            case Role.WORKER:
                return self.topology.host_of_worker(member.number)
            case Role.SERVER:
                return self.topology.host_of_server(member.number)
        return self.topology.hosts[0].name

    def way(self, client: Member, server: Member) -> Way:
        """The way from a worker to a server."""
        client_host, server_host = self.host(client), self.host(server)
        return Way(
            self.topology.link(client_host, server_host),
            client_host == server_host,
            server_host,
            self.topology.intra_host_link,
        )


def _chain_links(first: LinkModel, second: LinkModel) -> LinkModel:
    """The link of messages that go over one link and then the other."""
    return LinkModel(first.latency + second.latency, min(first.bandwidth, second.bandwidth))
