"""The budget of a request's reasoning: once it is used up, only the end of the reasoning is allowed.

Question: Who ends an answer's reasoning at its budget?
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moesaic.core.reasoning import ReasoningBudget
from moesaic.text.structured.token_filter import Masks, TokenFilter, has, words_of


class _Phase(enum.Enum):
    OUTSIDE = enum.auto()
    """Reasoning may still begin."""
    INSIDE = enum.auto()
    BEHIND = enum.auto()
    """No reasoning follows."""


class _State(NamedTuple):
    phase: _Phase
    used: int = 0
    """Tokens of reasoning so far."""
    text: bytes = b""
    """The last bytes, in which an opening or an ending may have begun."""
    last: tuple[int, ...] = ()
    """The last tokens, fewer than those of the end."""


_BEHIND = _State(_Phase.BEHIND)


class BudgetFilter:
    """A TokenFilter that ends the reasoning of an answer. It follows from the tokens of the answer alone."""

    def __init__(
        self, budget: ReasoningBudget, tokens: Sequence[bytes], width: int, inner: TokenFilter | None = None
    ) -> None:
        """tokens: the bytes of each token, by id. width: number of logits. inner: of the request's grammar.

        Where the grammar does not allow the end yet, as within a character, its own mask holds.
        """
        self._budget = budget
        self._tokens = tokens
        self._inner = inner
        self._opening = budget.opening.encode()
        self._endings = tuple(text.encode() for text in budget.endings)
        self._longest = max(map(len, self._endings))
        self._every = np.zeros(words_of(width), dtype=np.int32)
        self._every.view(np.uint8)[: (width + 7) // 8] = np.packbits(
            np.ones(width, np.uint8), bitorder="little"
        )
        self._states = [_State(_Phase.INSIDE if budget.starts_inside else _Phase.OUTSIDE)]
        """Behind each number of accepted tokens."""

    @property
    def error(self) -> str:
        return "" if self._inner is None else self._inner.error

    @property
    def restricts(self) -> bool:
        return self._forced(self._states[-1]) is not None or (
            self._inner is not None and self._inner.restricts
        )

    def masks(self, drafted: Sequence[int] = ()) -> Masks:
        if self._inner is None:
            found = np.tile(self._every, (1 + len(drafted), 1))
        else:
            found = self._inner.masks(drafted)
        state = self._states[-1]
        for behind, row in enumerate(found):
            forced = self._forced(state)
            if forced is not None and has(row, forced):
                row[:] = 0
                row.view(np.uint32)[forced // 32] = 1 << (forced % 32)
            if behind == len(drafted) or not has(row, drafted[behind]):
                return found[: behind + 1]
            state = self._after(state, drafted[behind])
        return found

    def valid(self, drafted: Sequence[int]) -> int:
        return len(self.masks(drafted)) - 1

    def accept(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            forced = self._forced(self._states[-1])
            good = forced in (None, token) if self._inner is None else self._inner.accept([token])
            if not good:
                return False
            self._states.append(self._after(self._states[-1], token))
        return True

    def roll_back(self, count: int) -> None:
        if count:
            del self._states[-count:]
            if self._inner is not None:
                self._inner.roll_back(count)

    def _forced(self, state: _State) -> int | None:
        """The only token that may follow. None: the budget allows all."""
        if state.phase is not _Phase.INSIDE or state.used < self._budget.tokens:
            return None
        return self._budget.end_ids[self._begun(state.last)]

    def _begun(self, last: tuple[int, ...]) -> int:
        """How many tokens of the end are the last ones of the answer."""
        end = self._budget.end_ids
        return next(
            size for size in range(min(len(last), len(end)), -1, -1) if last[len(last) - size :] == end[:size]
        )

    def _after(self, state: _State, token: int) -> _State:
        """The state behind one more token."""
        text = state.text + (self._tokens[token] if token < len(self._tokens) else b"")
        match state.phase:
            case _Phase.OUTSIDE:
                return self._outside(text, state.used)
            case _Phase.INSIDE:
                last = (*state.last, token)[-len(self._budget.end_ids) :]
                if self._begun(last) == len(self._budget.end_ids):  # whatever their bytes are
                    return self._ended(b"", state.used)
                return self._inside(text, state.used + 1, last)
        return state

    def _outside(self, text: bytes, used: int) -> _State:
        if self._budget.can_start_later:
            place = text.find(self._opening)
            if place >= 0:
                return self._inside(text[place + len(self._opening) :], used)
            return _State(_Phase.OUTSIDE, used, text[-len(self._opening) + 1 :])
        begun = text.lstrip()
        if begun.startswith(self._opening):
            return self._inside(begun[len(self._opening) :], used)
        return _State(_Phase.OUTSIDE, used, begun) if self._opening.startswith(begun) else _BEHIND

    def _inside(self, text: bytes, used: int, last: tuple[int, ...] = ()) -> _State:
        places = [(place, ending) for ending in self._endings if (place := text.find(ending)) >= 0]
        if places:
            place, ending = min(places)
            return self._ended(text[place + len(ending) :], used)
        return _State(_Phase.INSIDE, used, text[-self._longest + 1 :] if self._longest > 1 else b"", last)

    def _ended(self, rest: bytes, used: int) -> _State:
        return self._outside(rest, used) if self._budget.can_start_later else _BEHIND
