"""One process of a cluster as its supervisor sees it: alive, starting, dead, or dead too often."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from moesaic.cluster.local import ChildProcess
from moesaic.core.metrics import ExpertServerStats


class Role(enum.Enum):
    WORKER = "attention worker"
    SERVER = "expert server"


class Stage(enum.Enum):
    """STARTING -> SERVING -> (DRAINING ->) STOPPED; a death leads to WAITING, then STARTING again."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    WAITING = "waiting to be restarted"
    STOPPED = "stopped"


@dataclass(frozen=True)
class RestartRule:
    """How often a process may die."""

    first_delay: float = 0.5
    """Seconds before the second restart; the first is at once, each later one waits twice as long."""
    longest_delay: float = 10.0
    most: int = 6
    """Deaths within `window` seconds with which the supervisor gives up."""
    window: float = 60.0


@dataclass
class Member:
    """A place in the cluster. Its processes come and go; `incarnation` counts them."""

    role: Role
    number: int
    incarnation: int = 0
    child: ChildProcess | None = None
    stage: Stage = Stage.STARTING
    last_seen: float = 0.0
    """Clock of the last message."""
    deaths: list[float] = field(default_factory=list)
    restart_at: float = 0.0
    last_failure: str | None = None
    address: str = ""
    """Where clients find it, once it said so."""
    holds: int = -1
    """Version of the placement whose experts it has in memory."""
    kernels: str = ""
    stats: ExpertServerStats = field(default_factory=ExpertServerStats)

    @property
    def name(self) -> str:
        return f"{self.role.value} {self.number}"

    def died(self, how: str, now: float, rule: RestartRule) -> bool:
        """Its process ended. False when that happened too often to start another."""
        self.last_failure = how
        self.deaths = [death for death in self.deaths if now - death < rule.window] + [now]
        self.stage, self.child = Stage.WAITING, None
        if len(self.deaths) >= rule.most:
            return False
        before = len(self.deaths) - 2
        self.restart_at = now + (0.0 if before < 0 else min(rule.longest_delay, rule.first_delay * 2**before))
        return True
