"""Who serves what: what each server is told to hold, and what each attention worker is told of it.

While the placement changes there are two: the one in service, by which clients route, and the one that is
coming. A server holds what either of them gives it, so that both can be served until nobody uses the old one.
"""

from __future__ import annotations

from collections.abc import Collection

from moesaic.cluster.member import Member, Stage
from moesaic.cluster.members import Members
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.experts import Directory, ServerEntry
from moesaic.core.placement import Placement

Held = dict[int, list[int]]
"""Layer -> experts, ascending."""


def union(server: int, placements: Collection[Placement | None]) -> Held:
    """What `server` holds in at least one of `placements`.

    Example: layer 0 gives it experts 1 and 2 in one and 2 and 5 in the other: {0: [1, 2, 5]}.
    """
    held: dict[int, set[int]] = {}
    for placement in placements:
        for layer, experts in (placement.of(server) if placement is not None else {}).items():
            held.setdefault(layer, set()).update(experts)
    return {layer: sorted(experts) for layer, experts in sorted(held.items())}


class Publisher:
    """Of the members' placement. Used by the supervisor's thread only."""

    def __init__(self, members: Members, secret: bytes) -> None:
        self.placement: Placement | None = None
        """In service."""
        self.coming: Placement | None = None
        """Will be."""
        self.version = 0
        """Of the directory."""
        self._members = members
        self._secret = secret
        self._holds = 0

    def hold(self, member: Member) -> None:
        """Tell a server what to hold now. One that waits to be restarted hears it then."""
        if member.child is None:
            return
        self._holds += 1
        member.told, member.complaint = self._holds, None
        held = union(member.number, (self.placement, self.coming))
        secret = b"" if member.elsewhere else self._secret  # who joined by hand knows it: no need to send it
        _send(member, messages.Hold(member.told, held, secret))

    def serve(self, placement: Placement) -> None:
        """Route by `placement` from now on."""
        self.placement, self.coming = placement, None
        self.publish()

    def publish(self) -> None:
        """Tell every worker who serves what."""
        self.version += 1
        for member in self._members.workers:
            if member.in_service:
                self.introduce(member)

    def introduce(self, member: Member) -> None:
        """Tell one worker who serves what."""
        if self.placement is not None:
            _send(member, messages.Serving(self.directory(self.placement), self._secret))

    def directory(self, placement: Placement) -> Directory:
        """Of the servers that serve now."""
        serving = [member for member in self._members.servers if member.stage is Stage.SERVING]
        return Directory(
            self.version,
            [ServerEntry(member.number, member.incarnation, member.address) for member in serving],
            {member.number: union(member.number, (placement,)) for member in serving},
        )

    def settled(self, version: int) -> bool:
        """Whether no worker has anything under way that was routed by a directory before `version`."""
        return all(member.settled >= version for member in self._members.workers if member.in_service)


def holding(members: Collection[Member]) -> bool:
    """Whether each of these servers has in memory what it was told last."""
    return all(member.stage is Stage.SERVING and member.holds == member.told for member in members)


def _send(member: Member, message: messages.Message) -> None:
    try:
        if member.child is not None:
            member.child.connection.send(message)
    except ConnectionLost:
        pass  # its reader thread tells
