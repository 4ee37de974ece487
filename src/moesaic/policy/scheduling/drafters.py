"""Who proposes the next tokens of a request, which a step then checks.

Question: Who drafts tokens (`--speculative-config`)?
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from moesaic.core.tokens import IntArray


class Drafter(Protocol):
    """Proposes tokens. It is pure: equal tokens give equal proposals."""

    def propose(self, tokens: IntArray, max_tokens: int) -> list[int]:
        """Up to `max_tokens` tokens that may follow `tokens` [t], the prompt and the answer so far."""
        ...


class NgramDrafter:
    """Proposes what followed the last tokens where they stood before (prompt lookup).

    Of the last `longest` tokens it takes as many as stood anywhere before, but at least `shortest`. Of
    several places it takes the last one. A proposal that reaches the end of the tokens goes on with its own
    tokens, so a repeated phrase is repeated further.

    >>> NgramDrafter(1, 3).propose(np.array([5, 6, 7, 8, 5, 6]), 3)
    [7, 8, 5]
    >>> NgramDrafter(1, 3).propose(np.array([1, 2, 2]), 3)
    [2, 2, 2]
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def propose(self, tokens: IntArray, max_tokens: int) -> list[int]:
        """Up to `max_tokens` tokens that followed the last tokens at an earlier place."""
        place = self._find(tokens)
        if place is None:
            return []
        continuation: list[int] = tokens[place : place + max_tokens].tolist()
        period = len(tokens) - place
        while len(continuation) < max_tokens:
            continuation.append(continuation[len(continuation) - period])
        return continuation

    def _find(self, tokens: IntArray) -> int | None:
        """The position behind the last earlier place of the longest run of last tokens. None: too short."""
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where runs of `length` equal tokens end
        length, place = 1, None
        while len(ends):
            if length >= self._shortest:
                place = int(ends[-1]) + 1
            if length == self._longest:
                break
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[len(tokens) - 1 - length]] if len(ends) else ends
            length += 1
        return place


class NoDrafter:
    """A Drafter that proposes nothing."""

    def propose(self, tokens: IntArray, max_tokens: int) -> list[int]:
        """No tokens."""
        return []
