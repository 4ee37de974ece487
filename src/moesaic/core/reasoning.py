"""How long the reasoning of an answer may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningBudget:
    """A number of tokens, and the texts between which a model reasons."""

    tokens: int
    """Tokens of reasoning, without those that open it. Behind them only its end is generated."""
    opening: str
    """What opens the reasoning."""
    endings: tuple[str, ...]
    """What ends it."""
    end_ids: tuple[int, ...]
    """The tokens that end it where the budget is used up."""
    starts_inside: bool = False
    """The answer begins inside of its reasoning."""
    can_start_later: bool = False
    """Reasoning may begin at any place, and more than once. False: at the start of the answer."""
