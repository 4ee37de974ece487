"""Units, the rows that a request has in flight under the asynchronous scheduler, and the runs that they are
in.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.policy.scheduling.schedulers.actions import RowSource, StepPlan
from moesaic.policy.scheduling.sequence import Sequence
from moesaic.policy.scheduling.tokenpool import Units


@dataclass(eq=False)
class Unit:
    """The row of a next token, with those of its drafted tokens, or a chunk of a prompt."""

    sequence: Sequence
    rows: int
    run: Run | None = None
    """The run that computed its rows last. None before segment 0."""
    start: int = 0
    """Index of its first row in that run."""
    decode: bool = False
    """Whether it is not a chunk of a prompt."""

    @property
    def segment(self) -> int:
        """The segment at which the unit waits, or runs next."""
        return 0 if self.run is None else self.run.segment + 1


@dataclass(eq=False)
class Run:
    """Rows that were sent to experts together.

    While the same units run together, the object stays the same and only gets another number at each segment.
    So such a run costs the same for any number of units.
    """

    number: int
    segment: int
    plan: StepPlan
    units: list[Unit]
    """Its units, in the order of the rows."""
    waiting: Units
    """The units as the token pool stores them."""
    left: int = 0
    """Units that no later run took and that were not dropped."""


def sources(units: list[Unit]) -> list[RowSource]:
    """Where the rows of these units come from. Neighbouring rows form one source, to copy less often."""
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
