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

HERE = ""
"""Name of the host of `moesaic serve`, where no file names it."""
INSIDE = topology.ASSUMED_INTRA_HOST_LINK
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
        self._worth: tuple[object, dict[int, FloatArray]] = (None, {})
        """What the last answers of `worth` depend on, and these answers by worker."""

    def measured(self, host: str, link: LinkModel) -> None:
        """Keep what was measured. host: as of `Member.host_id`."""
        self._measured = {**self._measured, host: link}

    def ways(self, client: Member) -> dict[int, Way]:
        """Server -> the way from this worker to it. Empty if all processes are on one host."""
        there = self._map()
        found = {server.number: there.way(client, server) for server in self._members.servers}
        return {} if all(way.on_one_host for way in found.values()) else found

    def worth(self, worker: int, servers: Sequence[int]) -> FloatArray:
        """[S] worth, 0 to 1, of a pair that each of the servers computes for this worker.

        See `link_prices.worth_of`: the own rank's server has 1, and the slowest link of all has 0. A worker
        or a server that is gone has no near one.
        """
        workers, others = tuple(self._members.workers), tuple(self._members.servers)
        places = [(one.number, one.host_id, one.elsewhere) for one in (*workers, *others)]
        depends = (len(workers), places, tuple(servers), self._measured)
        if self._worth[0] != depends:
            self._worth = (depends, self._worths(workers, others, servers))
        return self._worth[1].get(worker, np.zeros(len(servers)))

    def prices(self, workers: Sequence[Member], servers: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        """[W][S] seconds of a byte from each worker to each server. Empty if all are on one host."""
        known, there = {member.number: member for member in self._members.servers}, self._map()
        if not any(self.ways(worker) for worker in workers):
            return ()
        return tuple(
            tuple(self._price(there, worker, known[number]) for number in servers) for worker in workers
        )

    def server_hosts(self) -> dict[int, str]:
        """Server -> a word for its host: the name in the file, or `Member.host_id`."""
        given, servers = self._given, self._members.servers
        if given is not None:
            return {server.number: given.host_of_server(server.number) for server in servers}
        return {server.number: server.host_id for server in servers}

    # ---- the status

    def hosts(self) -> list[HostStatus]:
        """The hosts that have processes, or that the file names, and the names of their processes."""
        there = self._map()
        names = [host.name for host in self._given.hosts] if self._given else [HERE]
        found: dict[str, list[str]] = {name: [] for name in names}
        for member in self._members.all:
            found.setdefault(there.host(member), []).append(member.name)
        return [HostStatus(name, processes) for name, processes in found.items()]

    def links(self) -> list[LinkStatus]:
        """The links between any two of these hosts, and what is known of them."""
        there = self._map()
        measured = {there.names.get(host) for host in self._measured}
        known = []
        for one, other in combinations([host.name for host in self.hosts()], 2):
            ends = {one, other} - {HERE}
            source = "measured" if len(ends) == 1 and ends <= measured else "assumed"
            link = there.topology.link(one, other)
            source = "file" if self._given else source
            known.append(LinkStatus(one, other, link.latency, link.bandwidth, source))
        return known

    # ---- internal

    def _worths(
        self, workers: Sequence[Member], others: Sequence[Member], servers: Sequence[int]
    ) -> dict[int, FloatArray]:
        """Worker -> [S] the answer of `worth`. others: all servers there are."""
        there, known = self._map(), {member.number: member for member in others}
        prices = np.full((len(workers), len(servers)), np.nan)
        for row, worker in enumerate(workers):
            for column, number in enumerate(servers):
                if number in known:
                    prices[row, column] = self._price(there, worker, known[number])
        highest = max(1e-300, float(np.nanmax(prices, initial=0.0)))
        worth = np.nan_to_num(1.0 - prices / highest, nan=0.0)
        return {worker.number: row for worker, row in zip(workers, worth, strict=True)}

    def _price(self, there: _Map, worker: Member, server: Member) -> float:
        """Seconds of a byte. The server of the worker's own rank costs nothing."""
        if self._ranks and not worker.elsewhere:
            here = [member for member in self._members.workers if not member.elsewhere]
            place = here.index(worker) if worker in here else len(here)
            if server in self._members.servers_here[place : place + 1]:
                return 0.0
        return 1 / there.way(worker, server).link.bandwidth

    def _map(self) -> _Map:
        """The hosts of all processes now."""
        names: dict[str, str] = {}
        for member in self._members.all:
            if member.host_id and member.host_id not in names:
                alike = sum(name.split(" ")[0] == member.host for name in names.values())
                names[member.host_id] = f"{member.host} {alike + 1}" if alike else member.host
        if self._given is not None:
            return _Map(self._given, names, stated=True)
        own = {name: self._measured.get(host, BETWEEN) for host, name in names.items()}
        links = [HostLink(HERE, name, link) for name, link in own.items()]
        links += [HostLink(one, other, _chained(own[one], own[other])) for one, other in combinations(own, 2)]
        found = Topology(tuple(map(Host, (HERE, *own))), INSIDE, BETWEEN, tuple(links))
        return _Map(found, names, stated=False)


@dataclass(frozen=True)
class _Map:
    """Where the processes are at one moment."""

    topology: Topology
    names: Mapping[str, str]
    """Other hosts' ids -> their names: their addresses, with a number if two have the same one."""
    stated: bool
    """Whether the topology says where processes are, as --topology does."""

    def host(self, member: Member) -> str:
        """The name of a process's host."""
        if not self.stated:
            return self.names.get(member.host_id, HERE)
        match member.role:
            case Role.WORKER:
                return self.topology.host_of_worker(member.number)
            case Role.SERVER:
                return self.topology.host_of_server(member.number)
        return self.topology.hosts[0].name

    def way(self, client: Member, server: Member) -> Way:
        """The way from a worker to a server."""
        one, other = self.host(client), self.host(server)
        return Way(self.topology.link(one, other), one == other, other, self.topology.intra_host_link)


def _chained(one: LinkModel, other: LinkModel) -> LinkModel:
    """The link of messages that go over one link and then the other."""
    return LinkModel(one.latency + other.latency, min(one.bandwidth, other.bandwidth))
