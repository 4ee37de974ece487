"""The life of an expert server's process: the first Hold message, loading, serving, Shutdown."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from moesaic.config import ON_GPUS, ExpertServerConfig
from moesaic.core import curves, gpu_parts, messages, paced_devices
from moesaic.core.curves import DeviceCurves
from moesaic.core.endpoint import Endpoint
from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.job_membership import JobMembership
from moesaic.core.metrics import ExpertServerStats, PaceStats, ResidencyStats
from moesaic.core.weight_types import is_native
from moesaic.cost.curves import of_device
from moesaic.experts import measuring
from moesaic.experts.backend import ExpertBackend
from moesaic.experts.connector import Connector
from moesaic.experts.keeping import BackendAndStats, KeptExperts
from moesaic.experts.observer import ServerTrace
from moesaic.experts.pacing import Pace, PacedBackend
from moesaic.experts.relay import Relay
from moesaic.experts.server import ExpertServer
from moesaic.experts.server_memory import HostMemory, JoinedJob, ServerTransport
from moesaic.models import fingerprint
from moesaic.models.fingerprint import DigestQueue
from moesaic.models.served_files import watch_files
from moesaic.policy.scheduling.microqueue import QueuePolicy
from moesaic.policy.scheduling.minimum_batch import Decisions, cpu_curves
from moesaic.policy.scheduling.schedulers.expert_server import ExpertServerScheduler, StartRule
from moesaic.policy.scheduling.schedulers.server_setup import queue_policy, server_scheduler, start_rule
from moesaic.trace.track import Track
from moesaic.transport.authentication import RefusedByCluster
from moesaic.transport.calls import HEAP_BYTES
from moesaic.transport.listening import NIXL_KIND, Listener
from moesaic.transport.stream import StreamConnection, end_process
from moesaic.transport.wakeup import Wakeup

REPORT_SECONDS = 0.2
ATTENTION = 4.0
"""Weights of a layer besides its routed experts, over hidden squared. Assumed, as servers know none."""


def serve(
    supervisor: StreamConnection,
    config: ExpertServerConfig,
    wakeup: Wakeup,
    secret: bytes = b"",
    kept_experts: KeptExperts | None = None,
) -> int:
    """Serve until the supervisor sends Shutdown. Returns the exit code.

    wakeup: rung at each message of the supervisor.
    secret: what clients must prove to know. If it is empty, the first Hold message contains the secret.
    kept_experts: has the experts that were loaded for the last supervisor, and gets those of this one.
    Raises ConnectionLost when the supervisor is gone.
    """
    first = supervisor.receive(None)
    if isinstance(first, messages.Shutdown):
        return 0
    if not isinstance(first, messages.Hold):
        raise ConnectionLost("the supervisor's first message was not Hold")
    if config.cpus:
        os.sched_setaffinity(0, config.cpus)
    path, kept_experts = Path(config.model), kept_experts or KeptExperts()
    stamp = config.checkpoint_stamp or fingerprint.stamp(path)
    with fingerprint.guard_unchanged(path, stamp):
        unpaced_backend, residency = kept_experts.get(config, stamp, _backend)
        backend, pace = _apply_pace(unpaced_backend, config)
        backend.keep_only(first.experts)  # before others are loaded, so that memory need not have both
        backend.load(first.experts)
        digests = DigestQueue(path, config.layout) if config.joined else None
    secret, relay = secret or first.secret, _relay(config)
    transport = _transport(config, kept_experts.membership)
    listener = Listener(config.address, secret, remote=config.remote_address, kinds=transport.kinds)
    service, clock = _scheduler(config, backend, first), time.monotonic
    observer = None if config.trace is None else ServerTrace(Track(Path(config.trace), clock))
    server = ExpertServer(config.layout, backend, listener, service, clock, observer, relay, transport.memory)
    loader = _ExpertLoader(supervisor, backend, listener.endpoint, config, stamp, digests, transport.job)
    stop_event = threading.Event()
    arguments = supervisor, server, pace, residency, stop_event
    reports = threading.Thread(target=_report, args=arguments, daemon=True)
    reports.start()
    try:
        with _watch_files(config, stamp, supervisor):
            loader.change(first)
            _serve(supervisor, server, loader, relay, secret, wakeup, transport.job)
        return 0
    finally:
        stop_event.set()
        reports.join()
        loader.close()  # nobody may change the experts when they are used again
        server.close()


def _serve(
    supervisor: StreamConnection,
    server: ExpertServer,
    loader: _ExpertLoader,
    relay: Relay,
    secret: bytes,
    wakeup: Wakeup,
    job: JoinedJob | None,
) -> None:
    """Serve clients and follow the supervisor's messages, until Shutdown."""
    while True:
        wakeup.clear()
        while (message := supervisor.receive(0.0)) is not None:
            match message:
                case messages.Hold():
                    loader.change(message)
                case messages.Neighbours(servers):
                    relay.update({entry.server: entry for entry in servers}, secret)
                case messages.JoinJob() if job is not None:
                    job.join(message)
                case messages.Refuse(reason):
                    raise RefusedByCluster(f"refused this server: {reason}")
                case messages.Shutdown():
                    return
        server.turn(None, (wakeup.fileno(),))


def _watch_files(
    config: ExpertServerConfig, stamp: str, supervisor: StreamConnection
) -> contextlib.AbstractContextManager[None]:
    """Ends this process when somebody writes to a file that it computes from."""
    if config.fast_memory is None and (config.device != "cpu" or not config.mmap):
        return contextlib.nullcontext()  # it has copied them
    return watch_files(Path(config.model), stamp, partial(end_process, supervisor))


def _transport(config: ExpertServerConfig, membership: JobMembership) -> ServerTransport:
    """What the transport of this server decides. membership: of this process."""
    if config.transport in ON_GPUS:
        return gpu_parts.server_transport(config, membership)
    return ServerTransport(HostMemory(config.layout.hidden), NIXL_KIND if config.transport == "nixl" else {})


def _relay(config: ExpertServerConfig) -> Relay:
    """Passes parts of requests to other servers of this host."""
    wakeup, transport = Wakeup(), "shm" if config.transport in ON_GPUS else config.transport
    return Relay(Connector(HEAP_BYTES, wakeup, transport), wakeup, config.layout.hidden)


def _scheduler(
    config: ExpertServerConfig, backend: ExpertBackend, first: messages.Hold
) -> ExpertServerScheduler:
    """The scheduler. With --schedule async it may have a queue for each expert."""
    layout = config.layout
    num_resident = max(map(len, first.experts.values()), default=0)
    servers = max(1, round(layout.num_experts / max(1, num_resident)))
    decisions = Decisions(_curves(config, backend), layout.num_experts, layout.top_k, servers)
    rule = _start_rule(config, decisions, num_resident)
    return server_scheduler(config.schedule, layout.layers, _policy(config), rule, decisions)


def _curves(config: ExpertServerConfig, backend: ExpertBackend) -> DeviceCurves:
    """The curves of the modelled device, of the file that is given, or of the device that computes."""
    if config.paced is not None:
        return paced_devices.read(Path(config.paced)).curves
    if config.policy_file is not None:
        return curves.read(Path(config.policy_file))
    layout = config.layout
    expert, size = (
        3.0 * layout.hidden * layout.width,
        layout.expert_bytes / (3 * layout.hidden * layout.width),
    )
    other_parameters = ATTENTION * layout.hidden**2
    if config.device == "cpu" and config.fast_memory is not None:
        return cpu_curves(expert, other_parameters, config.threads)  # measuring would read all experts
    if config.device == "cpu":
        measured_ratio = measuring.measure_experts(backend, layout, config.threads)
        return cpu_curves(expert, other_parameters, config.threads, measured_ratio)
    device_curves = of_device(backend.device_name, expert, other_parameters, size)
    return device_curves or replace(cpu_curves(expert, other_parameters), shares_cores=False)


def _start_rule(config: ExpertServerConfig, decisions: Decisions, experts: int) -> StartRule:
    queues = config.queues
    pairs, wait = queues.expert_batch_pairs, queues.expert_batch_wait / 1000
    return start_rule(config.schedule, decisions, experts, pairs, wait)


def _policy(config: ExpertServerConfig) -> QueuePolicy:
    queues = config.queues
    return queue_policy(config.schedule, config.queue_policy, queues.urgency(None), queues.queue_history)


def _backend(config: ExpertServerConfig) -> BackendAndStats:
    """The backend, and what is counted of experts that are not all in memory.

    --kernels triton is for workers on a GPU. A server on a CPU beside them takes its own kernels.
    """
    if config.kernels == "triton" and config.device == "cpu":
        config = replace(config, kernels="auto")
    if config.fast_memory is None:
        return _in_memory(config), ResidencyStats
    from moesaic.experts.streamed_backend import StreamedBackend

    backend = StreamedBackend(
        Path(config.model), config.layout, config.kernels, config.threads, config.fast_memory
    )
    return backend, backend.residency


def _in_memory(config: ExpertServerConfig) -> ExpertBackend:
    on_cpu = config.device == "cpu"
    native = on_cpu and config.kernels != "reference" and is_native(config.layout.dtype)
    if native:
        try:
            from moesaic.experts.native_backend import NativeBackend

            return NativeBackend(
                Path(config.model), config.layout, config.kernels, config.threads, config.mmap
            )
        except ImportError:
            if config.kernels != "auto":
                raise
    from moesaic.experts.torch_backend import TorchBackend

    kernels = "reference" if on_cpu and config.kernels == "auto" else config.kernels
    return TorchBackend(
        Path(config.model), config.layout, config.device, kernels, config.threads, config.mmap
    )


def _apply_pace(
    backend: ExpertBackend, config: ExpertServerConfig
) -> tuple[ExpertBackend, Callable[[], PaceStats]]:
    """The backend with the timing of the modelled device, if there is one, and what is counted of it."""
    if config.paced is None:
        return backend, PaceStats
    devices = paced_devices.read(Path(config.paced))
    pace = Pace(devices.dilation)
    return PacedBackend(backend, devices, pace), lambda: pace.stats


class _ExpertLoader:
    """Loads and drops experts in a background thread, one Hold message after the other.

    Reading weights must not delay clients. A server that joined digests its experts while no Hold waits.
    """

    def __init__(
        self,
        supervisor: StreamConnection,
        backend: ExpertBackend,
        endpoint: Endpoint,
        config: ExpertServerConfig,
        stamp: str,
        digests: DigestQueue | None,
        job: JoinedJob | None = None,
    ) -> None:
        """stamp: identifies the checkpoint's files. digests: None for a server that was started by the
        supervisor. job: one that this process may join."""
        self._supervisor = supervisor
        self._backend = backend
        self._endpoint = endpoint
        self._config = config
        self._stamp = stamp
        self._digests = digests
        self._job = job
        self._hold_messages: queue.SimpleQueue[messages.Hold | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="loading", daemon=True)
        self._thread.start()

    def change(self, hold: messages.Hold) -> None:
        """Load the experts of `hold` and drop all others, in the background."""
        self._hold_messages.put(hold)

    def close(self) -> None:
        """End the thread, and wait until it has finished the current message. Leaves out all others.

        A thread that is in compiled code while Python ends would abort the process.
        """
        while not self._hold_messages.empty():
            with contextlib.suppress(queue.Empty):
                self._hold_messages.get_nowait()
        self._hold_messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (hold := self._next()) is not None:
            try:
                with fingerprint.guard_unchanged(Path(self._config.model), self._stamp):
                    self._backend.load(hold.experts)
                self._backend.keep_only(hold.experts)
                self._report(hold)
            except ConnectionLost:
                return
            except MoesaicError as error:
                self._fail(error)

    def _fail(self, error: MoesaicError) -> None:
        with contextlib.suppress(ConnectionLost):  # the main loop notices it too
            self._supervisor.send(messages.WorkerFailed(str(error), user_error=True))

    def _next(self) -> messages.Hold | None:
        """Wait for the next message. Digests experts meanwhile.

        A server that cannot read its experts leaves: nobody would ever compare them.
        """
        while self._digests is not None and self._digests and self._hold_messages.empty():
            try:
                self._supervisor.send(messages.Digests(self._digests.compute_next()))
            except ConnectionLost:
                return None
            except MoesaicError as error:
                self._fail(error)
                self._supervisor.close()
                return None
        return self._hold_messages.get()

    def _report(self, hold: messages.Hold) -> None:
        """Report to the supervisor that the experts of `hold` are loaded."""
        name, threads = self._backend.name, self._config.threads
        weights, joins = self._config.layout.weights, self._job is not None and self._job.can_join
        self._supervisor.send(messages.HoldReply(hold.version, self._endpoint, name, threads, weights, joins))
        if self._digests is not None:
            self._digests.add(hold.experts)


def _report(
    supervisor: StreamConnection,
    server: ExpertServer,
    pace: Callable[[], PaceStats],
    residency: Callable[[], ResidencyStats],
    stop_event: threading.Event,
) -> None:
    """Report counters regularly, as signs of life.

    It runs in its own thread because the main loop may be in a long run.
    """
    reported_pairs = -1
    while not stop_event.is_set():
        counters = server.counters
        stats = ExpertServerStats(
            clients=server.clients,
            waiting_pairs=server.waiting_pairs,
            pairs=counters.pairs,
            runs=counters.runs,
            expert_runs=counters.expert_runs,
            busy_seconds=counters.busy_seconds,
            residency=residency(),
            pace=pace(),
        )
        load = counters.load.tolist() if counters.pairs != reported_pairs else []
        reported_pairs = counters.pairs
        try:
            supervisor.send(messages.ServerReport(stats, load))
        except ConnectionLost:
            return
        stop_event.wait(REPORT_SECONDS)
