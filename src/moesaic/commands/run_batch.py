"""`moesaic run-batch`: answers a batch file and prints a summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from moesaic.commands import descriptors, larger_than_memory, offload_report
from moesaic.commands.starting import without_plan
from moesaic.commands.tracing import announced, announced_routing
from moesaic.config import ClusterConfig, LogLevel, OffloadConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.jobs.batch import lengths
from moesaic.jobs.batch import run as batch
from moesaic.jobs.batch.options import RunBatch
from moesaic.jobs.batch.output import answered
from moesaic.jobs.batch.show import Summary, print_summary
from moesaic.models import files
from moesaic.planning import WorkerPlan, longest_request, plan
from moesaic.runtime.offloaded import paged_layout
from moesaic.text.tokenizer import Tokenizer
from moesaic.trace import logs
from moesaic.trace.options import RecordConfig

HERE = ("input_file", "output_file", "max_in_flight", "base_url", "api_key")
"""Options of a batch that another server answers. The others are settings of a server."""


def run(
    options: RunBatch,
    worker: WorkerConfig,
    cluster: ClusterConfig,
    offload: OffloadConfig,
    record: RecordConfig,
    as_json: bool,
) -> int:
    """Answer the lines that have no result yet, and print a summary. Returns the exit code."""
    logs.set_up("run-batch", worker.log_level)
    planned = None
    with announced(worker.trace), announced_routing(record):
        if offload.fast_memory is None or cluster.resolve().expert_servers:
            worker, processes = without_plan(worker, cluster, offload)
            summary = batch.run(options, worker, processes, record)
        else:
            larger_than_memory.check_levels(cluster.resolve(), record)
            descriptors.prepare(worker.parallel.tensor_parallel_size)
            planned = _planned(options, worker, offload)
            summary = batch.run(options, worker if planned is None else planned.worker)
    return _finish(summary, worker, planned, as_json)


def run_remote(options: RunBatch, settings: Sequence[object], log_level: LogLevel, as_json: bool) -> int:
    """`run`, but the server at --base-url answers. Returns the exit code.

    settings: configs of a server that this command would start, or None. Raises ConfigError if one of them
    was given: the other server has its own.
    """
    logs.set_up("run-batch", log_level)
    for config in (options, *settings):
        for name, value in {} if config is None else vars(config).items():
            if (config is not options or name not in HERE) and value != getattr(type(config), name, None):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag}: not allowed with --base-url, whose server has its own settings")
    assert options.base_url is not None
    return _finish(batch.run_remote(options, options.base_url, options.api_key), None, None, as_json)


def _finish(summary: Summary, worker: WorkerConfig | None, planned: WorkerPlan | None, as_json: bool) -> int:
    """Print the summary. Returns the exit code."""
    if as_json:
        print(json.dumps(summary.as_json() | _phases(planned, summary)))
    else:
        print_summary(summary, Console())
        if planned is not None and worker is not None and summary.passes:
            found, ranks = (
                offload_report.phases(planned, summary.passes),
                worker.parallel.tensor_parallel_size,
            )
            print(offload_report.result_text(found, summary.seconds, ranks))
    return summary.exit_code()


def _planned(options: RunBatch, worker: WorkerConfig, offload: OffloadConfig) -> WorkerPlan | None:
    """Plan the lines without results on this machine, and print the plan on stderr. None if there are none.

    Raises ConfigError for drafted tokens and for experts that cannot be streamed, before it measures or plans
    anything.
    """
    larger_than_memory.check_drafts(worker)
    path = files.resolve(worker.model.model, worker.model.revision)
    allow, done = options.allow_special_tokens_in_content, answered(options.output_file)
    tokenizer = Tokenizer(path, options.chat_template, special_tokens_in_content=allow)
    job = lengths.survey(options.input_file, tokenizer, longest_request(worker), done, offload.pad)
    if job is None:
        return None
    paged_layout(worker.model)
    machine, gpus = larger_than_memory.machine_of(worker, offload)
    console = Console(stderr=True)
    with console.status("pricing policies"):
        planned = plan(worker, offload, job, machine, gpus)
    console.print(offload_report.plan_text(planned, job), soft_wrap=True, highlight=False, markup=False)
    return planned


def _phases(planned: WorkerPlan | None, summary: Summary) -> dict[str, object]:
    if planned is None:
        return {}
    found = offload_report.phases(planned, summary.passes)
    policy = asdict(planned.price.policy) | {"batch": planned.price.policy.batch}
    return {"policy": policy, "phases": {one.name: one.as_json() for one in found}}
