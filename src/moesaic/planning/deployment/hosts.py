"""The hosts of a layout and the links between them."""

from __future__ import annotations

from itertools import combinations

from moesaic.core.paced_devices import LinkModel
from moesaic.core.topology import Host, HostLink, Topology
from moesaic.planning.deployment.layouts import Layout
from moesaic.planning.deployment.spec import ClusterSpec


def topology(layout: Layout, spec: ClusterSpec, part: float = 1.0) -> Topology:
    """The hosts of a layout with its processes.

    All devices of a host share its link to another host. Without a link of their own in [[between]], two
    hosts have that of as many devices as a host has.
    part: factor of each link's time, for a simulation with fewer layers.
    """
    pool, names = layout.pool, layout.pool.names[: layout.hosts]
    wide = LinkModel(spec.between.latency, spec.between.bandwidth * pool.per_host)
    links = tuple(
        HostLink(one.first_host, one.second_host, _times(one.link, part))
        for one in spec.links
        if one.first_host in names and one.second_host in names
    )
    hosts = tuple(
        Host(name, tuple(workers), tuple(servers))
        for name, (workers, servers) in zip(names, _processes(layout), strict=True)
    )
    return Topology(hosts, _times(pool.inside, part), _times(wide, part), links)


def device_link(layout: Layout, spec: ClusterSpec) -> LinkModel:
    """What one device sends to those of other hosts, over the slowest link of the layout's hosts."""
    found = topology(layout, spec)
    names = [host.name for host in found.hosts]
    slowest = min(
        (found.link(one, other) for one, other in combinations(names, 2)),
        key=lambda link: link.bandwidth,
        default=spec.between,
    )
    if slowest == found.inter_host_link:
        return spec.between
    return LinkModel(slowest.latency, slowest.bandwidth / layout.pool.per_host)


def _processes(layout: Layout) -> list[tuple[range, range]]:
    """The workers and the servers of each host, by their numbers."""
    if layout.spread > 1:
        workers, servers = layout.workers_here, layout.servers_here
        return [
            (range(host * workers, (host + 1) * workers), range(host * servers, (host + 1) * servers))
            for host in range(layout.spread)
        ]
    first, each = layout.servers_here, layout.pool.per_host
    further = [
        range(begin, min(begin + each, layout.servers)) for begin in range(first, layout.servers, each)
    ]
    return [(range(layout.workers), range(first)), *((range(0), servers) for servers in further)]


def _times(link: LinkModel, part: float) -> LinkModel:
    return LinkModel(link.latency * part, link.bandwidth / part)
