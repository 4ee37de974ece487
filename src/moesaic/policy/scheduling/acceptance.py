"""How many drafted tokens were right: of one request, and of all requests of a worker."""

from __future__ import annotations

from dataclasses import dataclass

FIRST = (4.0, 5.0)
"""Accepted and checked tokens that a worker is taken to have had before its first request."""
WEIGHT = 4.0
"""Checked tokens that a new request is taken to have had, as many of them right as in the requests before."""
FADE, SLOW_FADE = 0.9, 0.95
"""Factors of earlier counts at each check, of one request and of all: about the last 10 and 20 count."""
SOON, FIRST_WAIT, LAST_WAIT = 2, 24, 1024
"""Tokens without a draft before one is tried: behind a right one, behind the first wrong one, and at most."""


@dataclass
class Acceptance:
    """Faded counts of drafted tokens. A token behind a wrong one was not checked."""

    num_accepted: float = FIRST[0]
    num_checked: float = FIRST[1]
    fade: float = FADE
    wait: int = SOON
    """Tokens without a draft before one is tried."""
    tokens_since_draft: int = 0
    """Tokens since the last draft."""

    @property
    def rate(self) -> float:
        """The probability that a drafted token is right when those before it are."""
        return self.num_accepted / self.num_checked

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count a check of `num_draft_tokens` tokens, of which the first `num_accepted` were right."""
        self.num_accepted = self.fade * self.num_accepted + num_accepted
        self.num_checked = self.fade * self.num_checked + num_accepted + (num_accepted < num_draft_tokens)
        self.wait = SOON if num_accepted else max(FIRST_WAIT, min(LAST_WAIT, 2 * self.wait))
        self.tokens_since_draft = 0

    def of_new_request(self) -> Acceptance:
        """What a request begins with, behind the requests that were counted here."""
        return Acceptance(WEIGHT * self.rate, WEIGHT)
