"""Decides from the recent load when experts move between servers and when servers are added or removed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from moesaic.cluster.loads import Loads
from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.placement import Placement
from moesaic.policy.fleet.autoscale import Autoscaler, AutoscaleRule
from moesaic.policy.placement import around_homes, balance

BANDWIDTH = 2**30
"""Assumed rate, in bytes/s, at which a server reads weights: that of a common SSD."""
HORIZON = 5
"""Number of rebalance intervals for which the load is assumed to stay the same."""
AUTOSCALE_SECONDS = 1.0
"""Seconds between two autoscaling decisions."""
WINDOW_SECONDS = 60.0
"""Seconds of load that are remembered if nothing is rebalanced."""

Process = tuple[int, int]
"""A server's number and incarnation."""


class Balancing:
    """The balancing of one cluster, created once its layout is known."""

    def __init__(
        self, layout: ExpertLayout, cluster: ClusterConfig, now: float, homes: Placement | None = None
    ) -> None:
        """homes: the placement of --placement, whose experts stay where they are."""
        seconds = cluster.rebalance_interval
        self.layout = layout
        self.loads = Loads(len(layout.layers), layout.num_experts, seconds or WINDOW_SECONDS)
        self._cluster = cluster
        self._homes = homes
        copies = cluster.redundant_experts > 0 or cluster.min_replicas > 1
        fixed = not seconds or (cluster.placement is not None and not copies)
        self._next = math.inf if fixed else now + seconds
        self._autoscaler = autoscaler(cluster)
        self._looked = now
        self._busy: Mapping[Process, float] = {}
        self._missed = 0

    def rebalanced(self, now: float, placement: Placement, servers: Mapping[int, float]) -> Placement | None:
        """Returns the next placement if moving to it pays off, and None otherwise.

        It always returns None between two intervals. servers: id -> capacity weight.
        """
        if now < self._next or not self.loads.full():
            return None
        self._next = now + self._cluster.rebalance_interval
        load, layers = self.loads.window(), self.layout.layers
        least, redundant = self._cluster.min_replicas, self._cluster.redundant_experts
        least = min(least, len(servers))
        if self._homes is None:
            new = balance.place(load, layers, servers, redundant, least, placement)
        elif set(self._homes.servers) <= set(servers):
            new = around_homes.place(self._homes, load, layers, servers, redundant, least, placement)
        else:  # servers of the file were removed by command
            return None
        moves = balance.moves(placement, new)
        horizon = HORIZON * self._cluster.rebalance_interval
        share = balance.gain(load, placement, new, servers)
        gain = balance.gain_seconds(share, self.loads.utilisation(), horizon)
        cost = balance.busiest_bytes(moves, self.layout.expert_bytes)
        return new if moves and balance.worth_moving(gain, cost, BANDWIDTH) else None

    def wanted_servers(
        self, now: float, waiting: int, busy: Mapping[Process, float], servers: int, missed: int = 0
    ) -> int:
        """Returns how many expert servers there should be, given `servers` now.

        waiting: number of requests that wait. busy: process -> seconds that it has computed so far. missed:
        number of missed latency objectives so far.
        """
        passed = now - self._looked
        if self._autoscaler is None or passed < AUTOSCALE_SECONDS:
            return servers
        shares = [(seconds - self._busy.get(key, 0.0)) / passed for key, seconds in busy.items()]
        late, self._missed = missed - self._missed, missed
        self._looked, self._busy = now, dict(busy)
        utilisation = min(1.0, sum(shares) / len(shares)) if shares else 0.0
        return self._autoscaler.decide(now, waiting, utilisation, late, servers)


def autoscale_rule(cluster: ClusterConfig) -> AutoscaleRule | None:
    """Returns the rule of --autoscale; None without it.

    Raises ConfigError if it is not MIN:MAX or contradicts other flags.
    """
    if cluster.autoscale is None:
        return None
    rule = AutoscaleRule.parse(cluster.autoscale)
    if cluster.enable_expert_parallel:
        allowed = "None with --enable-expert-parallel, whose workers and servers are pairs"
        raise ConfigError.field("--autoscale", cluster.autoscale, allowed)
    if rule.least < cluster.min_replicas:
        allowed = f"MIN of at least --min-replicas, {cluster.min_replicas}"
        raise ConfigError.field("--autoscale", cluster.autoscale, allowed)
    if not rule.least <= cluster.expert_servers <= rule.most:
        allowed = f"{rule.least} to {rule.most} with --autoscale {cluster.autoscale}"
        raise ConfigError.field("--expert-servers", cluster.expert_servers, allowed)
    return rule


def autoscaler(cluster: ClusterConfig) -> Autoscaler | None:
    """Returns the autoscaler of `cluster`; None if the number of servers changes only by command."""
    rule = autoscale_rule(cluster)
    return None if rule is None else Autoscaler(rule)
