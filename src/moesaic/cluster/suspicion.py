"""Watches processes for signs of life, and leaves out the time in which the supervisor itself stood still.

`policy.fleet.silence` says what the silence of another host means. The thread that reads a connection
measures its silence, so a supervisor that was busy or stopped suspects nobody wrongly: it first counts what
arrived meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.launched_process import LaunchedProcess
from moesaic.cluster.member import Member, Role
from moesaic.cluster.publishing import Publisher
from moesaic.cluster.router import Router
from moesaic.policy.fleet.silence import RULE, Verdict

LOG = logging.getLogger(__name__)


class Suspicion:
    """Suspects silent members, trusts them again, and gives them up. Only the supervisor's thread uses it."""

    def __init__(self, publisher: Publisher, router: Router) -> None:
        self._publisher, self._router = publisher, router

    def look(self, member: Member, now: float) -> str | None:
        """Acts on the silence of a member of another host. Returns why to give it up; None to keep it.

        now: time on the clock of `member.last_seen`.
        """
        child = member.child.peer if isinstance(member.child, LaunchedProcess) else member.child
        if not isinstance(child, RemoteProcess) or child.is_killed:
            return None
        silence = child.connection.silence
        member.last_seen = max(member.last_seen, now - silence)
        verdict = RULE.judge(silence, member.in_service)
        if verdict is Verdict.DEAD:
            return f"{member.name} sent nothing for {silence:.1f} s: giving it up"
        if member.is_suspected != (verdict is Verdict.SUSPECT):
            self._set(member, verdict is Verdict.SUSPECT)
        return None

    def _set(self, member: Member, is_suspected: bool) -> None:
        member.is_suspected = is_suspected
        if is_suspected:
            LOG.warning("%s is suspected: nothing is heard of it", member.name)
        else:
            LOG.warning("%s is trusted again", member.name)
        if member.role is Role.SERVER:
            self._publisher.publish()
        else:
            self._router.suspect((member.leader or member).worker_id, is_suspected)


class Lateness:
    """Knows when the supervisor's loop ran last. Only its thread uses it.

    The whole machine may have been stopped meanwhile, such as a virtual machine or a container that was
    paused. Then no process could send anything, and what arrived before is still to be read. So silence is
    counted in turns of the supervisor's loop, each of which has a maximum length.
    """

    def __init__(self, turn: float) -> None:
        """turn: seconds that one turn of the loop may take. What it takes beyond them is no silence."""
        self._turn = turn
        self._last: float | None = None

    def excuse(self, members: Iterable[Member], now: float) -> None:
        """Called once in each turn, at the time `now` on the clock of `Member.last_seen`."""
        late = 0.0 if self._last is None else now - self._last - self._turn
        self._last = now
        if late > 0:
            for member in members:
                member.last_seen = min(now, member.last_seen + late)
