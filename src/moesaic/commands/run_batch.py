"""`moesaic run-batch`: answers a batch file and prints a summary."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console

from moesaic import logs
from moesaic.batch import lengths
from moesaic.batch import run as batch
from moesaic.batch.options import RunBatch
from moesaic.batch.output import answered
from moesaic.batch.show import Summary, print_summary
from moesaic.commands import descriptors, hardware, offload_report
from moesaic.commands.plan import find_hardware
from moesaic.commands.tracing import announced
from moesaic.config import OffloadConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.models import files
from moesaic.planning import Planned, longest_request, plan
from moesaic.runtime.model_loading import gpus_of
from moesaic.runtime.offloaded import paged_layout
from moesaic.tokenizer import Tokenizer


def run(options: RunBatch, worker: WorkerConfig, offload: OffloadConfig, as_json: bool) -> int:
    """Answer the lines that have no result yet, and print a summary. Returns the exit code."""
    logs.set_up("run-batch", worker.log_level)
    descriptors.prepare(worker.parallel.tensor_parallel_size)
    planned = None
    if offload.fast_memory is not None:
        planned = _planned(options, worker, offload)
        worker = worker if planned is None else planned.worker
    with announced(worker.trace):
        summary = batch.run(options, worker)
    if as_json:
        print(json.dumps(summary.as_json() | _phases(planned, summary)))
    else:
        print_summary(summary, Console())
        if planned is not None and summary.passes:
            found, ranks = (
                offload_report.phases(planned, summary.passes),
                worker.parallel.tensor_parallel_size,
            )
            print(offload_report.result_text(found, summary.seconds, ranks))
    return summary.exit_code()


def _planned(options: RunBatch, worker: WorkerConfig, offload: OffloadConfig) -> Planned | None:
    """Plan the lines without results on this machine, and print the plan on stderr. None if there are none.

    Raises ConfigError for drafted tokens and for experts that cannot be streamed, before it measures or plans
    anything.
    """
    drafting = worker.scheduler.speculative_config
    if drafting is not None:
        raise ConfigError.field("--speculative-config", drafting, "nothing with --fast-memory")
    path = files.resolve(worker.model.model, worker.model.revision)
    allow, done = options.allow_special_tokens_in_content, answered(options.output_file)
    tokenizer = Tokenizer(path, options.chat_template, special_tokens_in_content=allow)
    job = lengths.survey(options.input_file, tokenizer, longest_request(worker), done, offload.pad)
    if job is None:
        return None
    paged_layout(worker.model)
    given = offload.hardware
    gpus = gpus_of(worker.model)
    machine = hardware.now(str(path), "cuda" if gpus else "cpu") if given is None else find_hardware(given)
    console = Console(stderr=True)
    with console.status("pricing policies"):
        planned = plan(worker, offload, job, machine, gpus)
    console.print(offload_report.plan_text(planned, job), soft_wrap=True, highlight=False, markup=False)
    return planned


def _phases(planned: Planned | None, summary: Summary) -> dict[str, object]:
    if planned is None:
        return {}
    found = offload_report.phases(planned, summary.passes)
    policy = asdict(planned.price.policy) | {"batch": planned.price.policy.batch}
    return {"policy": policy, "phases": {one.name: one.as_json() for one in found}}
