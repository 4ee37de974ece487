"""Progress while a batch runs, and its summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moesaic.core.metrics import PassStats
from moesaic.jobs.batch.window import Tally

_LOG_SECONDS = 30.0
"""Seconds between two lines of progress if stderr is not a terminal."""


@dataclass(frozen=True)
class Summary:
    """The result of a run. total = done_before + completed + failed + unfinished."""

    output: str
    total: int
    """Number of input lines."""
    done_before: int
    """Results of earlier runs, errors included."""
    failed_before: int
    """Number of those that are errors."""
    completed: int
    failed: int
    """Lines that this run answered with an error."""
    unfinished: int
    """Lines without a result. The same command continues with them."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    """Seconds from the first request to the last answer."""
    interrupted_by: int | None = None
    """The signal that stopped the run."""
    passes: tuple[PassStats, ...] = ()
    """Statistics of the passes, if the model is larger than its memory."""

    @property
    def output_throughput(self) -> float:
        """Generated tokens per second."""
        return self.completion_tokens / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name != "passes"}
        return fields | {"output_throughput": self.output_throughput}

    def to_json(self) -> str:
        return json.dumps(self.as_json())

    def exit_code(self) -> int:
        """0 when every line has an answer, 1 when a line failed, 128 + signal when the run was stopped."""
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        return 1 if self.failed or self.failed_before else 0


def print_summary(summary: Summary, console: Console) -> None:
    """Print one line, and what to do about missing results."""
    before_text = f", {summary.done_before} were done before" if summary.done_before else ""
    console.print(
        f"{summary.output}: {summary.completed} completed, {summary.failed} failed{before_text}; "
        f"{summary.completion_tokens} tokens in {summary.seconds:.1f} s, "
        f"{summary.output_throughput:.1f} tokens/s",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    if summary.unfinished:
        console.print(
            f"{summary.unfinished} of {summary.total} lines are unfinished: "
            f"run the same command again to continue",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )


@contextmanager
def progress(
    console: Console, path: Path, total: int, num_answered: int, clock: Callable[[], float]
) -> Iterator[Callable[[Tally], None]]:
    """A bar on a terminal; otherwise a line every `_LOG_SECONDS`. Yields the function to call after each
    result."""
    if not console.is_terminal:
        yield _log(console, path, total, num_answered, clock)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f} tok/s  {task.fields[failed]} failed"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task(path.name, total=total, completed=num_answered, rate=0.0, failed=0)
        start = clock()

        def show(tally: Tally) -> None:
            rate = _rate(tally, clock() - start)
            num_finished = num_answered + tally.num_completed + tally.num_failed
            bar.update(task, completed=num_finished, rate=rate, failed=tally.num_failed)

        yield show


def _log(
    console: Console, path: Path, total: int, num_answered: int, clock: Callable[[], float]
) -> Callable[[Tally], None]:
    start = last = clock()

    def show(tally: Tally) -> None:
        nonlocal last
        now = clock()
        if now - last < _LOG_SECONDS:
            return
        last = now
        num_new = tally.num_completed + tally.num_failed
        left = (total - num_answered - num_new) * (now - start) / num_new
        console.print(
            f"{path.name}: {num_answered + num_new}/{total}, {tally.num_failed} failed, "
            f"{_rate(tally, now - start):.1f} tok/s, {left:.0f} s left",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )

    return show


def _rate(tally: Tally, seconds: float) -> float:
    return tally.completion_tokens / seconds if seconds > 0 else 0.0
