"""`moesaic bench serve` and `moesaic bench throughput`: measure, and print the report."""

from __future__ import annotations

from rich.console import Console

from moesaic.commands.tracing import announce_trace
from moesaic.config import WorkerConfig
from moesaic.jobs.bench import serve
from moesaic.jobs.bench.options import ServeBench, ThroughputBench
from moesaic.jobs.bench.report import print_report


def measure_server(options: ServeBench, as_json: bool) -> int:
    """Measure a server and print the report. Returns the exit code, 1 if every request failed."""
    report = serve.run(options)
    if as_json:
        print(report.to_json(options.save_detailed))
    else:
        print_report(report, Console())
    return 0 if report.summary.num_completed else 1


def measure_engine(options: ThroughputBench, worker: WorkerConfig, as_json: bool) -> int:
    """Measure the engine in this process and print the report. Returns the exit code."""
    from moesaic.jobs.bench import throughput

    with announce_trace(worker.trace):
        report = throughput.run(options, worker)
    if as_json:
        print(report.to_json())
    else:
        throughput.print_report(report, Console())
    return 0
