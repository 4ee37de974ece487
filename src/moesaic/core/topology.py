"""Hosts, which processes run on them, and the links between them (`--topology FILE`).

The file is TOML, or JSON with the same tables if its name ends in .json:

    [links]                       # between two hosts, and between processes of one host
    latency_us = 100.0            # one way
    gb_per_s = 1.25               # 10^9 bytes/s of one direction
    inside_latency_us = 5.0
    inside_gb_per_s = 20.0

    [[hosts]]
    name = "a"
    ranks = [0, 1]                # worker 0 and server 0, worker 1 and server 1

    [[hosts]]
    name = "b"
    workers = []                  # or workers and servers by themselves
    servers = [2, 3]

    [[between]]                   # two hosts with a link of their own
    hosts = ["a", "b"]
    latency_us = 10.0
    gb_per_s = 12.5

A socket of a machine may be named as a host, with a fast link to the machine's other socket.

Question: Which process is on which host?
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.core.curves import TableChecker, read_tables
from moesaic.core.errors import ConfigError
from moesaic.core.paced_devices import LinkModel

FLAG = "--topology"
ASSUMED_INTRA_HOST_LINK = LinkModel(0.0, 8 * 2**30)
"""What is assumed of the link between two processes of a host."""
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Host:
    """A host and its processes. Sockets of one machine can be hosts, too."""

    name: str
    workers: tuple[int, ...] = ()
    """Numbers of its attention workers."""
    servers: tuple[int, ...] = ()
    """Numbers of its expert servers."""


@dataclass(frozen=True)
class HostLink:
    """The link between two hosts. Both directions are alike."""

    first_host: str
    second_host: str
    link: LinkModel


@dataclass(frozen=True)
class Way:
    """The link from an attention worker to an expert server, and whether it stays on one host."""

    link: LinkModel
    on_one_host: bool
    """Whether both are on one host."""
    host: str = ""
    """Name of the server's host."""
    intra_host_link: LinkModel = ASSUMED_INTRA_HOST_LINK
    """The link between two servers of that host."""


@dataclass(frozen=True)
class Topology:
    """The hosts of a cluster and their links."""

    hosts: tuple[Host, ...]
    """The first one is the host of `moesaic serve`. A process that no host names is there."""
    intra_host_link: LinkModel
    """The link between two processes of one host."""
    inter_host_link: LinkModel
    """The link between two hosts that are not in `links`."""
    links: tuple[HostLink, ...] = ()
    _links: dict[frozenset[str], LinkModel] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        link_by_hosts = {frozenset((one.first_host, one.second_host)): one.link for one in self.links}
        object.__setattr__(self, "_links", link_by_hosts)

    def host_of_worker(self, worker: int) -> str:
        """The name of the host of an attention worker."""
        return next((host.name for host in self.hosts if worker in host.workers), self.hosts[0].name)

    def host_of_server(self, server: int) -> str:
        """The name of the host of an expert server."""
        return next((host.name for host in self.hosts if server in host.servers), self.hosts[0].name)

    def link(self, host: str, peer_host: str) -> LinkModel:
        """The link between two hosts, or inside of one if both names are the same."""
        return (
            self.intra_host_link
            if host == peer_host
            else self._links.get(frozenset((host, peer_host)), self.inter_host_link)
        )

    def way(self, worker: int, server: int) -> Way:
        """The way from a worker to a server."""
        worker_host, server_host = self.host_of_worker(worker), self.host_of_server(server)
        return Way(
            self.link(worker_host, server_host), worker_host == server_host, server_host, self.intra_host_link
        )

    def server_hosts(self, servers: int) -> dict[int, str]:
        """The host of each of these expert servers."""
        return {server: self.host_of_server(server) for server in range(servers)}

    @property
    def workers(self) -> tuple[int, ...]:
        """The attention workers that hosts name, ascending."""
        return tuple(sorted(number for host in self.hosts for number in host.workers))

    def has_ranks(self, ranks: int) -> bool:
        """Whether workers are ranks: there are `ranks` of them, and worker i is on the host of server i."""
        alike = all(self.host_of_worker(rank) == self.host_of_server(rank) for rank in range(ranks))
        return alike and self.workers == tuple(range(ranks))

    def prices(self, ranks: int) -> FloatArray:
        """[W, R] seconds that a byte takes from each worker to the server of each rank.

        The latency is left out, since it does not grow with the rows. Where workers are ranks (`beside`),
        their own servers cost nothing.

        Example: ranks 0 and 1 on a host with 20 GB/s, rank 2 on another one with 1.25 GB/s between them ->
        [[0, 0.05, 0.8], [0.05, 0, 0.8], [0.8, 0.8, 0]] in units of 1e-9.
        """
        seconds = np.array([[1 / self.way(w, s).link.bandwidth for s in range(ranks)] for w in self.workers])
        if self.has_ranks(ranks):
            np.fill_diagonal(seconds, 0.0)
        return seconds

    @property
    def host_prices(self) -> FloatArray:
        """[H, H] seconds that a byte takes between two hosts, or between two processes of one."""
        names = [host.name for host in self.hosts]
        return np.array([[1 / self.link(a, b).bandwidth for b in names] for a in names])

    def worker_places(self) -> npt.NDArray[np.int64]:
        """[W] the index of each worker's host."""
        names = [host.name for host in self.hosts]
        return np.array([names.index(self.host_of_worker(one)) for one in self.workers], dtype=np.int64)

    def server_places(self, ranks: int) -> npt.NDArray[np.int64]:
        """[R] the index of the host of each rank's server."""
        names = [host.name for host in self.hosts]
        return np.array([names.index(self.host_of_server(rank)) for rank in range(ranks)], dtype=np.int64)

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError unless hosts name each of these ranks' servers, and a worker or more."""
        servers = sorted(number for host in self.hosts for number in host.servers)
        if servers != list(range(ranks)):
            allowed = f"each of 0 to {ranks - 1} on one host, as --ranks {ranks} has"
            raise ConfigError.field(f"{FLAG}: servers (or ranks)", servers, allowed)
        if not self.workers:
            raise ConfigError.field(
                f"{FLAG}: workers (or ranks)", [], "1 or more, on the hosts that they have"
            )


# ---- the file


def read(path: Path) -> Topology:
    """Read a file. Raises ConfigError with one line that names the file, the key and what is allowed."""
    if path.suffix != ".json":
        return parse_tables(read_tables(FLAG, path), str(path))
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError.field(FLAG, str(path), f"a file to read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG}: {path} is not a JSON file: {error}") from error
    if not isinstance(tables, dict):
        raise ConfigError(
            f"{FLAG}: {path}: got {type(tables).__name__}; allowed: an object with hosts, links"
        )
    return parse_tables(tables, str(path))


def parse_tables(tables: Mapping[str, Any], name: str) -> Topology:
    """The topology of parsed tables. Raises ConfigError that names the key. name: of the tables."""
    checks = TableChecker(FLAG, name)
    checks.check_keys(tables, "", "links", "hosts", "between")
    keys = ("latency_us", "gb_per_s", "inside_latency_us", "inside_gb_per_s")
    links = checks.table(tables, "links", *keys)
    hosts = tuple(_host(checks, one, f"hosts.{i}") for i, one in enumerate(_list(checks, tables, "hosts")))
    if not hosts:
        raise checks.wrong("hosts", [], "at least one table [[hosts]]")
    _check_hosts(checks, hosts)
    between = _list(checks, {"between": [], **tables}, "between")
    return Topology(
        hosts,
        _link(checks, links, "links", "inside_"),
        _link(checks, links, "links"),
        pairs(checks, between, {host.name for host in hosts}),
    )


def _link(checks: TableChecker, table: Mapping[str, Any], place: str, prefix: str = "") -> LinkModel:
    latency = checks.number(table, f"{place}.{prefix}latency_us")
    return LinkModel(1e-6 * latency, 1e9 * checks.number(table, f"{place}.{prefix}gb_per_s", positive=True))


def _list(checks: TableChecker, tables: Mapping[str, Any], key: str) -> list[Any]:
    value = tables.get(key)
    if not isinstance(value, list):
        raise checks.wrong(key, value, f"tables [[{key}]]")
    return value


def _host(checks: TableChecker, table: Any, place: str) -> Host:
    checks.table({place: table}, place, "name", "ranks", "workers", "servers")
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise checks.wrong(f"{place}.name", name, "the name of the host")
    numbers = {}
    for key in ("ranks", "workers", "servers"):
        ids = table.get(key, [])
        is_valid = isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)
        if not is_valid:
            raise checks.wrong(f"{place}.{key}", ids, "a list of numbers from 0 on")
        numbers[key] = ids
    ranks = numbers["ranks"]
    return Host(name, tuple(ranks + numbers["workers"]), tuple(ranks + numbers["servers"]))


def _check_hosts(checks: TableChecker, hosts: tuple[Host, ...]) -> None:
    """Raise ConfigError for a name or a process that is given twice."""
    for field_name, values in (
        ("name", [host.name for host in hosts]),
        ("workers (or ranks)", [number for host in hosts for number in host.workers]),
        ("servers (or ranks)", [number for host in hosts for number in host.servers]),
    ):
        for one, other in pairwise(sorted(values)):
            if one == other:
                raise checks.wrong(f"hosts: {field_name}", one, "each once")


def pairs(checks: TableChecker, tables: list[Any], names: set[str]) -> tuple[HostLink, ...]:
    """The tables [[between]]: links of two of these hosts. Raises ConfigError that names the key."""
    link_by_hosts: dict[frozenset[str], HostLink] = {}
    for index, table in enumerate(tables):
        place = f"between.{index}"
        checks.table({place: table}, place, "hosts", "latency_us", "gb_per_s")
        names_of_pair = table.get("hosts")
        is_valid = (
            isinstance(names_of_pair, list)
            and len(names_of_pair) == 2
            and all(one in names for one in names_of_pair)
        )
        if not is_valid or names_of_pair[0] == names_of_pair[1]:
            allowed = f"two of the hosts {', '.join(sorted(names))}"
            raise checks.wrong(f"{place}.hosts", names_of_pair, allowed)
        if frozenset(names_of_pair) in link_by_hosts:
            raise checks.wrong(f"{place}.hosts", names_of_pair, "each pair of hosts once")
        link_by_hosts[frozenset(names_of_pair)] = HostLink(
            names_of_pair[0], names_of_pair[1], _link(checks, table, place)
        )
    return tuple(link_by_hosts.values())
