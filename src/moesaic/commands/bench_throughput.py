"""`moesaic bench throughput`: measures the engine in this process and prints the report."""

from __future__ import annotations

from rich.console import Console

from moesaic.commands.tracing import announce_trace
from moesaic.config import WorkerConfig
from moesaic.jobs.bench import throughput
from moesaic.jobs.bench.options import ThroughputBench


def run(options: ThroughputBench, worker: WorkerConfig, as_json: bool) -> int:
    """Measure the engine in this process and print the report. Returns the exit code."""
    with announce_trace(worker.trace):
        report = throughput.run(options, worker)
    if as_json:
        print(report.to_json())
    else:
        throughput.print_report(report, Console())
    return 0
