"""Starts the processes of a cluster on the nodes of a Ray cluster, with an actor for each.

The actor starts a process on its node and waits for its end. The process connects to this cluster's address
by itself, so neither a message nor a tensor passes through Ray. Ray restarts nothing: the supervisor does.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray
from ray._private import worker as ray_worker
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.joining.options import JoinOptions
from moesaic.cluster.joining.watcher import ProcessWatcher
from moesaic.cluster.launched_process import LaunchedProcess
from moesaic.cluster.member import Member, Role
from moesaic.config import ClusterConfig, ExpertServerConfig, KernelName, WorkerConfig
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.home import expand_home
from moesaic.models import fingerprint
from moesaic.policy.fleet.nodes import Resources, choose_nodes, has_room, no_room, threads_that_fit
from moesaic.transport import address as addresses
from moesaic.transport.host import find_advertised_address

SECRET_FILE = "~/.config/moesaic/cluster-secret"
"""The secret's file if --cluster-secret-file is not given."""
PREFERENCE_SECONDS = 1.0
"""Seconds in which a preferred node must have room. After that any node is taken."""
POLL_SECONDS = 0.5
LOST_SECONDS = 60.0
"""Seconds for which a lost node is avoided. By then Ray knows whether it has ended."""
NODE_LABEL = "ray.io/node-id"
"""Label that Ray gives each node: its id."""


class RayLauncher:
    """Starts processes on the nodes of the Ray cluster that this process is connected to."""

    is_remote = True

    def __init__(self, worker: WorkerConfig, cluster: ClusterConfig) -> None:
        """Raises ConfigError if there is no Ray cluster."""
        self._has_connected = _connect(cluster)
        self._path = Path(worker.model.model)
        self._secret_file = cluster.cluster_secret_file or SECRET_FILE
        self._address = ""
        self._kernels = worker.model.kernels
        self._sets: dict[bool, KernelName] = {}
        """Whether it is that of expert servers -> instruction set of the native kernels."""
        self._weights = ""
        """Fingerprint of the checkpoint, once it was read."""
        ranks = cluster.tensor_parallel_size
        workers = (cluster.attention_workers + cluster.prefill_workers) * ranks
        nodes = [node["Resources"] for node in _nodes()]
        fitting = threads_that_fit(
            (resources.get("CPU", 0.0) for resources in nodes), workers + cluster.expert_servers
        )
        self._threads = worker.model.threads or fitting
        on_gpus = worker.model.device == "cuda"
        workers_on_gpus = on_gpus or (
            worker.model.device == "auto" and any(resources.get("GPU") for resources in nodes)
        )
        self._bundles = {
            Role.WORKER: _bundle(self._threads, ranks, workers_on_gpus),
            Role.SERVER: _bundle(self._threads, 1, on_gpus),
        }
        self._bundles[Role.PREFILL] = self._bundles[Role.WORKER]
        self._processes: list[LaunchedProcess] = []
        """Those that have not ended, and some that have."""
        self._choosing = threading.Lock()
        """Held while a node is chosen, since the next choice depends on it."""
        self._lost_nodes: dict[str, float] = {}
        """Node -> when it seemed to have ended."""

    @staticmethod
    def fill_defaults(cluster: ClusterConfig) -> ClusterConfig:
        """`cluster` with the address and the secret's file that it has by default."""
        address = cluster.cluster_address or f"tcp:{get_node_ip_address()}:0"
        file = expand_home(cluster.cluster_secret_file or SECRET_FILE)
        if cluster.cluster_secret_file is None:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return replace(cluster, cluster_address=address, cluster_secret_file=str(file))

    def set_address(self, address: str) -> None:
        self._address = str(find_advertised_address(addresses.parse(address)))

    def start_worker(self, member: Member, config: WorkerConfig) -> LaunchedProcess:
        process = self._process(member, config.model.model, config)
        if config.own_server is not None:
            process.partner = f"{Role.SERVER.value} {config.own_server}"
        return self._start(process)

    def start_server(self, member: Member, config: ExpertServerConfig) -> LaunchedProcess:
        process = self._process(member, config.model, config)
        partners = (process_.member.name for process_ in self._processes if process_.partner == member.name)
        process.partner = next(partners, None)
        return self._start(process)

    def take(self, process: RemoteProcess) -> bool:
        for candidate in self._processes:
            if candidate.joining.ticket == process.ticket and candidate.member.role is process.role:
                instruction_set, sets = self._instruction_set(process), process.instruction_sets
                if instruction_set is None or instruction_set in sets:
                    candidate.take(process, self._weights, instruction_set)
                else:
                    reason = f"--kernels: this cluster computes with {instruction_set}, which this CPU lacks"
                    candidate.refuse(process, f"{reason}; start it with --kernels {sets[0]}")
                return True
        return False

    def request_hosts(self, numbers: Mapping[Role, int]) -> None:
        bundles = [dict(self._bundles[role]) for role, number in numbers.items() for _ in range(number)]
        request_resources(bundles=bundles)

    def stop(self) -> None:
        for process in self._processes:
            process.thread.join()
        request_resources(bundles=[])
        if self._has_connected:  # else the program that connected before still uses Ray
            ray.shutdown()

    def _find(self, process: LaunchedProcess) -> RayRoom | None:
        """Gets room on a node, and waits for it. Returns None if the process was given up meanwhile."""
        bundle = dict(self._bundles[process.member.role])
        try:
            with self._choosing:
                room = process.room = self._try_preferred_nodes(process, bundle)
            if room is not None:
                return room
            group = placement_group([bundle])
            while not group.wait(POLL_SECONDS):
                if process.cancel_event.is_set():
                    remove_placement_group(group)
                    return None
                reason = no_room(bundle, ray.available_resources(), [node["Resources"] for node in _nodes()])
                process.set_waiting(f"waiting for a host: {reason}")
            return RayRoom(group, self._secret_file)
        except RayError as error:
            raise ConnectionLost(_line(error)) from error
        finally:
            process.set_waiting("")

    def _lose(self, node: str) -> None:
        self._lost_nodes[node] = time.monotonic()

    def _try_preferred_nodes(self, process: LaunchedProcess, bundle: dict[str, float]) -> RayRoom | None:
        """Room on a preferred node; None if none has any now."""
        other_processes = [
            other_process
            for other_process in self._processes
            if other_process is not process and other_process.is_running
        ]
        rooms = [
            (other_process.member, other_process.room.node)
            for other_process in other_processes
            if other_process.room is not None
        ]
        clients = process.member.role is not Role.SERVER
        alike = [node for member, node in rooms if (member.role is not Role.SERVER) is clients]
        partner_node = next((node for member, node in rooms if member.name == process.partner), None)
        nodes = [node["NodeID"] for node in _nodes() if has_room(node["Resources"], bundle)]
        now = time.monotonic()
        lost_nodes = {node for node, lost_at in self._lost_nodes.items() if now - lost_at < LOST_SECONDS}
        preferred_nodes = choose_nodes(nodes, alike, partner_node, lost_nodes)
        if not preferred_nodes:
            return None
        group = placement_group(
            [dict(bundle)], bundle_label_selector=[{NODE_LABEL: f"in({','.join(preferred_nodes)})"}]
        )
        if group.wait(PREFERENCE_SECONDS):
            return RayRoom(group, self._secret_file)
        remove_placement_group(group)
        return None

    def _process(
        self, member: Member, model: str, config: WorkerConfig | ExpertServerConfig
    ) -> LaunchedProcess:
        if not self._weights:
            self._weights = fingerprint.compute_fingerprint(self._path)
        member.weights, member.host, member.host_id = self._weights, "", ""
        joining = JoinOptions(
            self._address,
            member.role.flag,
            model=model,
            threads=self._threads,
            ticket=secrets.token_hex(16),  # so that no other process of the role takes this place
            log_level=config.log_level,
        )
        return LaunchedProcess(member, joining, config, self._find, self._lose)

    def _start(self, process: LaunchedProcess) -> LaunchedProcess:
        self._processes = [
            *(other_process for other_process in self._processes if other_process.thread.is_alive()),
            process,
        ]
        process.thread.start()
        return process

    def _instruction_set(self, process: RemoteProcess) -> KernelName | None:
        """The instruction set of the first process of this kind, with --kernels auto on CPUs. So all of them
        compute the same bits. None: as the settings say."""
        if self._kernels != "auto" or "GPU" in self._bundles[process.role] or not process.instruction_sets:
            return None
        best = cast("KernelName", process.instruction_sets[0])
        return self._sets.setdefault(process.role is Role.SERVER, best)


class RayRoom:
    """A placement group with one bundle, and the actor in it."""

    def __init__(self, group: PlacementGroup, secret_file: str) -> None:
        self.node = str(placement_group_table(group)["bundles_to_node_id"][0])
        address = next(
            (node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == self.node), ""
        )
        self.name = f"node {address} ({self.node[:8]})"
        self._group = group
        self._secret_file = secret_file
        self._actor: Any = None

    def start(self, joining: JoinOptions) -> str | None:
        bundle = self._group.bundle_specs[0]
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        # Ray restarts nothing, since the supervisor does. While `wait` blocks, `kill` must get through.
        limits = {"max_restarts": 0, "max_concurrency": 4, "scheduling_strategy": strategy}
        watcher = ray.remote(ProcessWatcher)
        self._actor = watcher.options(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), **limits
        ).remote()
        try:
            reason: str | None = ray.get(self._actor.start.remote(joining, self._secret_file))
        except ActorDiedError as error:
            if "Error" not in _line(error):
                raise ConnectionLost(_line(error)) from error
            reason = _line(error)  # the actor itself cannot run, such as without moesaic on its node
        except RayError as error:
            raise ConnectionLost(_line(error)) from error
        return reason

    def wait(self) -> str:
        try:
            return str(ray.get(self._actor.wait.remote()))
        except RayError as error:
            raise ConnectionLost(_line(error)) from error

    def kill(self) -> None:
        if self._actor is not None:
            self._actor.kill.remote()

    def free(self) -> None:
        with contextlib.suppress(RayError):
            if self._actor is not None:
                ray.kill(self._actor)
            remove_placement_group(self._group)


def _connect(cluster: ClusterConfig) -> bool:
    """Connects to the Ray cluster. Returns False if this process was connected before."""
    if ray.is_initialized():
        return False
    with _keep_signal_handler(), _silence_ray():
        try:
            ray.init(address="auto", configure_logging=False, log_to_driver=False)
        except ConnectionError as error:
            choices = "local, or ray with a running Ray cluster, here or at RAY_ADDRESS"
            line = f"{choices} ({_line(error)})"
            raise ConfigError.field("--distributed-executor-backend", "ray", line) from error
    return True


@contextlib.contextmanager
def _keep_signal_handler() -> Iterator[None]:
    """Restores the handler of SIGTERM, which Ray replaces in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former_handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former_handler)


@contextlib.contextmanager
def _silence_ray() -> Iterator[None]:
    """Inside, Ray starts no thread that prints its errors among the output of the command. Ray has no setting
    for that. The supervisor says what has ended."""
    name = "listen_error_messages"
    former_listener = getattr(ray_worker, name)
    setattr(ray_worker, name, lambda worker, threads_stopped: None)
    try:
        yield
    finally:
        setattr(ray_worker, name, former_listener)


def _bundle(threads: int, ranks: int, gpus: bool) -> Resources:
    """Resources of a process with so many ranks."""
    return {"CPU": float(threads * ranks)} | ({"GPU": float(ranks)} if gpus else {})


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _line(error: Exception) -> str:
    """The line of an exception that says most."""
    if isinstance(error, ActorUnavailableError):
        return "it does not answer"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if "Error" in lines[-1]:
        return lines[-1]
    return "its Ray actor died" if isinstance(error, RayActorError) else lines[0]
