"""Which processes that joined compute as ranks of which worker, in groups over several hosts.

A worker is started once there are processes for its other hosts, one for each. They end together: when one of
them is gone, the others are ended. Those that joined then join again, and wait for a group.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace

from moesaic.cluster.member import Member, Stage
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost

LOG = logging.getLogger(__name__)


class RankHosts:
    """The members with the role of ranks, and the groups that they are in. Only the supervisor's thread uses
    it."""

    def __init__(self, nodes: int) -> None:
        """nodes: hosts of each group, that of its first rank among them."""
        self.members: list[Member] = []
        self._nodes = nodes

    @property
    def has_remote_ranks(self) -> bool:
        """Whether groups need processes of other hosts."""
        return self._nodes > 1

    def take(self, worker: Member) -> bool:
        """Gives a worker that is to be started the processes of other hosts that it needs.

        Returns False, and says in the log what is missing, if there are too few. Then it has none.
        """
        free = [member for member in self.members if member.leader is None and member.is_fit]
        missing = self._nodes - 1 - len(free)
        waiting = ""
        if missing > 0:
            waiting = f"waits for `moesaic join --role ranks` of {missing} more host{'s' * (missing > 1)}"
            if not worker.waiting:
                LOG.warning("%s: %s", worker.name, waiting)
            worker.stage = Stage.WAITING
        else:
            for member in free[: self._nodes - 1]:
                member.leader = worker
        worker.waiting = waiting
        return not waiting

    def list_group(self, worker: Member) -> list[Member]:
        """The members that compute as ranks of this worker, in the order of their hosts in the group."""
        return [member for member in self.members if member.leader is worker]

    def meet(self, worker: Member, meeting: messages.RanksMeet) -> None:
        """Tells the other hosts of a worker's group where its ranks meet."""
        for node, member in enumerate(self.list_group(worker), start=1):
            if member.child is not None:
                with contextlib.suppress(ConnectionLost):  # its reader thread reports it
                    member.child.connection.send(replace(meeting, node=node))

    def serve(self, worker: Member) -> None:
        """The group of this worker serves."""
        for member in self.list_group(worker):
            member.stage = Stage.SERVING

    def remove_group(self, member: Member) -> None:
        """A process is gone. If it belonged to a group, the others of the group are ended."""
        leader = member.leader or member
        group = [member, leader, *self.list_group(leader)]
        self.members = [
            kept_member
            for kept_member in self.members
            if all(kept_member is not group_member for group_member in group)
        ]
        for group_member in group:
            group_member.leader = None
            if group_member is not member and group_member.child is not None:
                group_member.child.kill()
