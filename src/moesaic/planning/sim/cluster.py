"""Builds a simulated cluster from a scenario, and runs it.

Question: How is a cluster simulated?
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile
from moesaic.core.tokens import IntArray
from moesaic.core.topology import Topology
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.sim import durations
from moesaic.planning.sim.client import SimulatedExperts
from moesaic.planning.sim.connection import Call
from moesaic.planning.sim.device import Device, HostLinks, Span, Stream
from moesaic.planning.sim.durations import Durations
from moesaic.planning.sim.executor import SimulatedExecutor
from moesaic.planning.sim.figures import CallTimes, Figures, HostLink, Sample, Spread
from moesaic.planning.sim.fleet import Fleet, first_placement
from moesaic.planning.sim.front import Front, generate_items
from moesaic.planning.sim.routes import Routes
from moesaic.planning.sim.scenario import Fault, Scenario
from moesaic.planning.sim.server import SimulatedServer
from moesaic.planning.sim.shape import Shape
from moesaic.planning.sim.timeline import SAMPLE, Timeline
from moesaic.planning.sim.worker import SimulatedWorker
from moesaic.policy.fleet.relays import HOP, Relays
from moesaic.policy.fleet.replicas import Replicas, ReplicaTimeout
from moesaic.policy.placement.dispatch import Dispatch, RoundRobin, least_loaded
from moesaic.policy.placement.solvers import SOLVERS
from moesaic.policy.placement.solvers.link_aware import solve_for_links
from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.microqueue import QueuePolicy
from moesaic.policy.scheduling.minimum_batch import Decisions
from moesaic.policy.scheduling.schedulers.actions import Scheduler
from moesaic.policy.scheduling.schedulers.asynchronous import AsyncScheduler
from moesaic.policy.scheduling.schedulers.barrier import BarrierScheduler
from moesaic.policy.scheduling.schedulers.expert_server import ExpertServerScheduler, StartRule
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler
from moesaic.policy.scheduling.schedulers.server_setup import (
    IN_ROUNDS,
    SEPARATE,
    queue_policy,
    server_scheduler,
    start_rule,
)

SAMPLES = 200
"""Number of moments at which queues are looked at."""


class KnownPrompts(KVBlocks):
    """KV blocks of a worker that gets the keys and values of prompts from elsewhere.

    A request that joins has one row to compute: that of its last known token.
    """

    def allocate(
        self, request_id: int, token_ids: IntArray, reusable: int, spare: int = 0, salt: bytes = b""
    ) -> int | None:
        """Allocate as `KVBlocks` does. The returned number need not be a multiple of block_size."""
        num_known = super().allocate(request_id, token_ids, reusable, spare, salt)
        return None if num_known is None else len(token_ids) - 1


class SimulatedCluster:
    """Workers, servers and requests in virtual time."""

    def __init__(
        self,
        scenario: Scenario,
        model: ModelSizes,
        span: Span | None = None,
        routes: Routes | None = None,
        dispatch: Dispatch | None = None,
        topology: Topology | None = None,
        layer_ratio: float = 1.0,
    ) -> None:
        """span: gets every run of every device. routes, dispatch, topology: in place of the scenario's.
        layer_ratio: layers for which each simulated one stands; a relay needs that many times as long.

        Raises ConfigError for files that cannot be read, and for sizes that do not fit.
        """
        self.scenario = scenario
        self.model = model.name
        self.shape = Shape.from_scenario(scenario, model)
        if routes is not None:
            self.shape = replace(self.shape, routes=routes)
        self.devices = durations.build_scenario_devices(scenario, model)
        self.timeline = Timeline()
        topology, is_colocated = topology or scenario.topology, scenario.servers.beside_workers
        self.links = None if topology is None else HostLinks(self.timeline, topology, is_colocated)
        """The links between hosts. None without a topology."""
        if self.links is not None:
            self.links.check(scenario.workers.count)
        layers, sampler = len(self.shape.layout.layers), scenario.workers.sampler_ms
        self.durations = Durations(self.devices, layers + 1, None if sampler is None else 1e-3 * sampler)
        self._span, self._dispatch, self._hop = span, dispatch, layer_ratio * HOP
        self.hardware: dict[str, Device] = {}
        """The devices by name."""
        self.streams: dict[str, Stream] = {}
        """What each device sends."""
        self.record = Record(self)
        self.front = self._front()
        self.workers = [self._worker(number) for number in range(scenario.workers.count)]
        self.past_workers: list[tuple[int, SimulatedWorker]] = []
        """Number and process of those that died."""
        hosts = None if topology is None else topology.server_hosts(scenario.servers.count)
        placement = first_placement(scenario, self.shape.layout, self._solve_placement(), hosts)
        self.fleet = Fleet(self.timeline, scenario, self.shape.layout, placement, self._server, self.front)

    def run(self) -> Figures:
        """Simulate the whole duration. Returns what was measured after the warm-up."""
        scenario, timeline = self.scenario, self.timeline
        self.fleet.begin([worker.executor.experts for worker in self.workers])
        self.front.begin(self.workers, generate_items(scenario))
        for fault in scenario.faults:
            if fault.worker is not None:
                timeline.schedule(fault.at, partial(self._strike, fault, fault.worker))
        for sample in range(1, SAMPLES + 1):
            timeline.schedule(sample * scenario.duration / SAMPLES, self.record.sample, SAMPLE)
        timeline.schedule(scenario.warm_up, self.record.begin, SAMPLE)
        timeline.run(scenario.duration)
        return self.record.figures()

    def _strike(self, fault: Fault, number: int) -> None:
        """A worker dies."""
        if number in self.front.lost_workers:
            return
        worker = self.workers[number]
        self.fleet.note(f"worker {number} dies")
        worker.die()
        self.fleet.remove_client(worker.executor.experts)
        self.past_workers.append((number, worker))
        self.front.lose_worker(number)
        if fault.back is not None:
            self.timeline.schedule(self.timeline.now + fault.back, partial(self._return, number))

    def _return(self, number: int) -> None:
        """A new process takes the place of a dead worker's."""
        self.workers[number] = worker = self._worker(number)
        self.fleet.note(f"worker {number} is back")
        self.fleet.add_client(worker.executor.experts)
        self.front.replace_worker(number, worker)

    def _solve_placement(self) -> Placement | None:
        table, routing = self.scenario.placement, self.scenario.routing
        if table.kind != "solver" or routing.file is None:
            return None
        if table.solver not in SOLVERS:
            raise ConfigError.field("placement.solver", table.solver, ", ".join(SOLVERS))
        profile = Profile.load(self.scenario.path(routing.file))
        servers, seed = self.scenario.servers.count, self.scenario.seed
        clusters = SOLVERS[table.solver](profile, servers, seed)
        topology = None if self.links is None else self.links.topology
        if topology is not None and topology.workers:
            clusters = solve_for_links(profile, clusters, topology.prices(servers), seed)
        return clusters.placement(profile.layers, profile.model)

    # ---- parts

    @property
    def _blocks(self) -> int:
        """KV blocks of a worker."""
        table = self.scenario.workers
        tokens = table.kv_tokens
        if tokens is None:
            tokens = table.max_num_seqs * table.max_model_len
        return max(1, tokens // table.block_size)

    def _front(self) -> Front:
        scenario = self.scenario
        dispatch = RoundRobin() if scenario.workers.dispatch == "round-robin" else least_loaded
        block_size, clients = scenario.workers.block_size, scenario.workload.clients
        front = Front(self.timeline, self._dispatch or dispatch, block_size, self._blocks, clients)
        ttft, itl = scenario.objectives.ttft_ms, scenario.objectives.itl_ms
        front.slo_ttft = None if ttft is None else 1e-3 * ttft
        front.slo_itl = None if itl is None else 1e-3 * itl
        return front

    def _device(self, name: str) -> tuple[Device, Stream]:
        # A worker and the server beside it have the same device, so the second one finds it here.
        if name not in self.hardware:
            self.hardware[name] = Device(name, self.timeline, self._span)
            self.streams[name] = Stream(name, self.timeline, self.devices.link)
            if self.links is not None:
                self.streams[name].channel = self.links.channel
        return self.hardware[name], self.streams[name]

    def _worker(self, number: int) -> SimulatedWorker:
        scenario, layout = self.scenario, self.shape.layout
        kind, is_colocated = scenario.schedule.kind, scenario.servers.beside_workers
        device, stream = self._device(f"device {number}" if is_colocated else f"worker {number}")
        row, links = layout.hidden * scenario.links.number_bytes, self.links
        experts = SimulatedExperts(
            self.timeline,
            stream,
            Replicas(
                ReplicaTimeout(floor=scenario.schedule.replica_timeout),
                own_server=number if is_colocated else None,
                pair_bytes=2 * row,
            ),
            layout.num_experts,
            row,
            portion_rows=self._decisions.partial_answer_rows if kind in SEPARATE else None,
            every_server=kind in IN_ROUNDS,
            on_call_answered=self.record.record_answer,
            way=None if links is None else partial(links.way, number),
            relays=Relays(scenario.schedule.relay, row, self._hop),
            partial=scenario.schedule.combine == "partial",
        )
        executor = SimulatedExecutor(
            f"attention worker {number}",
            self.timeline,
            device,
            experts,
            self.shape.routes,
            self.durations.attention,
            self.front.reports(number),
            layerwise=kind in SEPARATE,
        )
        event = 1e-6 * scenario.workers.event_us
        handling = (lambda _: event) if event else None
        return SimulatedWorker(self.timeline, self._scheduler(), executor, handling=handling)

    @cached_property
    def _decisions(self) -> Decisions:
        """What the devices' curves say, unless the scenario gives the rows from which a run begins.

        Servers beside workers share their devices, as processes share the cores of a CPU.
        """
        run_rows, layout = self.scenario.schedule.run_rows, self.shape.layout
        curves = replace(self.devices.curves, shares_cores=self.scenario.servers.beside_workers)
        if run_rows is not None:
            curves = replace(curves, thresholds=replace(curves.thresholds, separate_rows=run_rows))
        process_counts = self.scenario.servers.count, self.scenario.workers.count
        return Decisions(curves, layout.num_experts, layout.top_k, *process_counts)

    def _scheduler(self) -> Scheduler:
        table, workers, layout = self.scenario.schedule, self.scenario.workers, self.shape.layout
        limits = BatchLimits(workers.max_num_seqs, workers.max_num_batched_tokens, workers.max_model_len)
        kind = KVBlocks if self.scenario.workload.prefill else KnownPrompts
        blocks = kind(self._blocks, workers.block_size, prefix_reuse=False)
        if table.kind == "lockstep":
            return LockstepScheduler(limits, blocks, table.inflight_batches)
        if table.kind == "barrier":
            return BarrierScheduler(limits, blocks)
        assert table.kind in ("async", "auto"), f"the simulator has no schedule {table.kind!r}"
        policy = self._worker_policy()
        return AsyncScheduler(limits, blocks, policy, len(layout.layers), layout.top_k, self._decisions)

    def _worker_policy(self) -> QueuePolicy:
        table, urgency = self.scenario.schedule, self.scenario.queues.urgency(None)
        return queue_policy(table.kind, table.queue_policy, urgency, table.queue_history)

    def _server(self, number: int) -> SimulatedServer:
        scenario, layout = self.scenario, self.shape.layout
        is_colocated = scenario.servers.beside_workers
        device, stream = self._device(f"device {number}" if is_colocated else f"server {number}")
        rule = self._start_rule(len(self.fleet.placement.server_experts(number).get(0, ())))
        return SimulatedServer(
            number,
            self.timeline,
            device,
            stream,
            self._server_scheduler(rule),
            self.durations.experts,
            (len(layout.layers), layout.num_experts),
            layout.hidden * scenario.links.number_bytes,
            scenario.schedule.combine == "partial",
            self._hop,
        )

    def _server_scheduler(self, rule: StartRule) -> ExpertServerScheduler:
        layout, policy = self.shape.layout, self._server_policy()
        if self.scenario.servers.by_expert:
            return ExpertServerScheduler(layout.layers, policy, rule, layout.num_experts)
        return server_scheduler(self.scenario.schedule.kind, layout.layers, policy, rule, self._decisions)

    def _start_rule(self, experts: int) -> StartRule:
        queues = self.scenario.queues
        pairs, wait = queues.expert_batch_pairs, queues.expert_batch_wait / 1000
        return start_rule(self.scenario.schedule.kind, self._decisions, experts, pairs, wait)

    def _server_policy(self) -> QueuePolicy:
        table, history = self.scenario.schedule, self.scenario.servers.queue_history
        return queue_policy(table.kind, table.queue_policy, None, history)


def simulate(scenario: Scenario, model: ModelSizes, **changes: object) -> Figures:
    """The figures of a scenario, with other values of its fields outside of tables."""
    return SimulatedCluster(replace(scenario, **changes), model).run()  # type: ignore[arg-type]


@dataclass
class _Snapshot:
    """Counters at one moment."""

    time: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    sent_bytes: dict[str, Counter[str]] = field(default_factory=dict)
    sending: dict[str, float] = field(default_factory=dict)
    channels: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """(from host, to host) -> bytes and seconds so far."""
    idle: dict[str, dict[str, float]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    server_pairs: dict[int, int] = field(default_factory=dict)
    in_flight: float = 0.0


def _host_links(begin: _Snapshot, end: _Snapshot) -> dict[str, dict[str, HostLink]]:
    """What went from host to host between two snapshots."""
    host_links: dict[str, dict[str, HostLink]] = {}
    for (sender, receiver), (size, busy) in sorted(end.channels.items()):
        size_before, busy_before = begin.channels.get((sender, receiver), (0, 0.0))
        share = (busy - busy_before) / (end.time - begin.time)
        host_links.setdefault(sender, {})[receiver] = HostLink(size - size_before, share)
    return host_links


def _share(counts: Counter[str]) -> float:
    """Share of the runs that were partial."""
    return counts["partial_runs"] / max(1, counts["runs"])


def _add_idle(idle: dict[str, dict[str, float]], name: str, causes: dict[str, float]) -> None:
    """Add the seconds of one process to those of earlier ones of this name, by cause."""
    seconds = idle.setdefault(name, {})
    for cause in causes:
        seconds[cause] = seconds.get(cause, 0.0) + causes[cause]


class Record:
    """Counts while the cluster runs."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._began = _Snapshot()
        self._samples: list[Sample] = []
        self._tokens = 0
        self._times = [0.0] * 4
        self._pairs = 0

    def begin(self) -> None:
        """The warm-up is over."""
        self._began = self._snapshot()
        self._times, self._pairs = [0.0] * 4, 0

    def record_answer(self, call: Call, now: float) -> None:
        """A worker has the whole answer of a call."""
        pairs, times = len(call.pairs), self._times
        times[0] += pairs * (call.arrival_time - call.send_time)
        times[1] += pairs * (call.begin_time - call.arrival_time)
        times[2] += pairs * (call.end_time - call.begin_time)
        times[3] += pairs * (now - call.end_time)
        self._pairs += pairs

    def sample(self) -> None:
        """Look at the queues."""
        cluster = self._cluster
        stats = [worker.scheduler.stats() for worker in cluster.workers]
        pairs = sum(server.waiting_pairs for server in cluster.fleet.servers.values() if server.alive)
        tokens, now = sum(len(life.times) for life in cluster.front.lives), cluster.timeline.now
        last_time = self._samples[-1].time if self._samples else 0.0
        rate = (tokens - self._tokens) / (now - last_time)
        self._tokens = tokens
        waiting, running = sum(stat.waiting for stat in stats), sum(stat.running for stat in stats)
        self._samples.append(Sample(now, waiting, running, pairs, rate))

    def _snapshot(self) -> _Snapshot:
        cluster, now = self._cluster, self._cluster.timeline.now
        cluster.front.settle()
        workers = [*cluster.past_workers, *enumerate(cluster.workers)]
        stats = [worker.scheduler.stats() for _, worker in workers]
        executors = [worker.executor for _, worker in workers]
        counts = Counter(
            runs=sum(item.steps for item in stats),
            partial_runs=sum(item.partial_runs for item in stats),
            run_rows=sum(item.run_rows for item in executors),
            segments=sum(item.segments for item in executors),
            server_runs=sum(server.runs for server in cluster.fleet.all_servers),
        )
        idle: dict[str, dict[str, float]] = {}
        for number, worker in workers:
            _add_idle(idle, f"attention worker {number}", worker.idle.seconds)
        pairs: Counter[int] = Counter()
        for server in cluster.fleet.all_servers:
            _add_idle(idle, f"expert server {server.number}", server.idle.seconds)
            pairs[server.number] += int(server.load.sum())
        return _Snapshot(
            time=now,
            busy={name: device.busy_until(now) for name, device in cluster.hardware.items()},
            sent_bytes={name: Counter(stream.sent_bytes) for name, stream in cluster.streams.items()},
            sending={name: stream.busy for name, stream in cluster.streams.items()},
            channels={} if cluster.links is None else cluster.links.measure_traffic(),
            idle=idle,
            counts=counts,
            server_pairs=dict(pairs),
            in_flight=cluster.front.in_flight_seconds,
        )

    def figures(self) -> Figures:
        """The measurement up to now."""
        cluster, begin, end = self._cluster, self._began, self._snapshot()
        span = end.time - begin.time
        counts = end.counts - begin.counts
        pairs = {
            number: end.server_pairs[number] - begin.server_pairs.get(number, 0)
            for number in end.server_pairs
        }
        workers = [*(worker for _, worker in cluster.past_workers), *cluster.workers]
        stats = [worker.executor.experts.replicas.stats for worker in workers]
        schedule = cluster.scenario.schedule.kind
        times = [item / max(1, self._pairs) for item in self._times]
        return Figures(
            model=cluster.model,
            devices=cluster.devices.source,
            schedule=schedule,
            seconds=span,
            **self._latencies(begin.time, span),
            in_flight=(end.in_flight - begin.in_flight) / span,
            preemptions=sum(worker.scheduler.stats().preemptions for worker in workers),
            rows_per_run=counts["run_rows"] / max(1, counts["segments"]),
            pairs_per_run=sum(pairs.values()) / max(1, counts["server_runs"]),
            partial_runs=_share(counts) if schedule in SEPARATE else None,
            call=CallTimes(*times),
            utilisation={name: (busy - begin.busy.get(name, 0.0)) / span for name, busy in end.busy.items()},
            idle={
                name: {
                    cause: (idle_seconds - begin.idle.get(name, {}).get(cause, 0.0)) / span
                    for cause, idle_seconds in causes.items()
                }
                for name, causes in end.idle.items()
            },
            link_bytes={
                name: dict(sent_bytes - begin.sent_bytes.get(name, Counter()))
                for name, sent_bytes in end.sent_bytes.items()
            },
            link_utilisation={
                name: (busy - begin.sending.get(name, 0.0)) / span for name, busy in end.sending.items()
            },
            host_links=_host_links(begin, end),
            expert_load=[pairs[number] for number in sorted(pairs)],
            failovers=sum(item.failovers for item in stats),
            silent_failovers=sum(item.silent_failovers for item in stats),
            resent_pairs=sum(item.resent_pairs for item in stats),
            changes=cluster.fleet.changes,
            samples=self._samples,
            events=cluster.timeline.events,
        )

    def _latencies(self, begin: float, span: float) -> dict[str, Any]:
        """The figures of requests and tokens, as fields of `Figures`."""
        front = self._cluster.front
        tokens, itl, ttft, tpot, queue_seconds, good, num_completed = 0, [], [], [], [], 0, 0
        for life in front.lives:
            times = np.array(life.times)
            in_measurement = times >= begin
            tokens += int(np.count_nonzero(in_measurement))
            itl.append(np.diff(times)[in_measurement[1:]])
            if not in_measurement.any():
                continue
            first = life.times[0] - life.request.arrival
            mean = (life.times[-1] - life.times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
            if in_measurement[0]:
                ttft.append(first)
                queue_seconds.append(life.queue_seconds or 0.0)
            if life.has_ended:
                num_completed += 1
                tpot += [mean] if len(times) > 1 else []
                good += self._good(first, mean)
        has_objectives = front.slo_ttft is not None or front.slo_itl is not None
        return {
            "requests": sum(life.request.arrival >= begin for life in front.lives),
            "completed": num_completed,
            "tokens": tokens,
            "throughput": tokens / span,
            "goodput": good / span if has_objectives else None,
            "good_share": good / max(1, num_completed) if has_objectives else None,
            "queue_seconds": Spread.from_values(queue_seconds),
            "ttft": Spread.from_values(ttft),
            "tpot": Spread.from_values(tpot),
            "itl": Spread.from_values([] if not itl else np.concatenate(itl).tolist()),
        }

    def _good(self, first: float, mean: float) -> bool:
        front = self._cluster.front
        return (front.slo_ttft is None or first <= front.slo_ttft) and (
            front.slo_itl is None or mean <= front.slo_itl
        )
