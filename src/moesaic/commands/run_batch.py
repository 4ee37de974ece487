"""`moesaic run-batch`: prints how the run ended."""

from __future__ import annotations

from rich.console import Console

from moesaic.batch import run as batch
from moesaic.batch.options import RunBatch
from moesaic.batch.show import print_summary
from moesaic.commands.tracing import announced
from moesaic.config import WorkerConfig


def run(options: RunBatch, worker: WorkerConfig, as_json: bool) -> int:
    """Do what is missing of the output; returns the exit code."""
    with announced(worker.trace):
        summary = batch.run(options, worker)
    if as_json:
        print(summary.to_json())
    else:
        print_summary(summary, Console())
    return summary.exit_code()
