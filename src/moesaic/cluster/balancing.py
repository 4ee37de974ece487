"""Decides from the recent load when experts move between servers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from moesaic.cluster.autoscaling import Autoscaling, Process, Sample
from moesaic.cluster.loads import Loads
from moesaic.config import ClusterConfig
from moesaic.core.experts import ExpertLayout
from moesaic.core.placement import Placement
from moesaic.policy.placement import around_homes, balance
from moesaic.policy.placement.online import Traffic
from moesaic.policy.placement.spreading import count_exposed

BANDWIDTH = 2**30
"""Assumed rate, in bytes/s, at which a server reads weights: that of a common SSD."""
LINK = 8 * 2**30
"""Assumed rate, in bytes/s, at which rows pass between a worker and the server of another rank: memory."""
HORIZON = 5
"""Number of rebalance intervals for which the load is assumed to stay the same."""
WINDOW_SECONDS = 60.0
"""Seconds of load that are remembered if nothing is rebalanced."""


class Balancing:
    """The balancing of one cluster, created once its layout is known."""

    def __init__(
        self, layout: ExpertLayout, cluster: ClusterConfig, now: float, homes: Placement | None = None
    ) -> None:
        """homes: the placement of --placement, whose experts stay where they are but for --rebalance load."""
        seconds = cluster.rebalance_interval
        self.layout = layout
        self.loads = Loads(len(layout.layers), layout.num_experts, seconds or WINDOW_SECONDS)
        self.homes = None if cluster.rebalance == "load" else homes
        """The placement whose experts stay where they are. None: all experts may move by load."""
        self._cluster = cluster
        copies = cluster.redundant_experts > 0 or cluster.min_replicas > 1
        never_moves = not seconds or (
            cluster.placement is not None and not copies and cluster.rebalance is None
        )
        self._next = math.inf if never_moves else now + seconds
        self._autoscaling = Autoscaling(cluster, now)

    def plan_rebalance(
        self,
        now: float,
        placement: Placement,
        servers: Mapping[int, float],
        bandwidth: float = BANDWIDTH,
        hosts: Mapping[int, str] | None = None,
    ) -> Placement | None:
        """Returns the next placement if moving to it pays off, and None otherwise. It also pays off if fewer
        experts have all of their copies on one host.

        It always returns None between two intervals. servers: id -> capacity weight. bandwidth: bytes/s at
        which a server loads experts. hosts: server -> its host; None: all are on one.
        """
        if now < self._next or not self.loads.has_full_window():
            return None
        self._next = now + self._cluster.rebalance_interval
        new = self._next_placement(placement, servers, hosts)
        if self._is_safer(placement, new, servers, hosts):
            return new  # whatever it costs: one host less can take all copies of an expert away
        load = self.loads.window()
        moves = balance.moves(placement, new)
        horizon = HORIZON * self._cluster.rebalance_interval
        share = balance.gain(load, placement, new, servers)
        gain = balance.gain_seconds(share, self.loads.utilisation(), horizon)
        cost = balance.busiest_bytes(moves, self.layout.expert_bytes)
        return new if moves and balance.worth_moving(gain, cost, bandwidth) else None

    def plan_spread(
        self, placement: Placement, servers: Mapping[int, float], hosts: Mapping[int, str]
    ) -> Placement | None:
        """Returns a placement with fewer experts that have all of their copies on one host; usually None.

        Copies that only a file asks for stay where they are.
        """
        if self._cluster.min_replicas == 1 and not self._cluster.redundant_experts:
            return None
        new = self._next_placement(placement, servers, hosts)
        return new if self._is_safer(placement, new, servers, hosts) else None

    def _next_placement(
        self, placement: Placement, servers: Mapping[int, float], hosts: Mapping[int, str] | None
    ) -> Placement:
        """The best placement for the load of the window; `placement` where it is good enough."""
        load, layers = self.loads.window(), self.layout.layers
        replica_limits = (
            self._cluster.redundant_experts,
            min(self._cluster.min_replicas, len(servers)),
            placement,
        )
        if self.homes is None:
            return balance.place(load, layers, servers, *replica_limits, hosts=hosts)
        if set(self.homes.servers) <= set(servers):
            return around_homes.place(self.homes, load, layers, servers, *replica_limits, hosts=hosts)
        return placement  # servers of the file were removed by command

    @staticmethod
    def _is_safer(
        old: Placement, new: Placement, servers: Mapping[int, float], hosts: Mapping[int, str] | None
    ) -> bool:
        return new is not old and count_exposed(new, list(servers), hosts) < count_exposed(
            old, list(servers), hosts
        )

    def traffic(self, bandwidth: float) -> Traffic:
        """What the servers did in the window. bandwidth: bytes/s at which a server loads experts."""
        rows = self.loads.window().sum() / (len(self.layout.layers) * self.layout.top_k)
        seconds = self._cluster.rebalance_interval
        return Traffic(
            tokens_per_second=float(rows) / seconds,
            busy=self.loads.utilisation(),
            link=LINK,
            copies=bandwidth,
            horizon=HORIZON * seconds,
        )

    def count_needed_servers(
        self,
        now: float,
        waiting: int,
        busy: Mapping[Process, float],
        servers: int,
        missed_objectives: int = 0,
    ) -> int:
        """Returns how many expert servers there should be, given `servers` now.

        waiting: number of requests that wait. busy: process -> seconds that it has computed so far.
        missed_objectives: number of missed latency objectives so far.
        """
        kind = "expert_servers"
        sample = Sample({kind: servers}, {kind: waiting}, missed_objectives, {kind: busy})
        return self._autoscaling.decide_counts(now, sample).get(kind, servers)
