"""`moesaic profile`: records a profile, with progress, and prints a summary of it."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from moesaic.commands.progress import progress
from moesaic.config import ModelConfig
from moesaic.jobs.profiling import run as profiling
from moesaic.jobs.profiling.options import ProfileOptions
from moesaic.jobs.profiling.run import Report


def run(options: ProfileOptions, model: ModelConfig, as_json: bool) -> int:
    """Record and write the profile, then print a summary. Returns the exit code."""
    with progress(Console(stderr=True), time.monotonic, "tok/s") as show:
        report = profiling.run(options, model, show)
    if as_json:
        print(report.to_json())
    else:
        _print(report, Console())
    return 0


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
        table.add_row("prompts not counted: --max-memory is full", str(report.not_counted))
    console.print(table)
