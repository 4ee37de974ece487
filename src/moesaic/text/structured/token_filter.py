"""What one request may generate next: packed masks of tokens, by the state of its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

Masks = npt.NDArray[np.int32]
"""[n, (width + 31) // 32] bits, 1 where a token is allowed. Token t is bit t % 32 of word t // 32."""


class TokenFilter(Protocol):
    """The tokens that are allowed after those which were accepted."""

    @property
    def error(self) -> str:
        """Why nothing is allowed any more, in the library's words. Empty while something is."""
        ...

    @property
    def restricts(self) -> bool:
        """Whether it may forbid a token at the next position. False: no mask is needed."""
        ...

    def masks(self, draft_token_ids: Sequence[int] = ()) -> Masks:
        """The masks of the next position and of those behind each drafted token.

        A drafted token that is not allowed ends the list. Nothing is accepted by this call.
        """
        ...

    def valid(self, draft_token_ids: Sequence[int]) -> int:
        """How many of the drafted tokens, from the first on, are allowed."""
        ...

    def accept(self, tokens: Sequence[int]) -> bool:
        """Go on behind `tokens`. False if one of them is not allowed; then nothing is any more."""
        ...

    def roll_back(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        ...


class GrammarFilter:
    """A TokenFilter by a grammar of llguidance."""

    def __init__(self, matcher: LLMatcher, width: int) -> None:
        """matcher: of the compiled grammar; this object changes it. width: number of logits."""
        self._matcher = matcher
        self._words = count_words(width)
        self._ends = 0
        """Tokens behind a whole answer, which the matcher takes but does not count."""

    @property
    def error(self) -> str:
        return str(self._matcher.get_error()).partition("\n")[0].removesuffix(" <non-verbose/>")

    @property
    def restricts(self) -> bool:
        return True

    def masks(self, draft_token_ids: Sequence[int] = ()) -> Masks:
        masks = np.zeros((1 + len(draft_token_ids), self._words), dtype=np.int32)
        num_accepted = 0
        for row in masks:
            self._fill(row)
            if num_accepted == len(draft_token_ids) or not is_token_allowed(
                row, draft_token_ids[num_accepted]
            ):
                break
            self.accept([draft_token_ids[num_accepted]])
            num_accepted += 1
        self.roll_back(num_accepted)
        return masks[: num_accepted + 1]

    def _fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write the next mask to `row` [words], which is 0. Behind a limit the library allows the end."""
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            row[:] = 0

    def valid(self, draft_token_ids: Sequence[int]) -> int:
        return len(self.masks(draft_token_ids)) - 1

    def accept(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            self._ends += self._matcher.is_stopped()
            if not self._matcher.consume_token(token):
                return False
        return True

    def roll_back(self, count: int) -> None:
        ends = min(count, self._ends)
        self._ends -= ends
        if count > ends:
            self._matcher.rollback(count - ends)


def count_words(width: int) -> int:
    """Number of words in the mask of `width` tokens."""
    return (width + 31) // 32


def is_token_allowed(mask: npt.NDArray[np.int32], token: int) -> bool:
    """Whether a mask [words] allows a token. (The library's own check refuses the end of an answer.)"""
    return bool(mask[token // 32] >> (token % 32) & 1)
