"""Rows of one request that the asynchronous brain has under way."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.policy.brain.actions import Source
from moesaic.policy.sequence import Sequence


@dataclass
class Unit:
    """A row of a decode, or a chunk of a prompt."""

    sequence: Sequence
    rows: int
    place: int = 0
    """Where it waits, or runs next."""
    source: Source | None = None
    """Where its rows are; None before place 0."""
    since: float = 0.0
    """When it became ready, the last time."""


def joined(sources: list[Source]) -> list[Source]:
    """Neighbours of one run as one: fewer copies."""
    joined: list[Source] = []
    for source in sources:
        if joined and joined[-1].run == source.run and joined[-1].stop == source.start:
            joined[-1] = Source(source.run, joined[-1].start, source.stop)
        else:
            joined.append(source)
    return joined
