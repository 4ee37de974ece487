"""Kills and freezes processes of a running cluster while they have work, and adds and removes some."""

from __future__ import annotations

import os
import signal
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from scripts.soak.plan import KILL, RESIZE, Fault
from scripts.soak.shapes import PREFILL, SERVER, WORKER, Shape
from tests.support.cluster_driver import Cluster
from tests.support.processes import children

from moesaic.cluster.member import FIRST_PREFILL
from moesaic.cluster.router import Router
from moesaic.core.cluster_status import ProcessStatus
from moesaic.core.errors import ScalingError

PATIENCE = 2.0
"""Seconds of waiting for the chosen process to have work. Then the next process is chosen, since the last of
three workers may hardly get a request.
"""
TRIES = 5
"""Times that a prefill worker is chosen and has no transfer. Then the next one with work is hit."""
SETTINGS = {SERVER: "expert_servers", WORKER: "attention_workers", PREFILL: "prefill_workers"}
"""Role -> the setting with its number of processes."""


@dataclass(frozen=True)
class Strike:
    """A fault that was carried out."""

    fault: Fault
    victim: str
    time: float
    """The time of the fault, on the clock of the tokens' times."""
    alone: bool
    """True if every other process was serving."""


class Saboteur:
    """Carries out one fault after the other. `look` gets the time and the number of tokens."""

    def __init__(self, served: Cluster, router: Router, faults: Iterable[Fault], shape: Shape) -> None:
        self.strikes: list[Strike] = []
        self.in_transfer = 0
        """Kills of prefill workers while KV was on its way."""
        self.resized = 0
        """Processes that were added or removed."""
        self.not_resized: list[str] = []
        """Why others were not: another fault hit them."""
        self._changes: list[Future[None]] = []
        self._served = served
        self._router = router
        self._sizes = sizes(shape)
        self._left = deque(faults)
        self._frozen: list[tuple[float, int]] = []
        """(time at which it goes on, process id) of each frozen process."""
        self._base = 0
        self._chosen: tuple[ProcessStatus, float] | None = None
        """The process's status when it was chosen, and the time until which it may be idle."""
        self._idle = 0
        """Number of chosen processes that had no work."""

    @property
    def done(self) -> bool:
        return not self._left and not self._frozen and not self._changes

    def look(self, tokens: int, now: float) -> None:
        """Do everything that is due."""
        for due, pid in self._frozen:
            if now >= due:
                _signal(pid, signal.SIGCONT)
        self._frozen = [(due, pid) for due, pid in self._frozen if now < due]
        self._look_at_changes()
        if not self._left or tokens < self._base + self._left[0].after:
            return
        if self._left[0].kind == RESIZE:
            self._resize(tokens, now)
        elif (victim := self._victim(self._left[0], now)) is not None:
            self._strike(victim, tokens, now)

    def stop(self) -> None:
        """Let every frozen process continue."""
        for _, pid in self._frozen:
            _signal(pid, signal.SIGCONT)
        self._frozen = []

    def _resize(self, tokens: int, now: float) -> None:
        """Add a process of the role, or remove one, if no other change is under way."""
        fault = self._left[0]
        if self._changes or (fault.healed and not self._healthy()):
            return
        self._left.popleft()
        self._base = tokens
        usual = self._sizes[fault.role]
        number = usual + (running(self._served)[fault.role] <= usual)
        self.strikes.append(Strike(fault, f"{fault.role}s: {number}", now, self._healthy()))
        self._changes.append(self._served.supervisor.scale(**{SETTINGS[fault.role]: number}))

    def _look_at_changes(self) -> None:
        for change in [one for one in self._changes if one.done()]:
            self._changes.remove(change)
            error = change.exception()
            if error is None:
                self.resized += 1
            elif isinstance(error, ScalingError):
                self.not_resized.append(str(error))
            else:
                raise error

    def _strike(self, victim: ProcessStatus, tokens: int, now: float) -> None:
        """Carry out the next fault."""
        fault, alone = self._left.popleft(), self._healthy()
        assert victim.pid is not None
        pid = _rank(victim.pid, fault.choice)
        number = signal.SIGKILL if fault.kind == KILL else signal.SIGSTOP
        self._chosen, self._base, self._idle = None, tokens, 0
        self.in_transfer += fault.role == PREFILL and bool(self._router.transfers)
        if _signal(pid, number):
            self.strikes.append(Strike(fault, victim.name, now, alone))
            if fault.kind != KILL:
                self._frozen.append((now + fault.seconds, pid))

    def _victim(self, fault: Fault, now: float) -> ProcessStatus | None:
        """The process to hit now. It serves, and it had work after it was chosen."""
        if fault.healed and not self._healthy():
            self._chosen = None
            return None
        serving = [one for one in self._served.supervisor.status() if self._fit(one, fault)]
        same = [one for one in serving if self._chosen and _same(one, self._chosen[0])]
        if not same or self._chosen is None or now > self._chosen[1]:
            self._idle += bool(same)
            self._chosen = None
            if serving:
                one = (int(fault.choice * len(serving)) + self._idle) % len(serving)
                self._chosen = serving[one], now + PATIENCE
            return None
        [victim], before = same, self._chosen[0]
        if fault.role == PREFILL and not self._router.transfers and self._idle < TRIES:
            return None
        if fault.role == SERVER:
            return victim if victim.stats.pairs > before.stats.pairs else None
        number = victim.number + (FIRST_PREFILL if victim.role == PREFILL else 0)
        return None if self._router.is_drained(number) else victim

    def _healthy(self) -> bool:
        return not self._frozen and all(one.stage == "serving" for one in self._served.supervisor.status())

    def _fit(self, one: ProcessStatus, fault: Fault) -> bool:
        frozen = [pid for _, pid in self._frozen]
        roles = (WORKER, PREFILL) if fault.role == WORKER else (fault.role,)
        return one.role in roles and one.stage == "serving" and one.pid not in frozen


def sizes(shape: Shape) -> dict[str, int]:
    """Role -> its number of processes, without one that is added later."""
    return {
        SERVER: shape.expert_servers,
        WORKER: shape.attention_workers,
        PREFILL: shape.prefill_workers,
    }


def running(served: Cluster) -> Counter[str]:
    """Role -> its number of processes now, also of those that start."""
    return Counter(one.role for one in served.supervisor.status())


def _rank(pid: int, choice: float) -> int:
    """One of the processes of the attention worker or server `pid`: itself, or another rank of its group."""
    ranks = [pid]
    with suppress(FileNotFoundError, ProcessLookupError):  # it may end at this moment
        ranks += children(pid, "moesaic.runtime.group")
    return ranks[int(1000 * choice) % len(ranks)]


def _same(one: ProcessStatus, other: ProcessStatus) -> bool:
    return (one.name, one.incarnation) == (other.name, other.incarnation)


def _signal(pid: int, number: signal.Signals) -> bool:
    """Send a signal. Returns False if the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
