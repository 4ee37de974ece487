"""`moesaic profile import`: makes a profile of another server's recording and prints what is in it."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from moesaic.commands.import_options import ImportProfile
from moesaic.commands.progress import progress
from moesaic.commands.writable import require_writable
from moesaic.jobs.profiling import importing
from moesaic.jobs.profiling.importing import Report


def run(options: ImportProfile, as_json: bool) -> int:
    """Read the files, write the profile, then print a summary. Returns the exit code."""
    require_writable("--output-file", options.output_file)
    with progress(Console(stderr=True), time.monotonic, "tok/s") as show:
        report = importing.run(options.files, options.source, options.model_source, options.output_file, show)
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
    table.add_row("recorded by", f"{report.source}, {report.files} files")
    table.add_row("tokens", str(report.tokens))
    table.add_row("requests with routes", str(report.requests))
    if report.left_out:
        table.add_row("tokens left out: experts are missing", str(report.left_out))
    console.print(table)
    if not report.token_ids:
        console.print("loads of experts, without tokens: moesaic place balances them (--solver eplb)")
