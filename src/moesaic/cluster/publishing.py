"""Tells each server which experts to hold, and each attention worker which server holds which experts.
Servers of a host that shares the cluster with other hosts are also told of each other.

While the placement changes there are two placements: the current one, by which clients route, and the next
one. A server holds the experts of both, so both can be served until no call uses the old one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from moesaic.cluster.links import Links
from moesaic.cluster.member import Member, Stage
from moesaic.cluster.members import Members
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.experts import Directory, ServerEntry
from moesaic.core.placement import Placement

ExpertsByLayer = dict[int, list[int]]
"""Layer -> experts, ascending."""


def union(server: int, placements: Collection[Placement | None]) -> ExpertsByLayer:
    """Returns the experts of `server` in at least one of `placements`.

    Example: layer 0 gives it experts 1 and 2 in one placement, 2 and 5 in the other -> {0: [1, 2, 5]}.
    """
    experts_by_layer: dict[int, set[int]] = {}
    for placement in placements:
        for layer, experts in (placement.server_experts(server) if placement is not None else {}).items():
            experts_by_layer.setdefault(layer, set()).update(experts)
    return {layer: sorted(experts) for layer, experts in sorted(experts_by_layer.items())}


class Publisher:
    """Publishes the placement of the members. Only the supervisor's thread uses it."""

    def __init__(self, members: Members, secret: bytes, links: Links | None = None) -> None:
        """links: None if all processes are on one host."""
        self.placement: Placement | None = None
        """The current placement."""
        self.next_placement: Placement | None = None
        """The next placement, while it is being loaded."""
        self.version = 0
        """Version of the directory."""
        self._members = members
        self._links = links
        self._sent_neighbours: dict[tuple[int, int], list[ServerEntry]] = {}
        """Number and incarnation of each server -> the neighbours that it was told of."""
        self._secret = secret
        self._last_hold = 0

    def hold(self, member: Member) -> None:
        """Tells a server which experts to hold now. A server that is being restarted gets the message after
        its start. Without a placement nothing is said: see `placing.FirstPlacement`."""
        if member.child is None or (self.placement is None and self.next_placement is None):
            return
        self._last_hold += 1
        member.last_hold, member.complaint = self._last_hold, None
        experts_by_layer = union(member.number, (self.placement, self.next_placement))
        secret = (
            b"" if member.has_tcp_connection else self._secret
        )  # a server that joined knows the secret already
        _send(member, messages.Hold(member.last_hold, experts_by_layer, secret))

    def serve(self, placement: Placement) -> None:
        """Routes by `placement` from now on."""
        self.placement, self.next_placement = placement, None
        self.publish()

    def publish(self) -> None:
        """Sends the directory to every worker."""
        self.version += 1
        if self._links is not None and self.placement is not None:
            self._send_neighbours(self.directory(self.placement).servers, self._links)
        for member in self._members.clients:
            if member.in_service:
                self.send_directory(member)

    def send_directory(self, member: Member) -> None:
        """Sends the directory to one worker."""
        if self.placement is not None:
            ways = {} if self._links is None else self._links.ways(member)
            directory = replace(self.directory(self.placement), ways=ways)
            _send(member, messages.Serving(directory, self._secret))

    def _send_neighbours(self, entries: list[ServerEntry], links: Links) -> None:
        """Tells the servers of each host of each other, if there are several hosts and if it is news."""
        hosts, has_several_hosts, former_neighbours = (
            links.server_hosts(),
            len(links.hosts()) > 1,
            self._sent_neighbours,
        )
        self._sent_neighbours = {}  # filled anew, so that servers which have left are forgotten
        for member in self._members.servers:
            key, own_host = (member.number, member.incarnation), hosts.get(member.number)
            if member.stage is not Stage.SERVING or not has_several_hosts:
                continue
            neighbours = [
                entry
                for entry in entries
                if hosts[entry.server] == own_host and entry.server != member.number
            ]
            self._sent_neighbours[key] = neighbours
            if former_neighbours.get(key, []) != neighbours:
                _send(member, messages.Neighbours(neighbours))

    def directory(self, placement: Placement) -> Directory:
        """Returns the directory of the servers that serve now."""
        serving = [member for member in self._members.servers if member.stage is Stage.SERVING]
        return Directory(
            self.version,
            [ServerEntry(member.number, member.incarnation, member.endpoint) for member in serving],
            {member.number: union(member.number, (placement,)) for member in serving},
            [member.number for member in serving if member.is_suspected],
        )

    def is_settled(self, version: int) -> bool:
        """Whether no worker has a call under way that was routed by a directory before `version`."""
        return all(member.settled_version >= version for member in self._members.clients if member.in_service)


def have_experts(members: Collection[Member]) -> bool:
    """Whether each of these servers has loaded the experts of its last Hold."""
    return all(
        member.stage is Stage.SERVING and member.confirmed_hold == member.last_hold for member in members
    )


def _send(member: Member, message: messages.Message) -> None:
    try:
        if member.child is not None:
            member.child.connection.send(message)
    except ConnectionLost:
        pass  # its reader thread reports it
