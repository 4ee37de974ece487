"""Rows of one request that the asynchronous scheduler has under way, and the runs that they are in."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.policy.scheduling.schedulers.actions import RowSource, StepPlan
from moesaic.policy.scheduling.sequence import Sequence
from moesaic.policy.scheduling.tokenpool import Units


@dataclass(eq=False)
class Unit:
    """A row of a decode, or a chunk of a prompt."""

    sequence: Sequence
    rows: int
    run: Run | None = None
    """Where its rows are; None before segment 0."""
    start: int = 0
    """The first of them there."""

    @property
    def segment(self) -> int:
        """Where it waits, or runs next."""
        return 0 if self.run is None else self.run.segment + 1


@dataclass(eq=False)
class Run:
    """Rows that were sent to experts together. As long as all of them go on together it is the same object,
    with another number at each segment, and costs the same however many they are."""

    number: int
    segment: int
    plan: StepPlan
    units: list[Unit]
    """In the order of the rows."""
    waiting: Units
    """The same, as the token pool knows them."""
    left: int = 0
    """Units that no later run took, and that were not dropped."""


def sources(units: list[Unit]) -> list[RowSource]:
    """Where their rows are, neighbours as one: fewer copies."""
    found: list[RowSource] = []
    for unit in units:
        if unit.run is None:
            continue
        stop = unit.start + unit.rows
        if found and found[-1].run == unit.run.number and found[-1].stop == unit.start:
            found[-1] = RowSource(unit.run.number, found[-1].start, stop)
        else:
            found.append(RowSource(unit.run.number, unit.start, stop))
    return found
