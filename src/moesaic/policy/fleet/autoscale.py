"""How many expert servers there should be: a target from queue, utilisation and missed objectives.

Expert-as-a-Service adds and removes servers one at a time and names no trigger. Ours has two marks with a
gap between them, so that a load between the two changes nothing:

- *High*: the servers are busier than `high`, more than `queue` requests wait for each, or requests miss their
  objective. After `up_seconds` of it the target is at once what the load asks for, at most twice as many.
- *Low*: the servers are less busy than `low`, no more than `queue` requests wait in all, none misses its
  objective, and one server less would stay below `high`. After `down_seconds` of it one server leaves.

After a change nothing is decided for `cooldown` seconds, and what is measured in them does not count: the new
server loads its experts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class AutoscaleRule:
    """Bounds and marks."""

    least: int
    """Fewest servers."""
    most: int
    """Most servers."""
    high: float = 0.85
    """Mean share of the time that servers are busy, from which on there are too few."""
    low: float = 0.4
    """The share below which there are too many."""
    queue: float = 4.0
    """Requests waiting for each server, above which there are too few."""
    up_seconds: float = 5.0
    """How long high lasts before servers are added."""
    down_seconds: float = 120.0
    """How long low lasts before a server leaves."""
    cooldown: float = 30.0
    """Seconds after a change without another one."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError.field("--autoscale", f"{self.least}:{self.most}", _ALLOWED)
        if not 0 < self.low < self.high <= 1:
            raise ConfigError.field("low and high", (self.low, self.high), "0 < low < high <= 1")
        for name in ("queue", "up_seconds", "down_seconds", "cooldown"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError.field(name, getattr(self, name), "0 or more")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads "MIN:MAX", with the default marks. Raises ConfigError naming --autoscale.

        Example: "2:6" -> 2 to 6 servers.
        """
        match = re.fullmatch("([0-9]{1,6}):([0-9]{1,6})", text.strip())
        if match is None:
            raise ConfigError.field("--autoscale", text, _ALLOWED)
        return cls(int(match[1]), int(match[2]))


_ALLOWED = "MIN:MAX with 1 <= MIN <= MAX, such as 2:6"


class Autoscaler:
    """Remembers since when the load is high or low, and when it last changed something."""

    def __init__(self, rule: AutoscaleRule) -> None:
        self._rule = rule
        self._high_since: float | None = None
        self._low_since: float | None = None
        self._quiet_until = -math.inf

    def decide(
        self, now: float, queue_depth: int, utilisation: float, slo_violations: int, servers: int
    ) -> int:
        """How many servers there should be, least to most.

        now: seconds. queue_depth: requests that wait. utilisation: mean share of the time since the last call
        in which the servers were busy, 0 to 1. slo_violations: first tokens, and tokens, that came later than
        their objective since the last call. servers: how many serve or start; none that drains or died.

        Example, rule 1:4 and its default marks, 2 servers: utilisation 0.9 at second 0 -> 2, still at
        second 5 -> 3; then, in the cool-down, 3 whatever comes until second 35.
        """
        bounded = self._bounded(servers)
        if bounded != servers or now < self._quiet_until:
            self._high_since = self._low_since = None
            return bounded
        high = self._is_high(queue_depth, utilisation, slo_violations, servers)
        low = not high and self._is_low(queue_depth, utilisation, servers)
        self._high_since = _since(self._high_since, high, now)
        self._low_since = _since(self._low_since, low, now)
        target = servers
        if self._high_since is not None and now - self._high_since >= self._rule.up_seconds:
            target = self._bounded(self._wanted(queue_depth, utilisation, servers))
        elif self._low_since is not None and now - self._low_since >= self._rule.down_seconds:
            target = self._bounded(servers - 1)
        if target != servers:
            self._high_since = self._low_since = None
            self._quiet_until = now + self._rule.cooldown
        return target

    def _bounded(self, servers: int) -> int:
        return min(max(servers, self._rule.least), self._rule.most)

    def _is_high(self, queue_depth: int, utilisation: float, slo_violations: int, servers: int) -> bool:
        rule = self._rule
        return utilisation > rule.high or queue_depth > rule.queue * servers or slo_violations > 0

    def _is_low(self, queue_depth: int, utilisation: float, servers: int) -> bool:
        """Low, and what is left would not be high: the same work on one server less."""
        fewer = servers - 1
        fits = fewer > 0 and utilisation * servers / fewer < self._rule.high
        return utilisation < self._rule.low and queue_depth <= self._rule.queue and fits

    def _wanted(self, queue_depth: int, utilisation: float, servers: int) -> int:
        """One more at least; enough to be below `high` and `queue`, at most twice as many."""
        busy = math.ceil(servers * utilisation / self._rule.high)
        waiting = math.ceil(queue_depth / self._rule.queue) if self._rule.queue else 0
        return max(servers + 1, min(max(busy, waiting), 2 * servers))


def _since(since: float | None, holds: bool, now: float) -> float | None:
    """When a condition began to hold without a break; None while it does not."""
    if not holds:
        return None
    return now if since is None else since
