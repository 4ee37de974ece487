"""The budget of a request's reasoning: once it is used up, only the end of the reasoning is allowed.

Question: Who ends an answer's reasoning at its budget?
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moesaic.core.reasoning import ReasoningBudget
from moesaic.text.structured.token_filter import Masks, TokenFilter, count_words, is_token_allowed


class _Phase(enum.Enum):
    BEFORE_REASONING = enum.auto()
    """Reasoning may still begin."""
    REASONING = enum.auto()
    AFTER_REASONING = enum.auto()
    """No reasoning follows."""


class _State(NamedTuple):
    phase: _Phase
    num_used: int = 0
    """Tokens of reasoning so far."""
    text: bytes = b""
    """The last bytes, in which an opening or an ending may have begun."""
    last: tuple[int, ...] = ()
    """The last tokens, fewer than those of the end."""


_FINISHED_STATE = _State(_Phase.AFTER_REASONING)


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
        self._full_mask = np.zeros(count_words(width), dtype=np.int32)
        self._full_mask.view(np.uint8)[: (width + 7) // 8] = np.packbits(
            np.ones(width, np.uint8), bitorder="little"
        )
        self._states = [_State(_Phase.REASONING if budget.starts_inside else _Phase.BEFORE_REASONING)]
        """Behind each number of accepted tokens."""

    @property
    def error(self) -> str:
        return "" if self._inner is None else self._inner.error

    @property
    def restricts(self) -> bool:
        return self._find_forced_token(self._states[-1]) is not None or (
            self._inner is not None and self._inner.restricts
        )

    def masks(self, draft_token_ids: Sequence[int] = ()) -> Masks:
        if self._inner is None:
            masks = np.tile(self._full_mask, (1 + len(draft_token_ids), 1))
        else:
            masks = self._inner.masks(draft_token_ids)
        state = self._states[-1]
        for num_drafted, row in enumerate(masks):
            forced_token = self._find_forced_token(state)
            if forced_token is not None and is_token_allowed(row, forced_token):
                row[:] = 0
                row.view(np.uint32)[forced_token // 32] = 1 << (forced_token % 32)
            if num_drafted == len(draft_token_ids) or not is_token_allowed(row, draft_token_ids[num_drafted]):
                return masks[: num_drafted + 1]
            state = self._advance(state, draft_token_ids[num_drafted])
        return masks

    def valid(self, draft_token_ids: Sequence[int]) -> int:
        return len(self.masks(draft_token_ids)) - 1

    def accept(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            forced_token = self._find_forced_token(self._states[-1])
            good = forced_token in (None, token) if self._inner is None else self._inner.accept([token])
            if not good:
                return False
            self._states.append(self._advance(self._states[-1], token))
        return True

    def roll_back(self, count: int) -> None:
        if count:
            del self._states[-count:]
            if self._inner is not None:
                self._inner.roll_back(count)

    def _find_forced_token(self, state: _State) -> int | None:
        """The only token that may follow. None: the budget allows all."""
        if state.phase is not _Phase.REASONING or state.num_used < self._budget.tokens:
            return None
        return self._budget.end_ids[self._count_end_tokens(state.last)]

    def _count_end_tokens(self, last: tuple[int, ...]) -> int:
        """How many tokens of the end are the last ones of the answer."""
        end = self._budget.end_ids
        return next(
            size for size in range(min(len(last), len(end)), -1, -1) if last[len(last) - size :] == end[:size]
        )

    def _advance(self, state: _State, token: int) -> _State:
        """The state behind one more token."""
        text = state.text + (self._tokens[token] if token < len(self._tokens) else b"")
        match state.phase:
            case _Phase.BEFORE_REASONING:
                return self._scan_for_opening(text, state.num_used)
            case _Phase.REASONING:
                last = (*state.last, token)[-len(self._budget.end_ids) :]
                if self._count_end_tokens(last) == len(self._budget.end_ids):  # whatever their bytes are
                    return self._end_reasoning(b"", state.num_used)
                return self._scan_for_ending(text, state.num_used + 1, last)
        return state

    def _scan_for_opening(self, text: bytes, num_used: int) -> _State:
        if self._budget.can_start_later:
            place = text.find(self._opening)
            if place >= 0:
                return self._scan_for_ending(text[place + len(self._opening) :], num_used)
            return _State(_Phase.BEFORE_REASONING, num_used, text[-len(self._opening) + 1 :])
        stripped_text = text.lstrip()
        if stripped_text.startswith(self._opening):
            return self._scan_for_ending(stripped_text[len(self._opening) :], num_used)
        return (
            _State(_Phase.BEFORE_REASONING, num_used, stripped_text)
            if self._opening.startswith(stripped_text)
            else _FINISHED_STATE
        )

    def _scan_for_ending(self, text: bytes, num_used: int, last: tuple[int, ...] = ()) -> _State:
        places = [(place, ending) for ending in self._endings if (place := text.find(ending)) >= 0]
        if places:
            place, ending = min(places)
            return self._end_reasoning(text[place + len(ending) :], num_used)
        return _State(
            _Phase.REASONING, num_used, text[-self._longest + 1 :] if self._longest > 1 else b"", last
        )

    def _end_reasoning(self, text: bytes, num_used: int) -> _State:
        return self._scan_for_opening(text, num_used) if self._budget.can_start_later else _FINISHED_STATE
