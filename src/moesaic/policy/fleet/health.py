"""Whether a cluster serves: what GET /health says, which requests wait, and when the server gives up.

An outage begins when some part of a request can be computed by no process: no attention worker generates, or
no server that serves holds some expert. Requests wait for a replacement at first, since most outages last
seconds. What follows depends on the age of the outage and on whether a replacement makes progress:

- A young outage with a replacement that starts is `RECOVERING`. /health says 200, and every request waits.
- Any other outage is `UNAVAILABLE`. /health says 503 with the reason, and so do requests without a token.
- An outage that is LONGEST_OUTAGE times as old as an outage may be, or whose processes all keep dying,
  is `END`: the server ends with the reason. Where processes of other hosts may join, it waits for them.

Question: When does /health answer 503, and when does the server give up?
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

SHORTEST_TIMEOUT = 60.0
"""Least seconds of an outage during which requests wait, unless --unavailable-timeout says otherwise."""
STARTS = 2.0
"""Starts of a process that such an outage may last."""
LONGEST_OUTAGE = 5.0
"""Timeouts after which a server ends that serves nothing."""


class State(enum.Enum):
    SERVING = "serving"
    RECOVERING = "recovering"
    UNAVAILABLE = "unavailable"
    END = "end"


@dataclass(frozen=True)
class Outlook:
    """What a cluster computes at some moment, and what can be expected of its processes."""

    gaps: tuple[str, ...] = ()
    """What no process computes, in words for people. Empty: requests are computed."""
    is_starting: bool = False
    """Whether a replacement is loading or will be started by itself."""
    may_join: bool = False
    """Whether processes of other hosts may join."""
    keeps_dying: bool = False
    """Whether every process that could fill some gap died as often as a process may."""
    cause: str = ""
    """Why the processes that are missing ended, or cannot start. Empty: that is not known."""


@dataclass(frozen=True)
class Health:
    """What follows for users."""

    state: State = State.SERVING
    reason: str = ""
    """Why requests are not computed. Empty while they are."""
    outage_seconds: float = 0.0
    timeout: float = SHORTEST_TIMEOUT
    """Seconds of an outage during which requests wait."""
    ends_begun_answers: bool = False
    """Whether answers that have begun end with an error too. They wait while a replacement starts."""

    @property
    def is_available(self) -> bool:
        """Whether new requests are accepted."""
        return self.state in (State.SERVING, State.RECOVERING)


class HealthPolicy:
    """Judges one cluster. `judge` is called with times that never decrease."""

    def __init__(self, timeout: float | None = None) -> None:
        """timeout: the value of --unavailable-timeout. None: it follows from the time of a start."""
        self._timeout = timeout
        self._start_seconds: dict[str, float] = {}
        self._outage_began_at: float | None = None

    def record_start(self, role: str, seconds: float) -> None:
        """Records how long the last process of a role took from its start until it served."""
        self._start_seconds[role] = seconds

    @property
    def timeout(self) -> float:
        """Seconds of an outage during which requests wait.

        >>> policy = HealthPolicy()
        >>> policy.record_start("expert server", 45.0)
        >>> policy.timeout
        90.0
        """
        if self._timeout is not None:
            return self._timeout
        return max(SHORTEST_TIMEOUT, STARTS * max(self._start_seconds.values(), default=0.0))

    def judge(self, outlook: Outlook, now: float) -> Health:
        """The health of a cluster with this outlook."""
        if not outlook.gaps:
            self._outage_began_at = None
            return Health(timeout=self.timeout)
        if self._outage_began_at is None:
            self._outage_began_at = now
        age = now - self._outage_began_at
        is_old = age >= self.timeout
        state = State.UNAVAILABLE
        if not outlook.may_join and (outlook.keeps_dying or age >= LONGEST_OUTAGE * self.timeout):
            state = State.END
        elif not is_old and (outlook.is_starting or outlook.may_join):
            state = State.RECOVERING
        reason = " and ".join(outlook.gaps)
        if state is State.END:
            reason += ", and its processes keep dying" if outlook.keeps_dying else f" for {age:.0f} s"
        reason += f": {outlook.cause}" if outlook.cause else ""
        return Health(state, reason, age, self.timeout, is_old and not outlook.is_starting)
