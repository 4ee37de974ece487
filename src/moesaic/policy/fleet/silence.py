"""When a process of another host that sends nothing is suspected, and when it is given up.

Both ends of a connection between hosts send signs of life every 0.2 s, from threads that no step delays. What
silence means depends on the cost of an error:

- Suspicion is cheap to take back, so it comes early. Clients ask other servers, and a worker gets no new
  requests.
- Giving up is final: the connection is closed, experts are loaded elsewhere, and the process joins again as a
  new one. One lost packet is repeated after 0.2 to 0.4 s, three in a row after 1.4 s.
- A process that starts may hold the interpreter for long, such as while it imports torch. Nobody waits for
  it, so it has more time.

A process of the supervisor's own host has no network between, so it is only watched for freezing.

Question: When is a process of another host suspected or given up?
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.Enum):
    HEALTHY = "trusted"
    SUSPECT = "suspected"
    DEAD = "gone"


@dataclass(frozen=True)
class SilenceRule:
    """Seconds without a sign of life from a process of another host, and what they mean."""

    suspect_seconds: float = 1.0
    dead_seconds: float = 2.0
    gone_while_starting: float = 30.0
    """The seconds of `dead_seconds` for a process that does not serve yet."""
    lost_supervisor: float = 3.0
    """Seconds after which a process gives up its supervisor and joins again. It is longer than
    `dead_seconds`, since a busy supervisor would otherwise lose all hosts at once."""

    def judge(self, silence: float, in_service: bool) -> Verdict:
        """What a silence of so many seconds means.

        >>> SilenceRule().judge(1.4, in_service=True)
        <Verdict.SUSPECT: 'suspected'>
        """
        if silence >= (self.dead_seconds if in_service else self.gone_while_starting):
            return Verdict.DEAD
        return Verdict.SUSPECT if in_service and silence >= self.suspect_seconds else Verdict.HEALTHY


RULE = SilenceRule()
"""The rule of every cluster."""
