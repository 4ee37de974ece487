"""What is known of the drafts of one request: how many were right."""

from __future__ import annotations

from dataclasses import dataclass

FIRST = (4.0, 5.0)
"""Accepted and checked tokens that a new request is taken to have had."""
FADE = 0.9
"""Factor of earlier counts at each check: about the last ten checks count."""
FIRST_WAIT, LAST_WAIT = 32, 1024
"""Tokens without a draft before one is tried, at first and at most."""


@dataclass
class Acceptance:
    """Faded counts of drafted tokens. A token behind a wrong one was not checked."""

    accepted: float = FIRST[0]
    checked: float = FIRST[1]
    wait: int = FIRST_WAIT
    """Tokens without a draft before one is tried."""
    waited: int = 0
    """Tokens since the last draft."""

    @property
    def rate(self) -> float:
        """The probability that a drafted token is right when those before it are."""
        return self.accepted / self.checked

    def add(self, drafted: int, accepted: int) -> None:
        """Count a check of `drafted` tokens, of which the first `accepted` were right."""
        self.accepted = FADE * self.accepted + accepted
        self.checked = FADE * self.checked + accepted + (accepted < drafted)
        self.wait = FIRST_WAIT if accepted else min(LAST_WAIT, 2 * self.wait)
        self.waited = 0
