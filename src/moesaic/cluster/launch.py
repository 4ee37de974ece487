"""Starts worker processes and an engine in this process. The server and the batch runner use it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic.cluster.joined_launcher import JoinedLauncher
from moesaic.cluster.launcher import Launcher, LocalLauncher
from moesaic.cluster.local import spawn_worker
from moesaic.cluster.router import Router
from moesaic.cluster.supervisor import Supervisor
from moesaic.config import ClusterConfig, WorkerConfig, gpus
from moesaic.core import curves, paced_devices
from moesaic.core.errors import ConfigError
from moesaic.engine import Engine
from moesaic.models import files, fingerprint
from moesaic.policy.fleet.devices import choose
from moesaic.text.tokenizer import Tokenizer
from moesaic.trace.live_routing import LiveRouting
from moesaic.trace.options import RecordConfig
from moesaic.trace.parts import collecting, part_path
from moesaic.trace.routing import Ends, recording
from moesaic.transport.base import Connection

LIVE_SECONDS = 5.0
"""Seconds between two looks at recorded routing that a placement follows."""


@dataclass(frozen=True)
class LaunchedEngine:
    """The engine, and its workers, which are loading."""

    engine: Engine
    connection: Connection
    """The connection to the worker, or to all workers."""
    describe_end: Callable[[], str]
    """Returns one line that says how the worker ended. Call it once the connection is lost."""
    supervisor: Supervisor | None
    """The supervisor of several processes. None if one worker process does everything."""
    default_sampling: dict[str, Any]
    """The sampling defaults of the checkpoint, by the names of SamplingParams."""


@contextmanager
def launch(
    config: WorkerConfig,
    cluster: ClusterConfig | None = None,
    *,
    chat_template: Path | None = None,
    special_tokens_in_content: bool = False,
    max_waiting: int | None = None,
    seed: int | None = None,
    record: RecordConfig = RecordConfig(),
) -> Iterator[LaunchedEngine]:
    """Start `config`'s worker, or the processes of `cluster`. They end with the block.

    chat_template, special_tokens_in_content: see Tokenizer. max_waiting: see Engine. seed: determines the
    seeds of requests without one; None draws other seeds in each run. After the block the trace of `config`
    and the routing profile of `record` are complete. Raises ConfigError for errors that are found before the
    weights are read.
    """
    cluster = cluster and cluster.resolve()
    config = _with_devices(config, cluster)
    path = check(config, cluster, record)
    defaults = files.generation_defaults(path)
    tokenizer = Tokenizer(path, chat_template, special_tokens_in_content=special_tokens_in_content)
    live = _live_routing(config, cluster, record)
    with closing(tokenizer), collecting(config.trace), ExitStack() as stack:
        ends = _request_ends(cluster, live, record)
        routing_file = stack.enter_context(recording(record, live=live, ends=ends))
        local_config = _local_config(config, cluster, path, replace(record, record_routing=routing_file))
        connection: Connection
        supervisor: Supervisor | None = None
        if cluster is None or not cluster.has_several_processes:
            worker = spawn_worker(_single_worker_config(local_config))
            stack.callback(worker.stop)
            connection, describe_end = worker.connection, worker.describe_end
        else:
            router = Router()
            launcher, cluster = _make_launcher(local_config, cluster)
            supervisor = Supervisor(local_config, cluster, router, time.monotonic, live, launcher)
            stack.callback(supervisor.stop)
            connection, describe_end = router, supervisor.describe_end
            supervisor.start()
        engine = Engine(
            connection,
            tokenizer,
            clock=time.monotonic,
            rng=random.Random(seed),
            eos_token_ids=defaults.join_ends(tokenizer.end_token_ids),
            max_waiting=max_waiting,
            on_request_end=None if ends is None else ends.add,
        )
        yield LaunchedEngine(engine, connection, describe_end, supervisor, defaults.sampling)


def _request_ends(
    cluster: ClusterConfig | None, live: LiveRouting | None, record: RecordConfig
) -> Ends | None:
    """Where the engine says which requests have ended. None: nothing is recorded, or a worker writes it."""
    # Several workers may have rows of one request, so none of them knows when it has ended.
    has_several = cluster is not None and cluster.has_several_processes
    return Ends() if has_several and (live or record.record_routing) else None


def check(config: WorkerConfig, cluster: ClusterConfig | None, record: RecordConfig) -> Path:
    """The directory of the checkpoint. Raises ConfigError for settings that contradict each other."""
    if config.queues.expert_batch_pairs is not None and (cluster is None or cluster.expert_servers == 0):
        raise ConfigError.field("--expert-servers", 0, "at least 1 with --expert-batch-pairs")
    if cluster is not None and cluster.is_remote:
        _check_remote(config, record, cluster)
    if cluster is not None and cluster.paced is not None:
        paced_devices.read(Path(cluster.paced))
    if cluster is not None and cluster.schedule_policy_file is not None:
        curves.read(Path(cluster.schedule_policy_file))
    return files.resolve(*config.model.source)


def _make_launcher(config: WorkerConfig, cluster: ClusterConfig) -> tuple[Launcher, ClusterConfig]:
    """What starts the processes, and `cluster` with the address to which they connect.

    Raises ConfigError if Ray is not installed, or has no cluster.
    """
    if cluster.standby_for is not None:
        return JoinedLauncher(config), cluster
    if not cluster.on_ray:
        return LocalLauncher(), cluster
    try:
        from moesaic.cluster.ray_launcher import RayLauncher
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("ray"):
            raise
        choices = f"local, or pip install 'moesaic[ray]' first ({error})"
        raise ConfigError.field("--distributed-executor-backend", "ray", choices) from error
    launcher = RayLauncher(config, cluster)
    return launcher, launcher.fill_defaults(cluster)


def _live_routing(
    config: WorkerConfig, cluster: ClusterConfig | None, record: RecordConfig
) -> LiveRouting | None:
    """What --rebalance routing records; None without it. Raises ConfigError where it cannot."""
    if cluster is None or cluster.rebalance != "routing":
        return None
    if config.scheduler.speculative_config is not None:
        choices = "load with --speculative-config: routes of drafted tokens must not be recorded"
        raise ConfigError.field("--rebalance", "routing", choices)
    return LiveRouting(record.most_bytes, min(LIVE_SECONDS, cluster.rebalance_interval / 4))


def _local_config(
    config: WorkerConfig, cluster: ClusterConfig | None, path: Path, record: RecordConfig
) -> WorkerConfig:
    """`config` for processes of this machine, which read the checkpoint in `path` as it is now."""
    return replace(
        config,
        model=replace(config.model, model=str(path), revision=None, hf_overrides=None),  # the path has both
        parallel=cluster.parallel if cluster else config.parallel,
        paced=None if cluster is None else _absolute(cluster.paced),
        policy_file=None if cluster is None else _absolute(cluster.schedule_policy_file),
        record=record.record_routing,
        record_share=record.record_routing_share,
        checkpoint_stamp=fingerprint.stamp(path),
    )


def _with_devices(config: WorkerConfig, cluster: ClusterConfig | None) -> WorkerConfig:
    """`config` for the GPUs of --devices. Raises ConfigError for --device cpu beside it."""
    if cluster is None or cluster.devices is None:
        return config
    if config.model.device == "cpu":
        raise ConfigError.field("--devices", cluster.devices, "nothing with --device cpu")
    own_devices = choose(gpus(cluster.devices), [], 1)
    return replace(config, model=replace(config.model, device="cuda"), devices=own_devices)


def _absolute(file: str | None) -> str | None:
    """The path as processes with another working directory find it."""
    return None if file is None else str(Path(file).absolute())


def _single_worker_config(config: WorkerConfig) -> WorkerConfig:
    """`config` for a single worker, which writes its own parts of the trace and of the recorded routing."""
    trace, rows = (part_path(file, "attention worker 0") for file in (config.trace, config.record))
    return replace(config, trace=trace, record=rows)


def _check_remote(config: WorkerConfig, record: RecordConfig, cluster: ClusterConfig) -> None:
    """Raises ConfigError for settings that are those of one host."""
    flag_name = "--distributed-executor-backend ray" if cluster.on_ray else "--standby-for"
    owner = "Ray shares" if cluster.on_ray else "each process that joins shares"
    for flag, value, reason in (
        ("--trace", config.trace, "its parts are files of this host"),
        ("--record-routing", record.record_routing, "its parts are files of this host"),
        ("--pin-threads", config.model.pin_threads or None, f"{owner} out the cores"),
    ):
        if value is not None:
            requirement = f"nothing with {flag_name}: {reason}"
            raise ConfigError.field(flag, str(value), requirement)
