"""Changes of a running cluster, one process at a time, while it serves.

A change is a generator. It does what it can, yields while it has to wait, and is resumed by the supervisor
after each event. Everything that can fail is done before any client routes by the new placement. So a change
either succeeds or leaves everything as it was:

    the new server loads its share; the others load their additional experts    (dropped on failure)
    the new placement is published
    once no call under way was routed by the old one, servers drop the experts they no longer need

Question: How does the supervisor change the number of processes (`moesaic scale`)?
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace

from moesaic.cluster.autoscaling import autoscale_rules
from moesaic.cluster.balancing import BANDWIDTH
from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.member import Member, Role, Stage
from moesaic.cluster.members import Members
from moesaic.cluster.process_room import measure_room
from moesaic.cluster.publishing import Publisher, have_experts, union
from moesaic.cluster.router import Router
from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError, ScalingError
from moesaic.core.experts import ExpertLayout
from moesaic.core.placement import Placement
from moesaic.policy.fleet.autoscale import ROLES
from moesaic.policy.fleet.bounds import Room, find_bound, find_excess
from moesaic.policy.placement import balance, returning
from moesaic.policy.placement.returning import Kept

LOG = logging.getLogger(__name__)

COUNT_NAMES = ("expert_servers", "attention_workers", "prefill_workers")
"""The numbers of processes that can be changed, as settings name them, in the order of parameters."""

Change = Generator[bool, None, None]
"""A change under way. It ends, or raises ScalingError after everything is as it was before. It yields whether
an error may be thrown into it now, which it then raises in the same way."""


class ReplacedError(ScalingError):
    """A newer change takes over. The step under way was undone, but not the steps before it."""


@dataclass(frozen=True)
class ScalingLimits:
    """How long each part of a change may take."""

    hosts: float = 600.0
    """Seconds that a new process waits for a host."""
    loading: float = 900.0
    """Seconds until a new process serves."""
    taking: float = 900.0
    """Seconds until servers have loaded the experts that they get."""
    connecting: float = 2.0
    """Seconds that clients have to connect to a new server before it gets experts."""
    draining: float = 30.0
    """Seconds that an attention worker has to finish its requests. The remaining ones move to other
    workers."""
    nudge: float = 1.0
    """Seconds between two reminders to workers that still wait for late answers."""
    attempts: int = 3
    """Number of deaths after which a new process is given up."""


@dataclass(frozen=True)
class JoinedProcess:
    """A process that joined by itself, from this or another host."""

    process: RemoteProcess
    weights: str
    """Fingerprint that its checkpoint must have."""


class Changes:
    """Makes the changes of one cluster. load: returns [L, E] the load that placements should balance."""

    def __init__(
        self,
        members: Members,
        publisher: Publisher,
        router: Router,
        cluster: ClusterConfig,
        load: Callable[[], balance.Load],
        clock: Callable[[], float],
        limits: ScalingLimits | None = None,
        hosts: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """hosts: returns server -> its host."""
        self.layout: ExpertLayout | None = None
        """Set when the first worker has sent it."""
        self.copy_bandwidth: float = BANDWIDTH
        """Bytes/s at which a server loaded experts in the last change; before the first one, a guess."""
        self._members = members
        self._publisher = publisher
        self._router = router
        self._cluster = cluster
        self._load = load
        self._clock = clock
        self._limits = limits or ScalingLimits()
        self._hosts = hosts

    # ---- the changes

    def scale(
        self,
        servers: int | None,
        workers: int | None,
        prefill: int | None = None,
        *,
        former_counts: Sequence[int | None] | None = None,
    ) -> Change:
        """Changes to these numbers of expert servers, attention workers and prefill workers. A role without a
        number (None) is left alone: processes of it may join and die meanwhile. With a number of prefill
        workers, those that were given up are forgotten.

        If a step fails, the steps before it are undone. After a ReplacedError they are not: the newer change
        goes on from there. former_counts: the numbers to go back to; None: those when the change begins.
        """
        counts, placement = (servers, workers, prefill), self._publisher.placement
        if former_counts is None:
            now = self.count_processes()
            former_counts = [None if n is None else present for n, present in zip(counts, now, strict=True)]
        self.resolve_counts(*counts)
        try:
            yield from self._scale_to(*counts)
        except ReplacedError:
            raise
        except Exception as error:
            yield from self.revert(error, former_counts, placement)  # it raises an error that says so
            raise
        for member in self._members.prefill_workers if prefill is not None else ():
            if member.stage is Stage.STOPPED:
                self._members.remove(member)

    def revert(
        self, error: Exception, counts: Sequence[int | None], placement: Placement | None = None
    ) -> Change:
        """Changes back to the numbers before a change that `error` ended, then raises that error.

        placement: that before the change. None: any.
        """
        conflict = isinstance(error, ScalingError) and error.conflict
        try:
            yield from self._scale_to(*counts)
            yield from self._restore(placement)
        except ReplacedError:
            raise
        except Exception as second:
            raise ScalingError(f"{error}; going back failed too: {second}") from error
        raise ScalingError(f"{error}; the cluster is as it was", conflict) from error

    def resolve_counts(self, *numbers: int | None) -> tuple[int, int, int]:
        """The numbers of `COUNT_NAMES` after a change to `numbers`. Raises as `check` does."""
        servers, workers, prefill = (
            now if number is None else number
            for number, now in zip(numbers, self.count_processes(), strict=True)
        )
        self.check(servers, workers, prefill)
        return servers, workers, prefill

    def check(self, servers: int, workers: int, prefill: int = 0) -> None:
        """Raises ConfigError for numbers below 1, or below 0 prefill workers, and ScalingError for numbers
        that other settings forbid."""
        has_servers = self._cluster.expert_servers > 0
        if prefill < 0:
            raise ConfigError.field("prefill_workers", prefill, "at least 0")
        if prefill > 0 and self._cluster.prefill_workers == 0:
            raise ScalingError("no attention worker receives KV; start with --prefill-workers", True)
        if workers < 1:
            raise ConfigError.field("attention_workers", workers, "at least 1")
        if servers < 1 and has_servers:
            raise ConfigError.field("expert_servers", servers, "at least 1")
        if servers > 0 and not has_servers:
            raise ScalingError("the attention workers compute the experts; see --expert-servers", True)
        if has_servers and servers < self._cluster.min_replicas:
            least = self._cluster.min_replicas
            raise ScalingError(f"expert_servers: got {servers}; --min-replicas needs at least {least}", True)
        self._check_limits(servers, workers, prefill)
        excess = find_excess(
            _by_name(servers, workers, prefill), _by_name(*self.count_processes()), self._room()
        )
        if excess is not None:
            raise ConfigError.field(excess.role, excess.count, excess.bound.describe())
        groups = (
            (self._members.servers, servers),
            (self._members.workers, workers),
            (self._members.prefill_workers, prefill),
        )
        processes = sum(
            count - sum(process.is_external for process in group[:count]) for group, count in groups
        )
        gpus = self._members.own_gpus
        if gpus is not None and processes > gpus:
            needs = f"--cudagraph-mode full needs a GPU for each of {processes} processes; there are {gpus}"
            raise ScalingError(needs, conflict=True)
        # Servers and workers that joined by themselves are no halves of a pair.
        num_external = sum(member.is_external for member in self._members.servers[:servers])
        num_external -= sum(member.is_external for member in self._members.workers[:workers])
        if self._cluster.enable_expert_parallel and servers - num_external != workers:
            raise ScalingError(
                f"expert_servers: got {servers} with {workers} attention_workers; --enable-expert-parallel "
                f"needs {workers + num_external}, one beside each worker",
                conflict=True,
            )

    def _check_limits(self, *counts: int) -> None:
        """Raises ScalingError for changed numbers of `COUNT_NAMES` that --autoscale does not allow."""
        numbers, now = _by_name(*counts), _by_name(*self.count_processes())
        for role, rule in autoscale_rules(self._cluster).items():
            for name in ROLES[role]:
                number = numbers[name]
                if number != now[name] and not rule.minimum <= number <= rule.maximum:
                    bounds = f"{rule.minimum} to {rule.maximum}"
                    raise ScalingError(f"{name}: got {number}; --autoscale allows {bounds}", True)

    def limit(self, counts: Mapping[str, int]) -> dict[str, int]:
        """The numbers of `counts`, or smaller ones that are in bounds."""
        now, room = _by_name(*self.count_processes()), self._room()
        bounds = {name: find_bound(name, {**now, **counts}, now, room) for name in counts}
        limited_counts = {
            name: count if (bound := bounds[name]) is None else min(count, bound.maximum)
            for name, count in counts.items()
        }
        if not self._cluster.enable_expert_parallel:
            return limited_counts
        pairs = min(limited_counts[name] for name in ROLES["ranks"] if name in limited_counts)
        return {
            name: min(count, pairs) if name in ROLES["ranks"] else count
            for name, count in limited_counts.items()
        }

    def _room(self) -> Room:
        """The room for processes now."""
        workers = [*self._members.workers, *self._members.prefill_workers]
        pids = [worker.child.pid for worker in workers if worker.child is not None]
        num_experts = None if self.layout is None else self.layout.num_experts
        local_pids = [pid for pid in pids if pid is not None]
        return measure_room(self._cluster, num_experts, self._members.launcher.is_remote, local_pids)

    def add_server(self, newcomer: JoinedProcess | None = None) -> Change:
        """Adds a server, which takes its share of the experts. newcomer: None: the launcher
        starts it."""
        numbers = [member.number for member in self._members.servers]
        member = self._members.add(Role.SERVER, True, None if newcomer is None else newcomer.process.capacity)
        if newcomer is not None:
            self._members.set_host(member, newcomer.process)
        try:
            resident_experts = {} if newcomer is None else {member.number: newcomer.process.resident_experts}
            new = self._plan_placement([*numbers, member.number], resident_experts=resident_experts)
            yield from self._move(new, joining=member, newcomer=newcomer)
        except Exception:
            if newcomer is not None and member.complaint is None:
                # Another process failed, as on a host that died. This one joins again.
                newcomer.process.kill()
            self._members.remove(member)
            self._publisher.publish()
            raise
        member.on_trial = False

    def remove_server(self, member: Member, least: int | None = None) -> Change:
        """Removes a server. The others take over its experts, then it ends. least: minimum number of copies,
        in place of min_replicas."""
        yield from self._remove([member], self._members.servers, least)

    def remove_gone(self) -> Change:
        """Removes all servers that have joined and are gone. The others take over their experts.

        They are removed together: while one of them had a place, the others could not finish the change.
        """
        servers = self._members.servers
        lost_servers = [member for member in servers if member.stage is Stage.STOPPED]
        yield from self._remove(
            lost_servers, servers, max(1, min(self._cluster.min_replicas, len(servers) - len(lost_servers)))
        )

    def add_worker(self, role: Role = Role.WORKER, newcomer: JoinedProcess | None = None) -> Change:
        """Adds a worker of either role. It gets new requests once it is ready.

        newcomer: None: the launcher starts it.
        """
        member = self._members.add(role, on_trial=True)
        try:
            if newcomer is None:
                self._members.spawn_worker(member)
            else:
                self._members.adopt(member, newcomer.process, newcomer.weights, self.layout)
            yield from self._wait(lambda: member.stage is Stage.SERVING, self._limits.loading, [member])
        except Exception:
            self._members.remove(member)
            raise
        member.on_trial = False
        self._router.tell_ready()

    def remove_worker(self, member: Member) -> Change:
        """Removes a worker of either role. It gets no new requests and finishes its own, and a prefill worker
        sends their KV. After some time they move instead."""
        if member.stage is Stage.SERVING:
            member.stage = Stage.DRAINING
        self._router.drain(member.worker_id)
        end = self._clock() + self._limits.draining
        while (
            member.child is not None and not self._router.is_drained(member.worker_id) and self._clock() < end
        ):
            yield False
        self._router.leave(member.worker_id)
        self._members.remove(member)
        self._router.tell_ready()

    def rebalance(self, new: Placement) -> Change:
        """Moves experts between the same servers."""
        yield from self._move(new)

    # ---- parts of changes

    def _remove(self, leaving: Collection[Member], servers: Collection[Member], least: int | None) -> Change:
        remaining = [server.number for server in servers if server not in leaving]
        yield from self._move(self._plan_placement(remaining, least), leaving=leaving)
        for member in leaving:
            self._members.remove(member)

    @property
    def _prefill_workers(self) -> list[Member]:
        """The prefill workers that were not given up."""
        return [member for member in self._members.prefill_workers if member.stage is not Stage.STOPPED]

    def count_processes(self) -> tuple[int, int, int]:
        """The numbers of `COUNT_NAMES` now."""
        return len(self._members.servers), len(self._members.workers), len(self._prefill_workers)

    def _scale_to(self, servers: int | None, workers: int | None, prefill: int | None) -> Change:
        """Adds members first, then removes the newest ones. None: leaves the members of this role alone."""
        members, counts = self._members, (servers, workers, prefill)
        # All hosts are asked for at once, so that Ray's autoscaler can add them together.
        members.request_hosts(
            *(now if n is None else n for n, now in zip(counts, self.count_processes(), strict=True))
        )
        while len(members.servers) < (servers or 0):
            yield from self.add_server()
            yield True
        while len(members.workers) < (workers or 0):
            yield from self.add_worker()
            yield True
        while len(self._prefill_workers) < (prefill or 0):
            yield from self.add_worker(Role.PREFILL)
            yield True
        while prefill is not None and len(self._prefill_workers) > prefill:
            yield from self.remove_worker(self._prefill_workers[-1])
            yield True
        while workers is not None and len(members.workers) > workers:
            yield from self.remove_worker(members.workers[-1])
            yield True
        while servers is not None and len(members.servers) > servers:
            yield from self.remove_server(members.servers[-1])
            yield True

    def _restore(self, placement: Placement | None) -> Change:
        """Restores the placement before the change, if its servers still exist."""
        now, servers = self._publisher.placement, {member.number for member in self._members.servers}
        if placement is None or now is None or placement.experts_by_layer == now.experts_by_layer:
            return
        if set(placement.servers) <= servers:
            yield from self._move(replace(placement, version=now.version + 1))

    def _plan_placement(
        self, servers: Collection[int], least: int | None = None, resident_experts: Mapping[int, Kept] = {}
    ) -> Placement:
        """Returns a placement for these servers that moves few experts. resident_experts: see
        `returning.add_servers`."""
        assert self.layout is not None
        load, layers = self._load(), self.layout.layers
        weights = {server: self._members.capacities[server] for server in servers}
        replicas = self._cluster.min_replicas if least is None else least
        previous, redundant = self._publisher.placement, self._cluster.redundant_experts
        if previous is not None and resident_experts:
            previous = returning.add_servers(previous, resident_experts, weights)
        hosts = self._hosts()
        try:
            return balance.place(load, layers, weights, redundant, replicas, previous, hosts=hosts)
        except ConfigError as error:
            raise ScalingError(str(error), conflict=True) from error

    def _move(
        self,
        new: Placement,
        joining: Member | None = None,
        leaving: Collection[Member] = (),
        newcomer: JoinedProcess | None = None,
    ) -> Change:
        """Loads the new experts, publishes the new placement, then drops the old experts."""
        publisher, old = self._publisher, self._publisher.placement
        publisher.next_placement = new
        takers = [
            member
            for member in self._members.servers
            if member is not joining
            and member not in leaving
            and union(member.number, (old, new)) != union(member.number, (old,))
        ]
        try:
            if joining is not None:
                yield from self._join(joining, newcomer)
            start_time, processes = self._clock(), [member.incarnation for member in takers]
            for member in takers:
                publisher.hold(member)
            yield from self._wait(lambda: have_experts(takers), self._limits.taking, takers)
            if processes == [member.incarnation for member in takers]:  # else the time includes a restart
                self._time_copies(old, new, takers, self._clock() - start_time)
        except Exception:
            publisher.next_placement = None
            for member in takers:
                publisher.hold(member)
            raise
        for member in leaving:
            if member.stage is not Stage.STOPPED:
                member.stage = Stage.DRAINING  # even while it is being restarted: it must not serve again
        publisher.serve(new)
        version = publisher.version
        yield from self._settle(version)
        for member in self._members.servers:
            if member not in leaving and union(member.number, (old, new)) != union(member.number, (new,)):
                publisher.hold(member)

    def _time_copies(
        self, old: Placement | None, new: Placement, takers: Collection[Member], seconds: float
    ) -> None:
        """Measures how fast servers load experts, for the next decision whether a move pays."""
        assert self.layout is not None
        taker_numbers = {member.number for member in takers}
        moves = [move for move in balance.moves(old, new) if move.server in taker_numbers]
        if moves:
            self.copy_bandwidth = balance.busiest_bytes(moves, self.layout.expert_bytes) / max(seconds, 1e-3)

    def _settle(self, version: int) -> Change:
        """Waits until no worker has a call under way that was routed by a directory before `version`."""
        next_nudge = self._clock() + self._limits.nudge
        while not self._publisher.is_settled(version):
            yield False
            if self._clock() > next_nudge:
                # A worker without requests notices late answers only when it receives a directory.
                self._publisher.publish()
                next_nudge = self._clock() + self._limits.nudge

    def _join(self, member: Member, newcomer: JoinedProcess | None) -> Change:
        """Waits until a new server has loaded, and until clients have connected to it."""
        assert self.layout is not None
        if newcomer is None:
            self._members.spawn_server(member, self.layout)
        else:
            self._members.adopt(member, newcomer.process, newcomer.weights, self.layout)
        self._publisher.hold(member)
        yield from self._wait(lambda: have_experts([member]), self._limits.loading, [member])
        # Clients connect before they get the new placement, so that their first calls need not wait.
        end = self._clock() + self._limits.connecting
        while member.stats.clients < self._clients() and self._clock() < end:
            yield True

    def _clients(self) -> int:
        return sum(member.in_service for member in self._members.clients)

    def _wait(
        self, is_done: Callable[[], bool], seconds: float = math.inf, members: Collection[Member] = ()
    ) -> Change:
        """Waits for `is_done`. Raises ScalingError if one of `members` cannot do its part, or after
        `seconds`.

        The seconds begin when each has a host.
        """
        start_time = self._clock()
        end = start_time + seconds
        while not is_done():
            for member in members:
                if member.complaint is not None:
                    raise ScalingError(f"{member.name}: {member.complaint}")
                has_failed = member.on_trial and len(member.deaths) >= self._limits.attempts
                if member.stage is Stage.STOPPED or has_failed:
                    raise ScalingError(f"{member.name} did not come up: {member.last_failure}")
                if member.waiting:
                    if self._clock() > start_time + self._limits.hosts:
                        reason = f"{member.waiting}; given up after {self._limits.hosts:g} s"
                        raise ScalingError(f"{member.name}: {reason}")
                    end = self._clock() + seconds
            if self._clock() > end:
                raise ScalingError(f"{', '.join(m.name for m in members)}: not ready after {seconds:.0f} s")
            yield True


def _by_name(*counts: int) -> dict[str, int]:
    """The numbers of `COUNT_NAMES`, by their names."""
    return dict(zip(COUNT_NAMES, counts, strict=True))
