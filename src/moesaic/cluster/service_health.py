"""Asks `policy.fleet.health` whether the processes of a cluster serve, and tells the router what follows.

Requests are computed while an attention worker serves and while each expert of each layer has a copy on a
server that serves.
"""

from __future__ import annotations

from collections.abc import Callable

from moesaic.cluster.member import Member, RestartRule, Stage
from moesaic.cluster.members import Members
from moesaic.cluster.publishing import Publisher
from moesaic.cluster.report import layer_replicas
from moesaic.cluster.router import Router
from moesaic.config import ClusterConfig
from moesaic.core import messages
from moesaic.core.cluster_status import LayerReplicas
from moesaic.core.placement import Placement, ranges
from moesaic.policy.fleet.health import Health, HealthPolicy, Outlook, State


class ServiceHealth:
    """The health of one cluster that has served. Only the supervisor's thread calls its methods."""

    def __init__(
        self,
        members: Members,
        publisher: Publisher,
        router: Router,
        note: Callable[[str], None],
        cluster: ClusterConfig,
    ) -> None:
        """note: records a failure."""
        self._members, self._publisher, self._router = members, publisher, router
        self._note = note
        self._may_join = cluster.cluster_address is not None
        self.policy = HealthPolicy(cluster.unavailable_timeout)
        self.health = Health()
        """What was found last."""

    def look(self, now: float, rule: RestartRule, obstacle: str | None = None) -> Health:
        """Judges the cluster, and tells the router when the outcome changes.

        obstacle: why no process can be started on this host now. None: one can.
        """
        for member in self._members.all_members:
            if member.record_service(now):
                self.policy.record_start(member.role.value, member.start_seconds)
        last_health, self.health = self.health, self.policy.judge(self._view(now, rule, obstacle), now)
        self._announce(last_health, self.health)
        return self.health

    def _view(self, now: float, rule: RestartRule, obstacle: str | None) -> Outlook:
        placement = self._publisher.placement
        lacks_workers = not any(member.stage is Stage.SERVING for member in self._members.workers)
        layers = [layer for layer in layer_replicas(placement, self._members.servers) if layer.missing]
        gaps = ["no attention worker serves"] * lacks_workers
        if layers:
            gaps.append(describe_missing_experts(layers))
        groups = [self._members.workers] * lacks_workers
        groups += _group_holders(layers, placement, self._members.servers)
        return Outlook(
            tuple(gaps),
            all(any(can_serve_soon(member, obstacle) for member in group) for group in groups),
            self._may_join,
            any(group and all(member.keeps_dying(now, rule) for member in group) for group in groups),
            describe_cause([member for group in groups for member in group], obstacle),
        )

    def _announce(self, last_health: Health, health: Health) -> None:
        """Tells the router that requests should end or are accepted again, if that is new."""
        if health.state is State.END:
            return  # the supervisor ends the service
        is_same_outcome = (last_health.is_available, last_health.ends_begun_answers) == (
            health.is_available,
            health.ends_begun_answers,
        )
        if is_same_outcome and (health.is_available or last_health.reason == health.reason):
            return
        if last_health.is_available != health.is_available:
            available = "requests are accepted again"
            self._note(available if health.is_available else f"requests are refused: {health.reason}")
        reason = "" if health.is_available else health.reason
        self._router.tell(messages.Outage(reason, health.ends_begun_answers))


def can_serve_soon(member: Member, obstacle: str | None) -> bool:
    """Whether the next process of a member is loading, or will be started by itself and may then serve."""
    is_refused = member.refusal is not None or obstacle is not None
    return not is_refused and member.stage in (Stage.STARTING, Stage.WAITING)


def describe_missing_experts(layers: list[LayerReplicas]) -> str:
    """The experts that nobody serves, such as "no server that serves holds experts 0-3 of layer 1"."""
    first, num_others = layers[0], len(layers) - 1
    text = f"no server that serves holds experts {ranges(first.missing)} of layer {first.layer}"
    return f"{text} (and {num_others} further layers)" if num_others else text


def describe_cause(members: list[Member], obstacle: str | None) -> str:
    """Why these members do not serve, in words for people. Empty if that is not known."""
    if obstacle is not None:
        return obstacle
    causes = (
        f"{member.name}: {reason}"
        for member in members
        if (reason := member.refusal or member.waiting or member.last_failure)
    )
    return next(causes, "")


def _group_holders(
    layers: list[LayerReplicas], placement: Placement | None, servers: list[Member]
) -> list[list[Member]]:
    """The servers that should hold the missing experts of these layers, once for each set of servers."""
    if placement is None:
        return []
    number_sets = {placement.holders(layer.layer, expert) for layer in layers for expert in layer.missing}
    return [[member for member in servers if member.number in numbers] for numbers in number_sets]
