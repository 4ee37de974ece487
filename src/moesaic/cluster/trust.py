"""Which servers get rows: those whose weights are the cluster's, until one gives a wrong answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moesaic.cluster.member import Member, Stage
from moesaic.cluster.members import Members
from moesaic.cluster.publishing import Publisher
from moesaic.cluster.weight_check import WeightCheck
from moesaic.core import messages


class Trust:
    """The trust in the servers of one cluster. Only the supervisor's thread uses it."""

    def __init__(
        self,
        model: Path,
        members: Members,
        publisher: Publisher,
        note: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """model: the checkpoint here. note: records a failure."""
        self._members, self._publisher, self._note = members, publisher, note
        self.weights = WeightCheck(model, members.inbox.put, self._accept_server, self.refuse, clock)

    def refuse(self, member: Member, reason: str) -> None:
        """Sends a server away whose weights or answers are not those of the cluster's checkpoint."""
        self._note(f"{member.name} is refused: {reason}")
        self._members.refuse(member, reason)
        if member.stage is Stage.SERVING:  # it may take seconds to leave, or stay
            member.stage = Stage.DRAINING
            self._publisher.publish()

    def blame(self, server: int, incarnation: int, reason: str) -> None:
        """Ends the process of a server that gave wrong answers. A process of this host is restarted."""
        for member in self._members.servers:
            if (member.number, member.incarnation, member.stage) == (server, incarnation, Stage.SERVING):
                if member.is_external:
                    self.refuse(member, f"it {reason}")
                elif member.child is not None:
                    self._note(f"{member.name} {reason}: killing it")
                    member.child.kill()

    def _accept_server(self, member: Member, message: messages.HoldReply) -> None:
        """Lets a server serve that has loaded its experts, if their weights are right."""
        member.endpoint, member.confirmed_hold = message.endpoint, message.version
        member.kernels, member.threads = message.kernels, message.threads
        member.can_join_job = message.nvshmem
        kernel_names = {server.kernels for server in self._members.servers if server.kernels}
        if len(kernel_names) > 1 and member.stage is Stage.STARTING:
            self._note(
                f"{member.name} has other kernels than the rest ({', '.join(sorted(kernel_names))}), "
                "so bits differ"
            )
        if member.stage is Stage.STARTING:
            member.stage = Stage.SERVING
            self._publisher.publish()
