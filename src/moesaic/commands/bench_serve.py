"""`moesaic bench serve`: measures a server and prints the report."""

from __future__ import annotations

from rich.console import Console

from moesaic.jobs.bench import serve as bench_serve
from moesaic.jobs.bench.options import ServeBench
from moesaic.jobs.bench.report import print_report


def run(options: ServeBench, as_json: bool) -> int:
    """Measure a server and print the report. Returns the exit code, 1 if every request failed."""
    report = bench_serve.run(options)
    if as_json:
        print(report.to_json(options.save_detailed))
    else:
        print_report(report, Console())
    return 0 if report.summary.num_completed else 1
