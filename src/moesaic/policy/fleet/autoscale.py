"""Chooses how many processes of a role run, from queue length, utilisation and missed latency objectives.

Each role has its own bounds and its own `Autoscaler`. The module calls a process of any role a server.

Expert-as-a-Service adds and removes servers one at a time and names no trigger. We use two thresholds with a
gap between them, so that a load between the two changes nothing:

- *High*: the servers are busier than `high`, more than `queue` requests wait per server, or requests miss
  their objective. After `up_seconds` of this the target becomes what the load needs, at most twice as many.
- *Low*: the servers are less busy than `low`, no more than `queue` requests wait in all, none misses its
  objective, and one server less would stay below `high`. After `down_seconds` of this one server leaves.

For `cooldown` seconds after a change nothing is decided, because the new server loads its experts. What is
measured in that time does not count.

Question: How many processes of a role should there be, and how is a role added (`--autoscale`)?
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class AutoscaleRule:
    """Bounds and thresholds of autoscaling."""

    minimum: int
    """Minimum number of servers."""
    maximum: int
    """Maximum number of servers."""
    high: float = 0.85
    """Servers are added when their mean busy share of the time is above this."""
    low: float = 0.4
    """A server leaves when the mean busy share is below this."""
    queue: float = 4.0
    """Servers are added when more than this many requests wait per server."""
    up_seconds: float = 5.0
    """Seconds that the load must be high before servers are added."""
    down_seconds: float = 120.0
    """Seconds that the load must be low before a server leaves."""
    cooldown: float = 30.0
    """Seconds after a change in which nothing changes again."""

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ConfigError.field("--autoscale", f"{self.minimum}:{self.maximum}", _ALLOWED)
        if not 0 < self.low < self.high <= 1:
            raise ConfigError.field("low and high", (self.low, self.high), "0 < low < high <= 1")
        for name in ("queue", "up_seconds", "down_seconds", "cooldown"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError.field(name, getattr(self, name), "0 or more")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "MIN:MAX", with default thresholds. Raises ConfigError naming --autoscale.

        Example: "2:6" means 2 to 6 servers.
        """
        match = re.fullmatch("([0-9]{1,6}):([0-9]{1,6})", text.strip())
        if match is None:
            raise ConfigError.field("--autoscale", text, _ALLOWED)
        return cls(int(match[1]), int(match[2]))


_ALLOWED = "MIN:MAX with 1 <= MIN <= MAX, such as 2:6"

EXPERT_SERVERS = "expert-servers"
ROLES: dict[str, tuple[str, ...]] = {
    EXPERT_SERVERS: ("expert_servers",),
    "attention-workers": ("attention_workers",),
    "prefill-workers": ("prefill_workers",),
    "ranks": ("attention_workers", "expert_servers"),
}
"""Role on the command line -> the numbers of processes that it changes, as settings name them."""


def parse_rules(text: str, default: str = EXPERT_SERVERS) -> dict[str, AutoscaleRule]:
    """Parse the limits of each role. Raises ConfigError naming --autoscale.

    default: the role that limits without a name are for.

    Examples: "2:6" -> 2 to 6 expert servers. "attention-workers=1:3,expert-servers=2:6" -> limits of both.
    """
    rules: dict[str, AutoscaleRule] = {}
    for part in text.split(","):
        name, _, limits = part.rpartition("=")
        role = name.strip() or default
        if role not in ROLES or role in rules:
            raise ConfigError.field("--autoscale", text, f"{' or '.join(ROLES)}, each once, with =MIN:MAX")
        rules[role] = AutoscaleRule.parse(limits)
    return rules


class Autoscaler:
    """Chooses the number of servers.

    It remembers how long the load has been high or low, and its last change.
    """

    def __init__(self, rule: AutoscaleRule) -> None:
        self._rule = rule
        self._high_since: float | None = None
        self._low_since: float | None = None
        self._quiet_until = -math.inf

    def decide(
        self, now: float, queue_depth: int, utilisation: float, slo_violations: int, servers: int
    ) -> int:
        """The number of servers that should run, from `least` to `most`.

        now: seconds.
        queue_depth: requests that wait.
        utilisation: mean share of the time since the last call in which the servers were busy, 0 to 1.
        slo_violations: first tokens and later tokens that missed their latency objective since the last call.
        servers: servers that serve or start, without those that drain or died.

        Example with rule 1:4, default thresholds and 2 servers: utilisation 0.9 at second 0 gives 2. Still
        0.9 at second 5 gives 3. Then the cooldown keeps 3 until second 35, whatever the load.
        """
        allowed_servers = self._clamp(servers)
        if allowed_servers != servers or now < self._quiet_until:
            self._high_since = self._low_since = None
            return allowed_servers
        high = self._is_high(queue_depth, utilisation, slo_violations, servers)
        low = not high and self._is_low(queue_depth, utilisation, servers)
        self._high_since = _update_start(self._high_since, high, now)
        self._low_since = _update_start(self._low_since, low, now)
        target = servers
        if self._high_since is not None and now - self._high_since >= self._rule.up_seconds:
            target = self._clamp(self._needed_servers(queue_depth, utilisation, servers))
        elif self._low_since is not None and now - self._low_since >= self._rule.down_seconds:
            target = self._clamp(servers - 1)
        if target != servers:
            self._high_since = self._low_since = None
            self._quiet_until = now + self._rule.cooldown
        return target

    def _clamp(self, servers: int) -> int:
        return min(max(servers, self._rule.minimum), self._rule.maximum)

    def _is_high(self, queue_depth: int, utilisation: float, slo_violations: int, servers: int) -> bool:
        rule = self._rule
        return utilisation > rule.high or queue_depth > rule.queue * servers or slo_violations > 0

    def _is_low(self, queue_depth: int, utilisation: float, servers: int) -> bool:
        """Whether the load is low and would not be high with one server less."""
        fewer = servers - 1
        fits = fewer > 0 and utilisation * servers / fewer < self._rule.high
        return utilisation < self._rule.low and queue_depth <= self._rule.queue and fits

    def _needed_servers(self, queue_depth: int, utilisation: float, servers: int) -> int:
        """Servers to add up to: enough to be below `high` and `queue`, at least one more, at most twice as
        many.
        """
        busy = math.ceil(servers * utilisation / self._rule.high)
        waiting = math.ceil(queue_depth / self._rule.queue) if self._rule.queue else 0
        return max(servers + 1, min(max(busy, waiting), 2 * servers))


def _update_start(start: float | None, is_true: bool, now: float) -> float | None:
    """When the condition began to hold without interruption. None while it does not hold."""
    if not is_true:
        return None
    return now if start is None else start
