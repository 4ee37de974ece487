"""Kills one process by hand, to see that the cluster goes on.

Question: Who kills a process by hand?
"""

from __future__ import annotations

from collections.abc import Collection

from moesaic.cluster.launched_process import LaunchedProcess
from moesaic.cluster.member import Member, RestartRule, Stage
from moesaic.core.errors import ConfigError, ScalingError


def kill(members: Collection[Member], name: str, now: float, rule: RestartRule) -> str:
    """Kills the process of the member `name`. Returns what was done and what follows, in words for people.

    A process of this host gets SIGKILL, and so does one that a launcher started on another host. The
    supervisor restarts both, as after any death. Of a process that joined by itself only the connection can
    be closed. For the cluster that is its death, and the process joins again.

    Raises ConfigError if no member has that name. Raises ScalingError if there is no process now, if one more
    death would end the service, or if a process that joined does not serve yet.
    """
    members_by_name = {member.name: member for member in members}
    if name not in members_by_name:
        raise ConfigError.field("name", name, ", ".join(members_by_name))
    member = members_by_name[name]
    child, stage = member.child, member.stage
    if child is None:
        raise ScalingError(f"{name} has no process now: it is {stage.value}", conflict=True)
    if member.is_external:
        if not member.in_service:  # `moesaic join` would end instead of joining again
            raise ScalingError(f"{name} does not serve yet: it is {stage.value}", conflict=True)
        child.kill()
        return f"the connection to {name} on {member.host} was closed; the process joins again as a new one"
    recent = sum(now - death < rule.window for death in member.deaths)
    if recent + 1 >= rule.max_deaths:
        message = f"{name} died {recent} times within {rule.window:g} s; one more death would end the service"
        raise ScalingError(message, conflict=True)
    child.kill()
    outlook = (
        "it is not started again, as it was leaving" if stage is Stage.DRAINING else "it is started again"
    )
    location = f" on {member.host}" if isinstance(child, LaunchedProcess) and member.host else ""
    return f"{name}{location} was killed; {outlook}"
