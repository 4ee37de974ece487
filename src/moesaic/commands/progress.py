"""Shows the progress of long work, with its rate and the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LOG_SECONDS = 30.0
"""Seconds between two lines of progress if stderr is not a terminal."""

Show = Callable[[str, int, int], None]
"""Reports progress: (name of the work, units done, units in total)."""


@contextmanager
def progress(console: Console, clock: Callable[[], float], unit: str = "tok/s") -> Iterator[Show]:
    """A progress bar for each piece of work on a terminal, otherwise a line every LOG_SECONDS.

    unit: the unit of the rate.
    """
    if not console.is_terminal:
        yield _log(console, clock, unit)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as bars:
        tasks: dict[str, tuple[TaskID, float]] = {}

        def show(name: str, units_done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total or None, rate=""), clock()
            task, start = tasks[name]
            bars.update(
                task, completed=units_done, total=total or None, rate=_rate(units_done, clock() - start, unit)
            )

        yield show


def _log(console: Console, clock: Callable[[], float], unit: str) -> Show:
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
            line = f"{name}: {units_done}/{total}, {_rate(units_done, now - start, unit)}, {left:.0f} s left"
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    return show


def _rate(units_done: int, seconds: float, unit: str) -> str:
    if not units_done or seconds <= 0:
        return ""
    rate = units_done / seconds
    return f"{rate:.0f} {unit}" if rate >= 10 else f"{rate:.2g} {unit}"
