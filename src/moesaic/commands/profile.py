"""`moesaic profile`: shows what goes on, and what the file holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from moesaic.config import ModelConfig
from moesaic.profiling import run as profiling
from moesaic.profiling.options import ProfileOptions
from moesaic.profiling.run import Report, Show

LOG_SECONDS = 30.0
"""Between two lines of progress where the error stream is no terminal."""


def run(options: ProfileOptions, model: ModelConfig, as_json: bool) -> int:
    """Write the profile; returns the exit code."""
    with progress(Console(stderr=True), time.monotonic) as show:
        report = profiling.run(options, model, show)
    if as_json:
        print(report.to_json())
    else:
        _print(report, Console())
    return 0


@contextmanager
def progress(console: Console, clock: Callable[[], float]) -> Iterator[Show]:
    """A bar for each thing that is done on a terminal, else a line now and then."""
    if not console.is_terminal:
        yield _log(console, clock)
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
            bars.update(task, completed=done, total=total or None, rate=_rate(done, clock() - start))

        yield show


def _log(console: Console, clock: Callable[[], float]) -> Show:
    begun: dict[str, float] = {}
    last = clock()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        now = clock()
        start = begun.setdefault(what, now)
        if total and done and now - last >= LOG_SECONDS:
            last = now
            left = (total - done) * (now - start) / done
            line = f"{what}: {done}/{total}, {_rate(done, now - start)}, {left:.0f} s left"
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    return show


def _rate(done: int, seconds: float) -> str:
    return f"{done / seconds:.0f} tok/s" if done and seconds > 0 else ""


def _print(report: Report, console: Console) -> None:
    table = Table(title=report.output, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("model", report.model)
    table.add_row("layers, experts, top-k", f"{report.layers}, {report.num_experts}, {report.top_k}")
    table.add_row("prompts / topics", f"{report.prompts} / {report.topics}")
    table.add_row("prompt / generated tokens", f"{report.prompt_tokens} / {report.generated_tokens}")
    table.add_row("duration (s)", f"{report.seconds:.1f}")
    table.add_row("tokens/s", f"{report.tokens_per_second:.0f}")
    table.add_row("prompts with routes kept", str(report.routes_kept))
    if report.shortened:
        table.add_row("cut to the context length", str(report.shortened))
    if report.not_counted:
        table.add_row("not counted: --max-memory is full", str(report.not_counted))
    console.print(table)
