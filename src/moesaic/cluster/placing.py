"""The placement that a cluster starts with: from a file, by the servers' capacities, or by what they hold."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from moesaic.cluster.launched_process import LaunchedProcess
from moesaic.cluster.links import Links
from moesaic.cluster.members import Members
from moesaic.cluster.publishing import Publisher
from moesaic.config import ClusterConfig
from moesaic.core.experts import ExpertLayout
from moesaic.core.placement import Placement
from moesaic.policy.placement import around_homes, balance, returning

LOG = logging.getLogger(__name__)


def read_placement(cluster: ClusterConfig) -> Placement | None:
    """Reads the placement of the expert servers in the file of --placement; None if there is none.

    Raises ConfigError for a file that cannot be read or that names other servers.
    """
    if cluster.placement is None or cluster.expert_servers == 0:
        return None
    return Placement.read(cluster.placement, cluster.expert_servers)


def first_placement(
    layout: ExpertLayout,
    cluster: ClusterConfig,
    capacities: Mapping[int, float],
    placement: Placement | None,
    hosts: Mapping[int, str] | None = None,
) -> Placement:
    """Returns the placement that `cluster`'s servers, numbered from 0, start with.

    capacities: server -> weight. placement: see `read_placement`; the copies that `cluster` asks for are
    added to it. hosts: server -> its host; None: all are on one. Raises ConfigError if it was made for
    another model.
    """
    name = layout.fingerprint
    if placement is not None:
        placement = placement.with_layer(layout.prediction)
        placement.check(name, layout.layers, layout.num_experts)
    load = np.ones((len(layout.layers), layout.num_experts))
    redundant, least = cluster.redundant_experts, cluster.min_replicas
    if placement is not None:
        return around_homes.place(placement, load, layout.layers, capacities, redundant, least, hosts=hosts)
    return balance.place(load, layout.layers, capacities, redundant, least, model=name, hosts=hosts)


class FirstPlacement:
    """Sets the placement that a cluster starts with. Only the supervisor's thread uses it.

    A standby takes over servers that have experts in memory. So it places once each place has its server, and
    each server keeps what it has, as far as the rules of placement allow.
    """

    def __init__(
        self,
        members: Members,
        publisher: Publisher,
        links: Links,
        cluster: ClusterConfig,
        file: Placement | None,
    ) -> None:
        """file: see `read_placement`."""
        self._members, self._publisher, self._links = members, publisher, links
        self._cluster, self._file = cluster, file
        self._layout: ExpertLayout | None = None

    def set_layout(self, layout: ExpertLayout) -> None:
        """Sets the placement for these experts. That of a standby follows in `look`.

        Raises what `first_placement` raises.
        """
        if self._cluster.standby_for is None:
            servers = self._members.capacities, self._file, self._links.server_hosts()
            self._publisher.placement = first_placement(layout, self._cluster, *servers)
        self._layout = layout

    def look(self) -> None:
        """Sets the placement of a standby once it has all of its servers, and tells them."""
        members, layout = self._members.servers, self._layout
        if layout is None or self._publisher.placement is not None:
            return
        children = [one.child for one in members if isinstance(one.child, LaunchedProcess)]
        peers = {child.member.number: child.peer for child in children if child.peer is not None}
        if len(peers) < len(members):
            return
        # Without --expert-capacities each server says its own weight.
        for member in members if not self._cluster.capacities else ():
            member.capacity = peers[member.number].capacity
        resident_experts = {server: process.resident_experts for server, process in peers.items()}
        rules = self._cluster.redundant_experts, self._cluster.min_replicas
        model, hosts = layout.fingerprint, self._links.server_hosts()
        placement = returning.place(
            resident_experts,
            layout.layers,
            layout.num_experts,
            self._members.capacities,
            *rules,
            model,
            hosts,
        )
        copies = sum(int(placement.replicas(layer).sum()) for layer in placement.layers)
        num_resident = copies - returning.missing(placement, resident_experts)
        LOG.info("the servers have %d of %d copies of experts in memory", num_resident, copies)
        self._publisher.placement = placement
        for member in members:
            self._publisher.hold(member)
