"""Builds a simulated cluster from a scenario, and runs it.

Question: How is a cluster simulated?
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile
from moesaic.core.tokens import IntArray
from moesaic.core.topology import Topology
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.sim import durations
from moesaic.planning.sim.client import SimulatedExperts
from moesaic.planning.sim.device import Device, HostLinks, Span, Stream
from moesaic.planning.sim.durations import Durations
from moesaic.planning.sim.executor import SimulatedExecutor
from moesaic.planning.sim.figures import Figures, Record
from moesaic.planning.sim.fleet import Fleet, first_placement
from moesaic.planning.sim.front import Front, items
from moesaic.planning.sim.routes import Routes
from moesaic.planning.sim.scenario import Scenario
from moesaic.planning.sim.server import SimulatedServer
from moesaic.planning.sim.shape import Shape
from moesaic.planning.sim.timeline import SAMPLE, Timeline
from moesaic.planning.sim.worker import SimulatedWorker
from moesaic.policy.fleet.relays import HOP, Relays
from moesaic.policy.fleet.replicas import Replicas
from moesaic.policy.placement.dispatch import Dispatch, RoundRobin, least_loaded
from moesaic.policy.placement.solvers import SOLVERS
from moesaic.policy.placement.solvers.priced import priced
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

    def allocate(self, request_id: int, token_ids: IntArray, reusable: int, spare: int = 0) -> int | None:
        """See `KVBlocks`. The number need not be a multiple of block_size."""
        found = super().allocate(request_id, token_ids, reusable, spare)
        return None if found is None else len(token_ids) - 1


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
        folded: float = 1.0,
    ) -> None:
        """span: gets every run of every device. routes, dispatch, topology: in place of the scenario's.
        folded: layers for which each simulated one stands; a relay needs that many times as long.

        Raises ConfigError for files that cannot be read, and for sizes that do not fit.
        """
        self.scenario = scenario
        self.model = model.name
        self.shape = Shape.of(scenario, model)
        if routes is not None:
            self.shape = replace(self.shape, routes=routes)
        self.devices = durations.of_scenario(scenario, model)
        self.timeline = Timeline()
        topology, beside = topology or scenario.topology, scenario.servers.beside_workers
        self.links = None if topology is None else HostLinks(self.timeline, topology, beside)
        """The links between hosts. None without a topology."""
        if self.links is not None:
            self.links.check(scenario.workers.count)
        layers, sampler = len(self.shape.layout.layers), scenario.workers.sampler_ms
        self.durations = Durations(self.devices, layers + 1, None if sampler is None else 1e-3 * sampler)
        self._span, self._dispatch, self._hop = span, dispatch, folded * HOP
        self.hardware: dict[str, Device] = {}
        """The devices by name."""
        self.streams: dict[str, Stream] = {}
        """What each device sends."""
        self.record = Record(self)
        self.front = self._front()
        self.workers = [self._worker(number) for number in range(scenario.workers.count)]
        hosts = None if topology is None else topology.server_hosts(scenario.servers.count)
        placement = first_placement(scenario, self.shape.layout, self._solved(), hosts)
        self.fleet = Fleet(self.timeline, scenario, self.shape.layout, placement, self._server, self.front)

    def run(self) -> Figures:
        """Simulate the whole duration. Returns what was measured after the warm-up."""
        scenario, timeline = self.scenario, self.timeline
        self.fleet.begin([worker.executor.experts for worker in self.workers])
        self.front.begin(self.workers, items(scenario))
        for sample in range(1, SAMPLES + 1):
            timeline.at(sample * scenario.duration / SAMPLES, self.record.sample, SAMPLE)
        timeline.at(scenario.warm_up, self.record.begin, SAMPLE)
        timeline.run(scenario.duration)
        return self.record.figures()

    def _solved(self) -> Placement | None:
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
            clusters = priced(profile, clusters, topology.prices(servers), seed)
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
        named = RoundRobin() if scenario.workers.dispatch == "round-robin" else least_loaded
        block_size, clients = scenario.workers.block_size, scenario.workload.clients
        front = Front(self.timeline, self._dispatch or named, block_size, self._blocks, clients)
        ttft, itl = scenario.objectives.ttft_ms, scenario.objectives.itl_ms
        front.slo_ttft = None if ttft is None else 1e-3 * ttft
        front.slo_itl = None if itl is None else 1e-3 * itl
        return front

    def _device(self, name: str) -> tuple[Device, Stream]:
        if name not in self.hardware:
            self.hardware[name] = Device(name, self.timeline, self._span)
            self.streams[name] = Stream(name, self.timeline, self.devices.link)
            if self.links is not None:
                self.streams[name].channel = self.links.channel
        return self.hardware[name], self.streams[name]

    def _worker(self, number: int) -> SimulatedWorker:
        scenario, layout = self.scenario, self.shape.layout
        kind, beside = scenario.schedule.kind, scenario.servers.beside_workers
        device, stream = self._device(f"device {number}" if beside else f"worker {number}")
        row, links = layout.hidden * scenario.links.number_bytes, self.links
        experts = SimulatedExperts(
            self.timeline,
            stream,
            Replicas(own=number if beside else None, pair_bytes=2 * row),
            layout.num_experts,
            row,
            portion_rows=self._decisions.told_rows if kind in SEPARATE else None,
            every_server=kind in IN_ROUNDS,
            done=self.record.answered,
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
        given, layout = self.scenario.schedule.run_rows, self.shape.layout
        curves = replace(self.devices.curves, shared=self.scenario.servers.beside_workers)
        if given is not None:
            curves = replace(curves, thresholds=replace(curves.thresholds, separate_rows=given))
        others = self.scenario.servers.count, self.scenario.workers.count
        return Decisions(curves, layout.num_experts, layout.top_k, *others)

    def _scheduler(self) -> Scheduler:
        table, workers, layout = self.scenario.schedule, self.scenario.workers, self.shape.layout
        limits = BatchLimits(workers.max_num_seqs, workers.max_num_batched_tokens, workers.max_model_len)
        kind = KVBlocks if self.scenario.workload.prefill else KnownPrompts
        blocks = kind(self._blocks, workers.block_size, prefix_reuse=False)
        if table.kind == "lockstep":
            return LockstepScheduler(limits, blocks, table.inflight_batches)
        if table.kind == "barrier":
            return BarrierScheduler(limits, blocks)
        policy = self._worker_policy()
        return AsyncScheduler(limits, blocks, policy, len(layout.layers), layout.top_k, self._decisions)

    def _worker_policy(self) -> QueuePolicy:
        table, urgency = self.scenario.schedule, self.scenario.queues.urgency(None)
        return queue_policy(table.kind, table.queue_policy, urgency, table.queue_history)

    def _server(self, number: int) -> SimulatedServer:
        scenario, layout = self.scenario, self.shape.layout
        beside = scenario.servers.beside_workers
        device, stream = self._device(f"device {number}" if beside else f"server {number}")
        rule = self._start_rule(len(self.fleet.placement.of(number).get(0, ())))
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
