"""How far a benchmark of many unlike steps is, and when it will be done."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

Result = TypeVar("Result")
Tell = Callable[[int, int], None]
"""A callback for the progress of a step: (done so far, total)."""


class Clock:
    """Shows the progress on the error stream: two bars, and the time that is left."""

    def __init__(self, steps: Sequence[str]) -> None:
        """steps: the names of everything that will be timed, in any order."""
        self._left = list(steps)
        self._done: list[tuple[str, float]] = []
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bars = Progress(*columns, TextColumn("{task.fields[left]}"), console=self._console)
        self._all = self._bars.add_task("all", total=len(steps), left="")
        self._one = self._bars.add_task("", total=None, left="")
        self.what = ""
        """Text that is shown before the name of each step."""

    def __enter__(self) -> Clock:
        self._bars.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bars.__exit__(*error)

    def timed(self, name: str, step: Callable[[Tell], Result]) -> Result:
        """Do a step. It gets the callback for its progress."""
        self._bars.reset(self._one, description=f"{self.what}, {name}", total=None)

        def show(done: int, total: int) -> None:
            self._bars.update(self._one, completed=done, total=total)

        begun = time.perf_counter()
        found = step(show)
        self._left.remove(name)
        self._done.append((name, time.perf_counter() - begun))
        left = f"{time_left(self._done, self._left):.0f} s left"
        self._bars.update(self._all, advance=1, left=left)
        if not self._console.is_terminal:
            line = f"{self.what}, {name}: {self._done[-1][1]:.1f} s; {left}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        return found


def time_left(done: Sequence[tuple[str, float]], left: Sequence[str]) -> float:
    """Seconds for `left`, each step as long as those of its name were, or as the mean step.

    Example: a took 1 and 3 s, b 8 s; left are a, b and c -> 2 + 8 + 4.
    """
    known: dict[str, list[float]] = {}
    for name, seconds in done:
        known.setdefault(name, []).append(seconds)
    mean = statistics.fmean(seconds for _, seconds in done)
    return sum(statistics.fmean(known[name]) if name in known else mean for name in left)
