"""How far long work is, with its rate and the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LOG_SECONDS = 30.0
"""Between two lines of progress where the error stream is no terminal."""

Show = Callable[[str, int, int], None]
"""What is being done, done so far, in all."""


@contextmanager
def progress(console: Console, clock: Callable[[], float], unit: str = "tok/s") -> Iterator[Show]:
    """A bar for each thing that is done on a terminal, else a line now and then. unit: of the rate."""
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
        begun: dict[str, tuple[TaskID, float]] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in begun:
                begun[what] = bars.add_task(what, total=total or None, rate=""), clock()
            task, start = begun[what]
            bars.update(task, completed=done, total=total or None, rate=_rate(done, clock() - start, unit))

        yield show


def _log(console: Console, clock: Callable[[], float], unit: str) -> Show:
    begun: dict[str, float] = {}
    last = clock()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        now = clock()
        start = begun.setdefault(what, now)
        if total and done and now - last >= LOG_SECONDS:
            last = now
            left = (total - done) * (now - start) / done
            line = f"{what}: {done}/{total}, {_rate(done, now - start, unit)}, {left:.0f} s left"
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    return show


def _rate(done: int, seconds: float, unit: str) -> str:
    if not done or seconds <= 0:
        return ""
    rate = done / seconds
    return f"{rate:.0f} {unit}" if rate >= 10 else f"{rate:.2g} {unit}"
