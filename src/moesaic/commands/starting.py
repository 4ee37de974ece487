"""What a command does before it starts the processes of a cluster: a plan for a model that does not fit into
memory, expert servers on NUMA nodes, the limit of open files, and bounds of the numbers of processes."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection as PipeConnection
from typing import TypeVar

from moesaic.cluster import numa, process_room
from moesaic.commands import descriptors
from moesaic.config import ClusterConfig, Device, OffloadConfig, WorkerConfig, parse_bytes
from moesaic.core.errors import ConfigError, EngineDeadError, MoesaicError
from moesaic.cost.reading import read
from moesaic.models import files
from moesaic.runtime import quick_fit
from moesaic.runtime.machine import NVIDIA, cores
from moesaic.trace.options import RecordConfig

Result = TypeVar("Result")
MOST_PER_CORE = 4
"""Processes for each core, above which a command warns."""


def prepare_cluster(cluster: ClusterConfig, device: Device) -> ClusterConfig:
    """The cluster that starts on this machine. Says on stderr what differs from the flags.

    Raises ConfigError if the processes need more open files than this process may have.
    """
    cluster = on_nodes(cluster, device)
    processes = _processes(cluster.resolve())
    descriptors.prepare(processes)
    if not cluster.is_remote:
        warn_of_many(processes, cores())
    return cluster


def without_plan(
    worker: WorkerConfig, cluster: ClusterConfig, offload: OffloadConfig
) -> tuple[WorkerConfig, ClusterConfig]:
    """The settings of processes that need no plan: all is in memory, or servers read experts as rows come.

    Raises ConfigError for settings of a plan.
    """
    if offload.fast_memory is not None:
        for name, value in vars(offload).items():
            if name != "fast_memory" and value != getattr(OffloadConfig, name):
                flag = "--" + name.replace("_", "-")
                allowed_values = (
                    "nothing with --expert-servers: servers read experts as rows need them, by no plan"
                )
                raise ConfigError.field(flag, value, allowed_values)
        if offload.fast_memory == "auto":
            raise ConfigError.field("--fast-memory", "auto", "a size with --expert-servers, such as 2GiB")
        if cluster.devices is not None:
            allowed_values = "nothing with --fast-memory and --expert-servers, which compute on the CPU"
            raise ConfigError.field("--devices", cluster.devices, allowed_values)
        if worker.model.device == "cuda":
            raise ConfigError.field("--device", "cuda", "cpu with --fast-memory and --expert-servers")
        worker = replace(worker, server_memory=parse_bytes("--fast-memory", offload.fast_memory))
    return worker, prepare_cluster(cluster, worker.model.device)


def settle(
    worker: WorkerConfig,
    cluster: ClusterConfig,
    offload: OffloadConfig,
    record: RecordConfig = RecordConfig(),
) -> tuple[WorkerConfig, OffloadConfig]:
    """The settings with which the model fits into memory: see `larger_than_memory.settle`.

    A process of its own decides, since that needs torch, which would stay in this process's memory. Where the
    sizes of the files tell that all fits, none is started. Raises ConfigError for more processes than this
    host or the model can have.
    """
    check_counts(worker, cluster)
    if worker.cache.prefix_cache_dir is not None and offload.pad:
        raise ConfigError.field("--pad", "true", "false with --prefix-cache-dir")
    if offload.fast_memory is None and quick_fit.surely_fits(worker, cluster):
        return worker, offload
    return call_in_process(_settle, worker, cluster, offload, record, work="plans")


def _settle(
    worker: WorkerConfig, cluster: ClusterConfig, offload: OffloadConfig, record: RecordConfig
) -> tuple[WorkerConfig, OffloadConfig]:
    from moesaic.commands import larger_than_memory

    return larger_than_memory.settle(worker, cluster, offload, record)


def call_in_process(function: Callable[..., Result], *arguments: object, work: str) -> Result:
    """What a function returns that runs in a process of its own, whose memory goes back with it.

    work: what the process does, as in "plans". Raises the function's MoesaicError, and EngineDeadError if the
    process ends without an answer.
    """
    # A forked process would have this one's signal handlers and open files.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_result, args=(sender, function, arguments), daemon=True)
    child.start()
    sender.close()
    try:
        result: Result | MoesaicError = receiver.recv()
    except EOFError as error:
        child.join()
        raise EngineDeadError(f"the process that {work} ended with code {child.exitcode}") from error
    child.join()
    if isinstance(result, MoesaicError):
        raise result
    return result


def _send_result(pipe: PipeConnection, function: Callable[..., object], arguments: Sequence[object]) -> None:
    """Send what a function returns, or its error. Ends with the process that waits."""
    with suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            pipe.send(function(*arguments))
        except MoesaicError as error:
            pipe.send(error)


def on_nodes(cluster: ClusterConfig, device: Device) -> ClusterConfig:
    """`cluster` with an expert server on each NUMA node, where the CPUs of several compute."""
    nodes = numa.list_bindable_nodes(cluster.numa)
    gpu = device == "cuda" or (device == "auto" and NVIDIA.exists())
    new_cluster = cluster if gpu else cluster.on_nodes(len(nodes))
    if new_cluster is not cluster:
        names = ", ".join(str(node.number) for node in nodes)
        advice = "--numa off computes them in one process"
        _say(f"an expert server on each of the NUMA nodes {names}; {advice}")
    return new_cluster


def check_counts(worker: WorkerConfig, cluster: ClusterConfig) -> None:
    """Raise ConfigError for numbers of processes that are out of bounds (`policy.fleet.bounds`)."""
    try:
        config = files.read_config(files.resolve(*worker.model.source))
        raw = {key: value for key, value in config.items() if key != "quantization_config"}
        num_experts = read(raw, worker.model.model).experts or None
    except MoesaicError:
        num_experts = None  # what is wrong with the model is told later
    process_room.check_flags(cluster, num_experts)


def warn_of_many(processes: int, cores: int) -> None:
    """Say before the start that so many processes have to take turns."""
    if processes > MOST_PER_CORE * cores:
        counts = f"{processes} processes for {cores} core{'s' if cores > 1 else ''}: they take turns"
        advice = "fewer --expert-servers or --attention-workers are faster"
        _say(f"starts {counts}, and {advice}")


def _processes(cluster: ClusterConfig) -> int:
    workers = cluster.attention_workers + cluster.prefill_workers
    return workers * cluster.tensor_parallel_size + cluster.expert_servers


def _say(text: str) -> None:
    print(f"moesaic: {text}", file=sys.stderr, flush=True)
