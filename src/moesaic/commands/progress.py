"""Shows the progress of long work, with its rate and the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

LOG_SECONDS = 30.0
"""Seconds between two lines of progress if stderr is not a terminal."""

RATE_SECONDS = 0.5
"""Seconds of work without which no rate is shown."""

Show = Callable[[str, int, int], None]
"""Reports progress: (name of the work, units done, units in total)."""


@dataclass(frozen=True)
class WorkState:
    """How far work had come at a time."""

    units: float
    seconds: float

    def seconds_per_unit(self, end: WorkState) -> float | None:
        """The mean between two states. None if nothing was done, or too shortly for a mean."""
        units, seconds = end.units - self.units, end.seconds - self.seconds
        return seconds / units if units > 0 and seconds >= RATE_SECONDS else None


class RemainingTime(ProgressColumn):
    """The time left by the rate of the whole work so far. It counts down between two units."""

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[TaskID, tuple[WorkState, WorkState]] = {}
        """Task -> its first state, and the one after its last unit."""

    def render(self, task: Task) -> Text:
        """The time as minutes and seconds. It is empty where it is not known, or was too short."""
        now = WorkState(task.completed, task.elapsed or 0.0)
        first, last = self._states.get(task.id, (now, now))
        last = now if now.units != last.units else last
        self._states[task.id] = first, last
        pace = first.seconds_per_unit(last)
        if task.finished or not task.total or pace is None:
            return Text()
        left = pace * (task.total - last.units) - (now.seconds - last.seconds)
        return Text(f"{left // 60:02.0f}:{left % 60:02.0f}" if left > 0 else "")


@contextmanager
def progress(console: Console, clock: Callable[[], float], unit: str | None = "tok/s") -> Iterator[Show]:
    """A progress bar for each piece of work on a terminal, otherwise a line every LOG_SECONDS.

    unit: the unit of the rate. None: the units that are done are shown, for units of unequal work.
    """
    if not console.is_terminal:
        yield _log(console, clock, unit)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        RemainingTime(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as bars:
        tasks: dict[str, tuple[TaskID, WorkState]] = {}

        def show(name: str, units_done: int, total: int) -> None:
            now = WorkState(units_done, clock())
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total or None, rate=""), now
            task, first = tasks[name]
            rate = _rate(first, now, unit) if unit else f"{units_done}/{total}" if total else ""
            bars.update(task, completed=units_done, total=total or None, rate=rate)

        yield show


def _log(console: Console, clock: Callable[[], float], unit: str | None) -> Show:
    firsts: dict[str, WorkState] = {}
    last = clock()

    def show(name: str, units_done: int, total: int) -> None:
        nonlocal last
        now = WorkState(units_done, clock())
        first = firsts.setdefault(name, now)
        pace = first.seconds_per_unit(now)
        # Without a total, or before a unit was measured, there is no rate and no time left.
        if total and pace is not None and now.seconds - last >= LOG_SECONDS:
            last = now.seconds
            rate = f", {_rate(first, now, unit)}" if unit else ""
            line = f"{name}: {units_done}/{total}{rate}, {(total - units_done) * pace:.0f} s left"
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    return show


def _rate(first: WorkState, now: WorkState, unit: str) -> str:
    pace = first.seconds_per_unit(now)
    if pace is None:
        return ""
    return f"{1 / pace:.0f} {unit}" if 1 / pace >= 10 else f"{1 / pace:.2g} {unit}"
