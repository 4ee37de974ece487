"""One process of a cluster as its supervisor sees it: alive, starting, dead, or dead too often."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from moesaic.core.metrics import ExpertServerStats
from moesaic.transport.base import Connection


class Role(enum.Enum):
    WORKER = "attention worker"
    SERVER = "expert server"


class Stage(enum.Enum):
    """STARTING -> SERVING (-> DRAINING -> STOPPED); a death leads to WAITING, then STARTING again."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    WAITING = "waiting to be restarted"
    STOPPED = "stopped"


class Process(Protocol):
    """What runs in a member's place, here or on another machine."""

    @property
    def connection(self) -> Connection: ...

    @property
    def pid(self) -> int | None:
        """None on another machine."""
        ...

    def how_it_ended(self) -> str:
        """For a person, once the connection is lost."""
        ...

    def kill(self) -> None:
        """End it now; its connection tells once it is gone."""
        ...

    def stop(self) -> None:
        """Close the connection, which ends it, and wait for that."""
        ...


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
    """Never given to another member."""
    incarnation: int = 0
    child: Process | None = None
    stage: Stage = Stage.STARTING
    on_trial: bool = False
    """It is being added: when it keeps dying, the change failed and not the service."""
    elsewhere: bool = False
    """It joined by hand from outside: nobody here can restart it."""
    last_seen: float = 0.0
    """Clock of the last message."""
    deaths: list[float] = field(default_factory=list)
    """Those that still count for the restart rule."""
    all_deaths: int = 0
    restart_at: float = 0.0
    last_failure: str | None = None
    complaint: str | None = None
    """Why it cannot do what it was told last."""
    address: str = ""
    """Of a server: where clients find it, once it said so."""
    told: int = -1
    """Of a server: number of the Hold that it was sent last."""
    holds: int = -1
    """Number of the Hold that it answered last."""
    settled: int = -1
    """Of a worker: version of the directory that everything under way was routed by."""
    kernels: str = ""
    threads: int = 0
    capacity: float = 0.0
    """Of a server: weight of its share of experts and of load, beside the other servers'."""
    stats: ExpertServerStats = field(default_factory=ExpertServerStats)

    @property
    def name(self) -> str:
        return f"{self.role.value} {self.number}"

    @property
    def in_service(self) -> bool:
        """Whether it has work, or may have."""
        return self.stage in (Stage.SERVING, Stage.DRAINING)

    def died(self, how: str, now: float, rule: RestartRule) -> bool:
        """Its process ended. False when that happened too often to start another, or nobody wants one."""
        self.last_failure, self.child = how, None
        self.all_deaths += 1
        self.deaths = [death for death in self.deaths if now - death < rule.window] + [now]
        if self.elsewhere or self.stage is Stage.DRAINING:
            self.stage = Stage.STOPPED
            return False
        self.stage = Stage.WAITING
        if len(self.deaths) >= rule.most:
            return False
        before = len(self.deaths) - 2
        self.restart_at = now + (0.0 if before < 0 else min(rule.longest_delay, rule.first_delay * 2**before))
        return True
