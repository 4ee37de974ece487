"""The supervisor's record of one process of a cluster: starting, serving, dead, or dead too often."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from moesaic.cluster.totals import server_counters_only, sum_stats
from moesaic.core.endpoint import NO_ENDPOINT, Endpoint
from moesaic.core.messages import Ready, ReceivesKV
from moesaic.core.metrics import ExpertServerStats
from moesaic.core.worker_info import WorkerInfo
from moesaic.policy.fleet.devices import Devices
from moesaic.transport.base import Connection

FIRST_PREFILL = 1 << 20
"""Number of the first prefill worker among the router's workers."""


class Role(enum.Enum):
    WORKER = "attention worker"
    PREFILL = "prefill worker"
    """An attention worker that computes prompts for the others."""
    SERVER = "expert server"
    RANKS = "ranks"
    """Ranks of an attention worker that are on another host than its first rank."""

    @property
    def flag(self) -> str:
        """The role in `--role` of `moesaic join`, such as "attention-worker"."""
        return self.value.replace(" ", "-")


class Stage(enum.Enum):
    """STARTING -> SERVING (-> DRAINING -> STOPPED). A death leads to WAITING, then to STARTING again. A
    prefill worker that died too often is STOPPED."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    WAITING = "waiting to be restarted"
    STOPPED = "stopped"


class Process(Protocol):
    """The running process of a member, on this or another host."""

    @property
    def connection(self) -> Connection: ...

    @property
    def pid(self) -> int | None:
        """Process id; None for a process of another host, or one that joined."""
        ...

    def describe_end(self) -> str:
        """How the process ended, in words for people. Called once the connection is lost."""
        ...

    def kill(self) -> None:
        """Kills the process now. Its connection reports the end."""
        ...

    def stop(self) -> None:
        """Closes the connection, which ends the process, and waits for the end."""
        ...


@dataclass(frozen=True)
class RestartRule:
    """How often a process may die, and how soon it is restarted."""

    first_delay: float = 0.5
    """Seconds before the second restart. The first restart is immediate; each later one waits twice as
    long."""
    longest_delay: float = 10.0
    max_deaths: int = 6
    """Number of deaths within a window after which a process keeps dying."""
    window: float = 60.0
    """Least seconds of that window. It grows with the time of a start, so that slow starts count too."""

    def delay(self, deaths: int, start_seconds: float = 0.0) -> float | None:
        """Seconds until the next start after so many deaths within a window; None: it keeps dying.

        start_seconds: how long the last start took. Slow starts are repeated more slowly.
        """
        if deaths >= self.max_deaths:
            return None
        first_delay = max(self.first_delay, start_seconds / 4)
        return 0.0 if deaths < 2 else min(self.last_delay(start_seconds), first_delay * 2 ** (deaths - 2))

    def last_delay(self, start_seconds: float = 0.0) -> float:
        """The longest time until the next start of a process whose starts take so long."""
        return max(self.longest_delay, 2 * start_seconds)

    def window_for(self, start_seconds: float) -> float:
        """Seconds within which deaths of a process count whose starts take so long."""
        return max(self.window, 2 * self.max_deaths * start_seconds)


@dataclass
class Member:
    """A place for a process in the cluster. If its process dies, the next one takes the place; `incarnation`
    counts them."""

    role: Role
    number: int
    """Number of the member, never used for another one."""
    incarnation: int = 0
    child: Process | None = None
    """The running process of the member, or None when it has none."""
    reader: threading.Thread | None = None
    """The thread that reads the messages of `child`. It ends with the connection."""
    stage: Stage = Stage.STARTING
    on_trial: bool = False
    """True while it is being added. If it keeps dying, the change has failed, not the service."""
    is_external: bool = False
    """True if it joined by itself (`moesaic join`), from this or another host. The supervisor cannot restart
    it."""
    has_tcp_connection: bool = False
    """True if its processes connect over TCP: they joined by themselves, or a launcher started them on some
    host. They know the secret, and their weights are compared."""
    waiting: str = ""
    """Why its process has no host yet, in words for people. Empty: it has one."""
    host: str = ""
    """The address of the host from which it joined. Empty: the supervisor's own host."""
    is_suspected: bool = False
    """True while it is on another host and was silent for a while. See `policy.fleet.silence`."""
    host_id: str = ""
    """Host of its process (`transport.host`), if that is not the supervisor's own."""
    last_seen: float = 0.0
    """Time of the last message, on the supervisor's clock."""
    start_time: float = 0.0
    """When its process was started, on the supervisor's clock."""
    start_seconds: float = 0.0
    """Seconds from the start of its last process until it served or died."""
    served_incarnation: int = 0
    """The last incarnation that has served."""
    deaths: list[float] = field(default_factory=list)
    """Times of the deaths that still count for the restart rule."""
    all_deaths: int = 0
    restart_at: float = 0.0
    last_failure: str | None = None
    complaint: str | None = None
    """Why it could not carry out its last message; None if it could."""
    refusal: str | None = None
    """Why its last process refused to start, such as a file that is missing. None: it did not, or another
    one has served since."""
    endpoint: Endpoint = NO_ENDPOINT
    """The endpoint at which clients connect to a server, once it is known."""
    last_hold: int = -1
    """The number of the last Hold that was sent to a server."""
    confirmed_hold: int = -1
    """The number of the last Hold that a server has confirmed."""
    leader: Member | None = None
    """The worker whose ranks these are. None for ranks that wait for a group."""
    is_fit: bool = False
    """True once ranks have the checkpoint and the settings, so that they can be in a group."""
    kv: ReceivesKV | None = None
    """Where a worker receives KV. None: it does not, or has not said it yet."""
    settled_version: int = -1
    """The oldest version of the directory by which a worker's calls under way may have been routed."""
    devices: Devices = ()
    """GPUs that its processes see, one after the other; empty: those of this process, or none."""
    weights: str = ""
    """If it joined: fingerprint that its checkpoint must have."""
    info: WorkerInfo | None = None
    """What a worker said when it was ready. None before that."""
    kernels: str = ""
    job_id: bytes = b""
    """The name of a job of GPUs that a worker can begin. Empty: it can join none."""
    can_join_job: bool = False
    """Whether a server can join a job of GPUs."""
    threads: int = 0
    capacity: float = 0.0
    """The capacity weight of a server, which sets its share of experts and load."""
    stats: ExpertServerStats = field(default_factory=ExpertServerStats)
    """What a server's process said last, and the counts of its earlier processes."""
    past_stats: ExpertServerStats = field(default_factory=ExpertServerStats)
    """Counts of its earlier processes."""

    @property
    def name(self) -> str:
        return f"{self.role.value} {self.number}"

    @property
    def is_client(self) -> bool:
        """Whether it is an attention worker of either role."""
        return self.role in (Role.WORKER, Role.PREFILL)

    @property
    def is_spare(self) -> bool:
        """Whether it has ranks that wait for a group."""
        return self.role is Role.RANKS and self.leader is None

    @property
    def worker_id(self) -> int:
        """The number of a worker in the router, which counts both roles together."""
        return self.number if self.role is Role.WORKER else FIRST_PREFILL + self.number

    @property
    def process_key(self) -> tuple[int, int]:
        """The number and the incarnation of the member, which no other process of its role has."""
        return self.number, self.incarnation

    @property
    def in_service(self) -> bool:
        """True if it serves or is draining."""
        return self.stage in (Stage.SERVING, Stage.DRAINING)

    def record_stats(self, stats: ExpertServerStats) -> None:
        """Records what a server's process says of itself."""
        self.stats = sum_stats([self.past_stats, stats])

    def record_death(self, reason: str, now: float, rule: RestartRule) -> bool:
        """Records that its process ended. Returns False if it must not be restarted: it died too often, or it
        is leaving."""
        if self.stage is Stage.STARTING:
            self.start_seconds = now - self.start_time
        self.last_failure, self.child, self.is_suspected = reason, None, False
        self.stats = self.past_stats = server_counters_only(self.stats)
        self.all_deaths += 1
        is_crash = self.refusal is None or self.on_trial
        self.deaths = [*self._recent_deaths(now, rule), *([now] if is_crash else [])]
        if self.is_external or self.stage is Stage.DRAINING:
            self.stage = Stage.STOPPED
            return False
        self.stage = Stage.WAITING
        if not is_crash:
            self.restart_at = now + rule.last_delay(self.start_seconds)
            return True
        delay = rule.delay(len(self.deaths), self.start_seconds)
        self.restart_at = now + (rule.last_delay(self.start_seconds) if delay is None else delay)
        return delay is not None

    def record_service(self, now: float) -> bool:
        """Records that its process serves. Returns whether that is new."""
        if self.stage is not Stage.SERVING or self.served_incarnation == self.incarnation:
            return False
        self.served_incarnation, self.refusal = self.incarnation, None
        self.start_seconds = now - self.start_time
        return True

    def keeps_dying(self, now: float, rule: RestartRule) -> bool:
        """Whether its processes died as often of late as processes of a member may."""
        return len(self._recent_deaths(now, rule)) >= rule.max_deaths

    def _recent_deaths(self, now: float, rule: RestartRule) -> list[float]:
        window = rule.window_for(self.start_seconds)
        return [death for death in self.deaths if now - death < window]


def explain_misfit(member: Member, ready: Ready, other_workers: Iterable[WorkerInfo | None]) -> str | None:
    """Why this worker cannot serve, by what it says of itself; None if it can.

    other_workers: of workers that did not join, if they said it already.
    """
    if ready.weights != member.weights:
        return "its checkpoint has another fingerprint than this cluster's"
    known_workers = [worker for worker in other_workers if worker is not None]
    for name in ("block_size", "num_blocks", "max_num_seqs") if member.has_tcp_connection else ():
        if getattr(ready.info, name) < 1:
            return f"{name}: got {getattr(ready.info, name)}; allowed: at least 1"
    for name in ("vocab_size", "max_model_len") if member.has_tcp_connection else ():
        if (
            getattr(ready.info, name) not in (choices := {getattr(worker, name) for worker in known_workers})
            and choices
        ):
            return f"{name}: got {getattr(ready.info, name)}; allowed: {', '.join(map(str, choices))}"
    return None
