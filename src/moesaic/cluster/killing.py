"""Kills one process by hand, to see that the cluster goes on."""

from __future__ import annotations

from collections.abc import Collection

from moesaic.cluster.member import Member, RestartRule
from moesaic.core.errors import ConfigError, ScalingError


def kill(members: Collection[Member], name: str, now: float, rule: RestartRule) -> None:
    """Sends SIGKILL to the process of the member `name`. The supervisor restarts it, as after any death.

    Raises ConfigError if no member of this host has that name, and ScalingError if there is no process now or
    if one more death would end the service.
    """
    found = {member.name: member for member in members if not member.elsewhere}
    if name not in found:
        raise ConfigError.field("name", name, ", ".join(found) or "nothing: no process runs on this host")
    member = found[name]
    child = member.child
    if child is None:
        raise ScalingError(f"{name} has no process now: it is {member.stage.value}", conflict=True)
    recent = sum(now - death < rule.window for death in member.deaths)
    if recent + 1 >= rule.most:
        what = f"{name} died {recent} times within {rule.window:g} s; one more death would end the service"
        raise ScalingError(what, conflict=True)
    child.kill()
