"""What a parser finds in an answer."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Reasoning:
    """The next piece of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class Content:
    """The next piece of what the model says."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call has begun. Its arguments follow."""

    index: int
    """Number of the call in the answer, from 0."""
    name: str
    id: str | None = None
    """The id that the model wrote. None if its syntax has none."""


@dataclass(frozen=True)
class Arguments:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete. A call that the end of the answer cuts off has no such event."""

    index: int


Event = Reasoning | Content | CallStart | Arguments | CallEnd
Steps = Generator[Event | None, None, T]
"""A parser at work: it yields events, and None where it needs more text."""


class MalformedText(Exception):
    """The text does not have the expected syntax."""
