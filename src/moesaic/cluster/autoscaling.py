"""Decides how many processes of each role there should be (`--autoscale`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError
from moesaic.policy.fleet.autoscale import EXPERT_SERVERS, ROLES, Autoscaler, AutoscaleRule, parse_rules

SECONDS = 1.0
"""Seconds between two decisions."""
RANKS_RULES = (
    "MIN:MAX or ranks=MIN:MAX with --enable-expert-parallel, whose workers and servers are pairs, and "
    "prefill-workers=MIN:MAX"
)

Process = tuple[int, int]
"""A server's number and incarnation."""


@dataclass(frozen=True)
class Sample:
    """What the processes do now."""

    processes: Mapping[str, int]
    """Number of processes of each kind, by the names of settings."""
    waiting: Mapping[str, int] = field(default_factory=dict)
    """Kind -> number of requests that wait for such a process."""
    missed_objectives: int = 0
    """Number of missed latency objectives so far."""
    busy: Mapping[str, Mapping[Process, float]] = field(default_factory=dict)
    """Kind -> process -> seconds that an expert server has computed so far, or for which a prefill worker has
    had prompts."""
    occupancy: float = 0.0
    """Share of the attention workers' seats or KV blocks, whichever is larger, that requests take."""


class Autoscaling:
    """The autoscaling of one cluster."""

    def __init__(self, cluster: ClusterConfig, now: float) -> None:
        """Raises ConfigError if --autoscale is not possible."""
        self._scalers = {role: Autoscaler(rule) for role, rule in autoscale_rules(cluster).items()}
        self._last_decision = now
        self._busy: Mapping[str, Mapping[Process, float]] = {}
        self._missed_objectives = 0

    def decide_counts(self, now: float, sample: Sample) -> dict[str, int]:
        """Numbers of processes that should change, by the names of settings. Empty between two decisions.

        Servers and prefill workers are as busy as their mean share of the time. Attention workers are as busy
        as they are occupied, and ranks as the busier of their two halves. Example: {"expert_servers": 3}.
        """
        elapsed_seconds = now - self._last_decision
        if not self._scalers or elapsed_seconds < SECONDS:
            return {}
        use = {kind: self._share(kind, sample, elapsed_seconds) for kind in sample.busy}
        use["attention_workers"] = sample.occupancy
        # The counter only grows, so the difference is what was missed since the last decision.
        late = sample.missed_objectives - self._missed_objectives
        self._missed_objectives = sample.missed_objectives
        self._last_decision, self._busy = now, sample.busy
        counts: dict[str, int] = {}
        for role, scaler in self._scalers.items():
            busiest = max(use.get(kind, 0.0) for kind in ROLES[role])
            waiting = max(sample.waiting.get(kind, 0) for kind in ROLES[role])
            count = sample.processes[ROLES[role][0]]
            number = scaler.decide(now, waiting, busiest, late, count)
            if number != count:
                counts |= dict.fromkeys(ROLES[role], number)
        return counts

    def _share(self, kind: str, sample: Sample, elapsed_seconds: float) -> float:
        """The mean share of the time, since the last decision, in which processes of this kind were busy."""
        last_seconds = self._busy.get(kind, {})
        shares = [
            (seconds - last_seconds.get(key, 0.0)) / elapsed_seconds
            for key, seconds in sample.busy[kind].items()
        ]
        return min(1.0, sum(shares) / len(shares)) if shares else 0.0


def autoscale_rules(cluster: ClusterConfig) -> dict[str, AutoscaleRule]:
    """Returns the limits of each role of --autoscale; none without it.

    Raises ConfigError for limits that cannot be read, that are for a role that the cluster does not have, or
    that contradict other flags.
    """
    text, has_ranks = cluster.autoscale, cluster.enable_expert_parallel
    if text is None:
        return {}
    rules = parse_rules(text, "ranks" if has_ranks else EXPERT_SERVERS)
    main_roles = rules.keys() - {"prefill-workers"}
    # With --enable-expert-parallel a worker and a server are a pair, so one rule sets both numbers.
    if main_roles and has_ranks != (main_roles == {"ranks"}):
        names = "expert-servers, attention-workers, prefill-workers"
        choices = RANKS_RULES if has_ranks else f"{names} without --enable-expert-parallel"
        raise ConfigError.field("--autoscale", text, choices)
    for role, rule in rules.items():
        if "expert_servers" in ROLES[role] and rule.minimum < cluster.min_replicas:
            choices = f"MIN of at least --min-replicas, {cluster.min_replicas}"
            raise ConfigError.field("--autoscale", text, choices)
        for name in ROLES[role]:
            count, flag = getattr(cluster, name), "--" + name.replace("_", "-")
            if not rule.minimum <= count <= rule.maximum:
                choices = f"{rule.minimum} to {rule.maximum} with --autoscale {text}"
                raise ConfigError.field(flag, count, choices)
    return rules
