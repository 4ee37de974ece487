"""The hosts of a layout and the links between them."""

from __future__ import annotations

from itertools import combinations

from moesaic.core.paced_devices import LinkModel
from moesaic.core.topology import Host, HostLink, Topology
from moesaic.planning.deployment.layouts import Layout
from moesaic.planning.deployment.spec import ClusterSpec


def build_topology(layout: Layout, spec: ClusterSpec, part: float = 1.0) -> Topology:
    """The hosts of a layout with its processes.

    All devices of a host share its link to another host. Without a link of their own in [[between]], two
    hosts have that of as many devices as a host has.
    part: factor of each link's time, for a simulation with fewer layers.
    """
    pool, names = layout.pool, layout.pool.names[: layout.hosts]
    default_link = LinkModel(
        spec.inter_host_link.latency, spec.inter_host_link.bandwidth * pool.devices_per_host
    )
    links = tuple(
        HostLink(link.first_host, link.second_host, _scale_link(link.link, part))
        for link in spec.links
        if link.first_host in names and link.second_host in names
    )
    hosts = tuple(
        Host(name, tuple(workers), tuple(servers))
        for name, (workers, servers) in zip(names, _processes(layout), strict=True)
    )
    return Topology(hosts, _scale_link(pool.intra_host_link, part), _scale_link(default_link, part), links)


def find_device_link(layout: Layout, spec: ClusterSpec) -> LinkModel:
    """What one device sends to those of other hosts, over the slowest link of the layout's hosts."""
    hosts_topology = build_topology(layout, spec)
    names = [host.name for host in hosts_topology.hosts]
    slowest = min(
        (hosts_topology.link(sender, receiver) for sender, receiver in combinations(names, 2)),
        key=lambda link: link.bandwidth,
        default=spec.inter_host_link,
    )
    if slowest == hosts_topology.inter_host_link:
        return spec.inter_host_link
    return LinkModel(slowest.latency, slowest.bandwidth / layout.pool.devices_per_host)


def _processes(layout: Layout) -> list[tuple[range, range]]:
    """The workers and the servers of each host, by their numbers."""
    if layout.attention_hosts > 1:
        workers, servers = layout.first_host_workers, layout.first_host_servers
        return [
            (range(host * workers, (host + 1) * workers), range(host * servers, (host + 1) * servers))
            for host in range(layout.attention_hosts)
        ]
    first, per_host = layout.first_host_servers, layout.pool.devices_per_host
    later_servers = [
        range(begin, min(begin + per_host, layout.servers))
        for begin in range(first, layout.servers, per_host)
    ]
    return [(range(layout.workers), range(first)), *((range(0), servers) for servers in later_servers)]


def _scale_link(link: LinkModel, part: float) -> LinkModel:
    return LinkModel(link.latency * part, link.bandwidth / part)
