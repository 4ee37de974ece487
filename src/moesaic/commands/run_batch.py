"""`moesaic run-batch`: answers a batch file and prints a summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from moesaic.commands import descriptors, larger_than_memory, offload_report
from moesaic.commands.starting import check_counts, without_plan
from moesaic.commands.tracing import announce_routing, announce_trace
from moesaic.config import ClusterConfig, LogLevel, OffloadConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.jobs.batch import lengths
from moesaic.jobs.batch import run as batch
from moesaic.jobs.batch.options import RunBatch
from moesaic.jobs.batch.output import read_answered_keys
from moesaic.jobs.batch.show import Summary, print_summary
from moesaic.models import files
from moesaic.planning import WorkerPlan, longest_request, plan
from moesaic.runtime.model_loading import count_gpus
from moesaic.runtime.offloaded_worker import check_drafts, paged_layout
from moesaic.text.tokenizer import Tokenizer
from moesaic.trace import logs
from moesaic.trace.options import RecordConfig

REMOTE_OPTIONS = ("input_file", "output_file", "max_in_flight", "base_url", "api_key")
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
    worker_plan = None
    given_offload = offload
    check_counts(worker, cluster)
    worker, offload = larger_than_memory.fit_to_memory(worker, cluster, offload)
    with announce_trace(worker.trace), announce_routing(record):
        if offload.fast_memory is None or cluster.resolve().expert_servers:
            worker, processes = without_plan(worker, cluster, offload)
            summary = batch.run(options, worker, processes, record)
        else:
            with larger_than_memory.explain_automatic_plan(given_offload, offload):
                larger_than_memory.check_levels(cluster.resolve(), record)
                descriptors.prepare(worker.parallel.tensor_parallel_size)
                is_automatic = given_offload.fast_memory is None
                worker_plan = _plan_lines(options, worker, offload, is_automatic)
            summary = batch.run(options, worker if worker_plan is None else worker_plan.worker)
    return _finish(summary, worker, worker_plan, as_json)


def run_remote(options: RunBatch, settings: Sequence[object], log_level: LogLevel, as_json: bool) -> int:
    """`run`, but the server at --base-url answers. Returns the exit code.

    settings: configs of a server that this command would start, or None. Raises ConfigError if one of them
    was given: the other server has its own.
    """
    logs.set_up("run-batch", log_level)
    for config in (options, *settings):
        for name, value in {} if config is None else vars(config).items():
            if (config is not options or name not in REMOTE_OPTIONS) and value != getattr(
                type(config), name, None
            ):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag}: not allowed with --base-url, whose server has its own settings")
    assert options.base_url is not None
    return _finish(batch.run_remote(options, options.base_url, options.api_key), None, None, as_json)


def _finish(
    summary: Summary, worker: WorkerConfig | None, worker_plan: WorkerPlan | None, as_json: bool
) -> int:
    """Print the summary. Returns the exit code."""
    if as_json:
        print(json.dumps(summary.as_json() | _phases(worker_plan, summary)))
    else:
        print_summary(summary, Console())
        if worker_plan is not None and worker is not None and summary.passes:
            phases, ranks = (
                offload_report.measure_phases(worker_plan, summary.passes),
                worker.parallel.tensor_parallel_size,
            )
            print(offload_report.describe_result(phases, summary.seconds, ranks))
    return summary.exit_code()


def _plan_lines(
    options: RunBatch, worker: WorkerConfig, offload: OffloadConfig, is_automatic: bool
) -> WorkerPlan | None:
    """Plan the lines without results on this machine, and print the plan on stderr. None if there are none.

    is_automatic: see `larger_than_memory.find_machine`.
    Raises ConfigError for drafted tokens and for experts that cannot be streamed, before it measures or plans
    anything.
    """
    check_drafts(worker, offload.pad, count_gpus(worker.model) > 0)
    path = files.resolve(*worker.model.source)
    allow, answered_keys = options.allow_special_tokens_in_content, read_answered_keys(options.output_file)
    tokenizer = Tokenizer(path, options.chat_template, special_tokens_in_content=allow)
    job = lengths.survey(options.input_file, tokenizer, longest_request(worker), answered_keys, offload.pad)
    if job is None:
        return None
    paged_layout(worker.model)
    machine, gpus = larger_than_memory.find_machine(worker, offload, is_automatic)
    console = Console(stderr=True)
    with console.status("pricing policies"):
        worker_plan = plan(worker, offload, job, machine, gpus)
    console.print(
        offload_report.describe_plan(worker_plan, job), soft_wrap=True, highlight=False, markup=False
    )
    return worker_plan


def _phases(worker_plan: WorkerPlan | None, summary: Summary) -> dict[str, object]:
    if worker_plan is None:
        return {}
    phases = offload_report.measure_phases(worker_plan, summary.passes)
    policy = asdict(worker_plan.price.policy) | {"batch": worker_plan.price.policy.batch}
    return {"policy": policy, "phases": {phase.name: phase.as_json() for phase in phases}}
