"""What `serve` and `run-batch` do about --fast-memory before they start a worker that runs a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console

from moesaic.commands import descriptors, hardware, offload_report
from moesaic.commands.plan import find_hardware
from moesaic.config import ClusterConfig, OffloadConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import Hardware
from moesaic.models import files
from moesaic.planning.serving import estimate_job, plan_server
from moesaic.runtime.fitting import fit
from moesaic.runtime.model_loading import count_gpus
from moesaic.runtime.offloaded_worker import paged_layout
from moesaic.trace.options import RecordConfig

CLUSTER_SETTINGS = (
    "nnodes",
    "attention_workers",
    "prefill_workers",
    "autoscale",
    "standby_for",
    "cluster_address",
)
"""Settings of several processes, which one that runs a plan has not."""


def plan_server_worker(
    worker: WorkerConfig, cluster: ClusterConfig, offload: OffloadConfig, record: RecordConfig
) -> WorkerConfig:
    """The settings of the worker of a server, with a plan for its memory. The plan is printed on stderr.

    Raises ConfigError for what --fast-memory does not go with.
    """
    check_levels(cluster.resolve(), record)
    check_drafts(worker)
    descriptors.prepare(cluster.tensor_parallel_size)
    worker = replace(worker, parallel=cluster.parallel)
    paged_layout(worker.model)
    machine, gpus = find_machine(worker, offload)
    console = Console(stderr=True)
    with console.status("pricing policies"):
        worker_plan = plan_server(worker, offload, machine, gpus)
    text = offload_report.describe_plan(worker_plan, estimate_job(worker))
    console.print(text, soft_wrap=True, highlight=False, markup=False)
    return worker_plan.worker


def settle(
    worker: WorkerConfig, cluster: ClusterConfig, offload: OffloadConfig, record: RecordConfig
) -> tuple[WorkerConfig, OffloadConfig]:
    """The settings of a server on this machine: as they are, or with shorter requests, or with a plan.

    Says on stderr what differs from the flags. A plan is made for --fast-memory, and where the model does not
    fit. Raises ConfigError where it cannot be made.
    """
    fitted_worker, fitted_offload = fit_to_memory(worker, cluster, offload)
    if fitted_offload.fast_memory is None or cluster.resolve().expert_servers:
        return fitted_worker, fitted_offload
    with explain_automatic_plan(offload, fitted_offload):
        return plan_server_worker(fitted_worker, cluster, fitted_offload, record), fitted_offload


def fit_to_memory(
    worker: WorkerConfig, cluster: ClusterConfig, offload: OffloadConfig
) -> tuple[WorkerConfig, OffloadConfig]:
    """The settings with which the model fits: with a lower --max-model-len, or with --fast-memory.

    Says on stderr what differs. Raises ConfigError for lengths and models that cannot fit.
    """
    if offload.fast_memory is not None:
        return worker, offload
    fitted = fit(worker, cluster)
    fast_memory = None if fitted.streamed is None else f"{fitted.streamed >> 20}MiB"
    if fitted.notice:
        way = f"; experts are read from the disk, as with --fast-memory {fast_memory}"
        print(f"moesaic: {fitted.notice}{way if fast_memory else ''}", file=sys.stderr, flush=True)
    return fitted.config, replace(offload, fast_memory=fast_memory)


@contextmanager
def explain_automatic_plan(given: OffloadConfig, fitted: OffloadConfig) -> Iterator[None]:
    """Code that plans. Where nobody gave --fast-memory, errors say why a plan was made."""
    try:
        yield
    except ConfigError as error:
        if given.fast_memory is not None:
            raise
        size = fitted.fast_memory
        raise ConfigError(
            f"model: it does not fit into memory, and --fast-memory {size}, which reads experts from "
            f"the disk, is refused: {error}"
        ) from error


def find_machine(worker: WorkerConfig, offload: OffloadConfig) -> tuple[Hardware, int]:
    """The figures of the machine, measured now unless they are given, and the number of its GPUs."""
    path, gpus = files.resolve(worker.model.model, worker.model.revision), count_gpus(worker.model)
    name = offload.hardware
    machine = hardware.now(str(path), "cuda" if gpus else "cpu") if name is None else find_hardware(name)
    return machine, gpus


def check_levels(cluster: ClusterConfig, record: RecordConfig) -> None:
    """Raises ConfigError for what a model that is larger than its memory does not have yet."""
    for name in CLUSTER_SETTINGS:
        value, default = getattr(cluster, name), getattr(ClusterConfig, name)
        if value != default:
            flag, default_text = "--" + name.replace("_", "-"), "nothing" if default is None else default
            allowed_values = f"{default_text} with --fast-memory, unless there are --expert-servers"
            raise ConfigError.field(flag, value, allowed_values)
    if cluster.on_ray:
        allowed_values = "local with --fast-memory, unless there are --expert-servers"
        raise ConfigError.field("--distributed-executor-backend", "ray", allowed_values)
    if cluster.devices is not None:
        allowed_values = (
            "nothing with --fast-memory; with --device cuda, CUDA_VISIBLE_DEVICES chooses the GPUs"
        )
        raise ConfigError.field("--devices", cluster.devices, allowed_values)
    if record.record_routing is not None:
        raise ConfigError.field("--record-routing", str(record.record_routing), "nothing with --fast-memory")


def check_drafts(worker: WorkerConfig) -> None:
    """Raises ConfigError for drafted tokens, of which a pass has none."""
    drafting = worker.scheduler.speculative_config
    if drafting is not None:
        raise ConfigError.field("--speculative-config", drafting, "nothing with --fast-memory")
