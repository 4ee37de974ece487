"""Decides how many processes of each role there should be (`--autoscale`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError
from moesaic.policy.fleet.autoscale import EXPERT_SERVERS, ROLES, Autoscaler, AutoscaleRule, parse_rules

SECONDS = 1.0
"""Seconds between two decisions."""
PAIRED = (
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
    missed: int = 0
    """Number of missed latency objectives so far."""
    busy: Mapping[str, Mapping[Process, float]] = field(default_factory=dict)
    """Kind -> process -> seconds that an expert server has computed so far, or for which a prefill worker has
    had prompts."""
    occupied: float = 0.0
    """Share of the attention workers' seats or KV blocks, whichever is larger, that requests take."""


class Autoscaling:
    """The autoscaling of one cluster."""

    def __init__(self, cluster: ClusterConfig, now: float) -> None:
        """Raises ConfigError if --autoscale is not possible."""
        self._scalers = {role: Autoscaler(rule) for role, rule in autoscale_rules(cluster).items()}
        self._looked = now
        self._busy: Mapping[str, Mapping[Process, float]] = {}
        self._missed = 0

    def wanted(self, now: float, sample: Sample) -> dict[str, int]:
        """Numbers of processes that should change, by the names of settings. Empty between two decisions.

        Servers and prefill workers are as busy as their mean share of the time. Attention workers are as busy
        as they are occupied, and ranks as the busier of their two halves. Example: {"expert_servers": 3}.
        """
        passed = now - self._looked
        if not self._scalers or passed < SECONDS:
            return {}
        use = {kind: self._share(kind, sample, passed) for kind in sample.busy}
        use["attention_workers"] = sample.occupied
        late, self._missed = sample.missed - self._missed, sample.missed
        self._looked, self._busy = now, sample.busy
        found: dict[str, int] = {}
        for role, scaler in self._scalers.items():
            busiest = max(use.get(kind, 0.0) for kind in ROLES[role])
            waiting = max(sample.waiting.get(kind, 0) for kind in ROLES[role])
            count = sample.processes[ROLES[role][0]]
            number = scaler.decide(now, waiting, busiest, late, count)
            if number != count:
                found |= dict.fromkeys(ROLES[role], number)
        return found

    def _share(self, kind: str, sample: Sample, passed: float) -> float:
        """The mean share of the time, since the last decision, in which processes of this kind were busy."""
        before = self._busy.get(kind, {})
        shares = [(seconds - before.get(key, 0.0)) / passed for key, seconds in sample.busy[kind].items()]
        return min(1.0, sum(shares) / len(shares)) if shares else 0.0


def autoscale_rules(cluster: ClusterConfig) -> dict[str, AutoscaleRule]:
    """Returns the limits of each role of --autoscale; none without it.

    Raises ConfigError for limits that cannot be read, that are for a role that the cluster does not have, or
    that contradict other flags.
    """
    text, paired = cluster.autoscale, cluster.enable_expert_parallel
    if text is None:
        return {}
    rules = parse_rules(text, "ranks" if paired else EXPERT_SERVERS)
    others = rules.keys() - {"prefill-workers"}
    if others and paired != (others == {"ranks"}):
        names = "expert-servers, attention-workers, prefill-workers"
        allowed = PAIRED if paired else f"{names} without --enable-expert-parallel"
        raise ConfigError.field("--autoscale", text, allowed)
    for role, rule in rules.items():
        if "expert_servers" in ROLES[role] and rule.least < cluster.min_replicas:
            allowed = f"MIN of at least --min-replicas, {cluster.min_replicas}"
            raise ConfigError.field("--autoscale", text, allowed)
        for name in ROLES[role]:
            count, flag = getattr(cluster, name), "--" + name.replace("_", "-")
            if not rule.least <= count <= rule.most:
                allowed = f"{rule.least} to {rule.most} with --autoscale {text}"
                raise ConfigError.field(flag, count, allowed)
    return rules
