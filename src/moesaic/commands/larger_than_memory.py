"""What `serve` and `run-batch` do about --fast-memory before they start a worker that runs a plan."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from moesaic import __version__
from moesaic.commands import descriptors, hardware, offload_report
from moesaic.commands.machine import examine
from moesaic.commands.plan import find_hardware
from moesaic.config import ClusterConfig, OffloadConfig, WorkerConfig, environment
from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import Hardware
from moesaic.models import files
from moesaic.planning.hardware import file
from moesaic.planning.serving import estimate_job, plan_server
from moesaic.runtime.fitting import fit
from moesaic.runtime.machine import cores
from moesaic.runtime.model_loading import count_gpus
from moesaic.runtime.offloaded_worker import check_drafts, paged_layout
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
    worker: WorkerConfig,
    cluster: ClusterConfig,
    offload: OffloadConfig,
    record: RecordConfig,
    is_automatic: bool = False,
) -> WorkerConfig:
    """The settings of the worker of a server, with a plan for its memory. The plan is printed on stderr.

    is_automatic: see `find_machine`.
    Raises ConfigError for what --fast-memory does not go with.
    """
    check_levels(cluster.resolve(), record)
    check_drafts(worker, offload.pad, count_gpus(worker.model) > 0)
    descriptors.prepare(cluster.tensor_parallel_size)
    worker = replace(worker, parallel=cluster.parallel)
    paged_layout(worker.model)
    machine, gpus = find_machine(worker, offload, is_automatic)
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
        is_automatic = offload.fast_memory is None
        planned_worker = plan_server_worker(fitted_worker, cluster, fitted_offload, record, is_automatic)
        return planned_worker, fitted_offload


def fit_to_memory(
    worker: WorkerConfig, cluster: ClusterConfig, offload: OffloadConfig
) -> tuple[WorkerConfig, OffloadConfig]:
    """The settings with which the model fits: with a lower --max-model-len, or with --fast-memory.

    Says on stderr what differs. Raises ConfigError for lengths and models that cannot fit.
    """
    if offload.fast_memory is not None:
        return worker, offload
    memory_fit = fit(worker, cluster)
    fast_memory = None if memory_fit.streamed_bytes is None else f"{memory_fit.streamed_bytes >> 20}MiB"
    if memory_fit.notice:
        way = f"; experts are read from the disk, as with --fast-memory {fast_memory}"
        print(f"moesaic: {memory_fit.notice}{way if fast_memory else ''}", file=sys.stderr, flush=True)
    return memory_fit.config, replace(offload, fast_memory=fast_memory)


@contextmanager
def explain_automatic_plan(own_offload: OffloadConfig, new_offload: OffloadConfig) -> Iterator[None]:
    """Code that plans. Where nobody gave --fast-memory, errors say why a plan was made."""
    try:
        yield
    except ConfigError as error:
        if own_offload.fast_memory is not None:
            raise
        size = new_offload.fast_memory
        raise ConfigError(
            f"model: it does not fit into memory, and --fast-memory {size}, which reads experts from "
            f"the disk, is refused: {error}"
        ) from error


def find_machine(
    worker: WorkerConfig, offload: OffloadConfig, is_automatic: bool = False
) -> tuple[Hardware, int]:
    """The figures of the machine, measured now unless they are given, and the number of its GPUs.

    is_automatic: nobody gave --fast-memory. Then figures are kept for the next start.
    """
    path, gpus = files.resolve(*worker.model.source), count_gpus(worker.model)
    if offload.hardware is not None:
        return find_hardware(offload.hardware), gpus
    if is_automatic:
        return _measure_once(path), gpus
    return hardware.now(str(path), "cuda" if gpus else "cpu"), gpus


def _measure_once(model: Path) -> Hardware:
    """The figures of this machine and of the model's disk, which are measured at the first start only."""
    keys = __version__, examine().cpu, cores(), model.resolve(), model.stat().st_dev
    name = hashlib.sha256(repr(keys).encode()).hexdigest()[:16]
    try:
        path = environment.cache_folder() / "hardware" / f"{name}.toml"
    except ConfigError as error:
        print(f"moesaic: the next start measures again: {error}", file=sys.stderr)
        return hardware.now(str(model), "cpu")
    if path.is_file():
        print(f"moesaic: figures of this machine from {path}; delete it to measure again", file=sys.stderr)
        return find_hardware(str(path))
    figures = hardware.now(str(model), "cpu")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file.save(figures, path)
    except (OSError, ConfigError) as error:
        print(
            f"moesaic: the next start measures again, since {path} cannot be written: {error}",
            file=sys.stderr,
        )
    return figures


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
