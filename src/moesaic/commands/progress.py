"""Shows the progress of long work, with its rate and the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

LOG_SECONDS = 30.0
"""Seconds between two lines of progress if stderr is not a terminal."""

RATE_SECONDS = 0.5
"""Seconds of work without which no rate is shown."""

Show = Callable[[str, int, int], None]
"""Reports progress: (name of the work, units done, units in total)."""


class TimeLeft(ProgressColumn):
    """The time left by the rate of the whole work so far. It counts down between two units."""

    def __init__(self) -> None:
        super().__init__()
        self._estimates: dict[TaskID, tuple[float, float]] = {}
        """Task -> (units done, seconds since the start when these were done)."""

    def render(self, task: Task) -> Text:
        """The time as minutes and seconds. It is empty where it is not known, or was too short."""
        if task.finished or not task.total or not task.completed or not task.elapsed:
            return Text()
        units_done, seconds = self._estimates.get(task.id, (0.0, 0.0))
        if units_done != task.completed:
            units_done, seconds = task.completed, task.elapsed
            self._estimates[task.id] = units_done, seconds
        left = seconds * task.total / units_done - task.elapsed
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
        TimeLeft(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as bars:
        tasks: dict[str, tuple[TaskID, float]] = {}

        def show(name: str, units_done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total or None, rate=""), clock()
            task, start = tasks[name]
            rate = _rate(units_done, total, clock() - start, unit)
            bars.update(task, completed=units_done, total=total or None, rate=rate)

        yield show


def _log(console: Console, clock: Callable[[], float], unit: str | None) -> Show:
    starts: dict[str, float] = {}
    last = clock()

    def show(name: str, units_done: int, total: int) -> None:
        nonlocal last
        now = clock()
        start = starts.setdefault(name, now)
        # Without a total, or before the first unit, there is no rate and no time left.
        if total and units_done and now - last >= LOG_SECONDS:
            last = now
            left = (total - units_done) * (now - start) / units_done
            rate = f", {_rate(units_done, total, now - start, unit)}" if unit else ""
            line = f"{name}: {units_done}/{total}{rate}, {left:.0f} s left"
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    return show


def _rate(units_done: int, total: int, seconds: float, unit: str | None) -> str:
    if unit is None:
        return f"{units_done}/{total}" if total else ""
    if not units_done or seconds < RATE_SECONDS:
        return ""
    rate = units_done / seconds
    return f"{rate:.0f} {unit}" if rate >= 10 else f"{rate:.2g} {unit}"
