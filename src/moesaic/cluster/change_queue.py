"""The changes that a cluster has still to make: requested by users, by joining servers, or by its own load.

Changes happen one at a time, in the order of the requests. Changes due to load come last. Workers that join
from other hosts change no placement. So they load beside all else, and a lost server need not wait for them.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from inspect import GEN_CREATED, GEN_SUSPENDED, getgeneratorstate

import numpy as np

from moesaic.cluster import live_placement
from moesaic.cluster.autoscaling import Autoscaling, Sample
from moesaic.cluster.balancing import Balancing
from moesaic.cluster.dispatching import dispatch_by_tables
from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.links import Links
from moesaic.cluster.live_placement import LivePlacement
from moesaic.cluster.member import Member, Role, Stage
from moesaic.cluster.members import Members
from moesaic.cluster.objectives import Objectives
from moesaic.cluster.publishing import Publisher
from moesaic.cluster.router import Router
from moesaic.cluster.scaling import COUNT_NAMES, Change, Changes, JoinedProcess, ReplacedError
from moesaic.cluster.solving.job import Job
from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError, ScalingError
from moesaic.core.experts import ExpertLayout
from moesaic.core.metrics import ExpertServerStats
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile
from moesaic.core.tokens import IntArray
from moesaic.policy.placement import balance
from moesaic.policy.placement.locality import Rule
from moesaic.policy.placement.online import Traffic, judge
from moesaic.policy.placement.online_solution import Fleet, Solution
from moesaic.policy.placement.spreading import count_exposed

LOG = logging.getLogger(__name__)
RETRY_SECONDS = 5.0
"""Seconds to wait after a failed change that was due to load or to a lost server."""


@dataclass
class _QueuedChange:
    description: str
    """Description for people."""
    change: Change
    future: Future[None] | None = None
    """Future of the user who requested the change; None if nobody waits for it."""
    recreate: Callable[[], Change] | None = None
    """Makes the same change once more, if the supervisor's thread ends in the middle of it."""
    former_counts: tuple[int | None, ...] = ()
    """The numbers of processes before the change, of those that its user named."""
    may_interrupt: bool = True
    """Whether an error may be thrown into the change now."""
    interruption: ScalingError | None = None
    """Thrown into the change as soon as it may be, since nobody wants the change any more."""

    def advance(self) -> None:
        """Continues the change. Raises StopIteration at its end."""
        if self.interruption is not None and self.may_interrupt:
            error, self.interruption = self.interruption, None
            self.may_interrupt = self.change.throw(error)
        else:
            self.may_interrupt = next(self.change)


class ChangeQueue:
    """The queue of changes. Only the supervisor's thread uses it."""

    def __init__(
        self,
        members: Members,
        publisher: Publisher,
        router: Router,
        cluster: ClusterConfig,
        clock: Callable[[], float],
        note: Callable[[str], None],
        live: LivePlacement | None = None,
        links: Links | None = None,
    ) -> None:
        """note: records a failure. live: solves placements, with --rebalance routing. links: by which they
        are solved, and requests are dispatched then. Raises ConfigError for an --autoscale that is not
        possible."""
        self._autoscaling = Autoscaling(cluster, clock())
        router.objectives = Objectives.from_config(cluster, clock)
        self.balancing: Balancing | None = None
        """Created when the layout is known."""
        self._hosts = dict[int, str] if links is None else links.server_hosts
        self.changes = Changes(members, publisher, router, cluster, self._load, clock, hosts=self._hosts)
        self.rebalances = 0
        self.live = live
        self._links = links
        self._members = members
        self._publisher = publisher
        self._router = router
        self._cluster = cluster
        self._clock = clock
        self._note = note
        self._queue: deque[_QueuedChange] = deque()
        self._current: _QueuedChange | None = None
        self._arriving: list[_QueuedChange] = []
        """Workers of other hosts that are loading."""
        self._early_servers: list[tuple[RemoteProcess, str]] = []
        """Servers that called before the layout was known, and the checkpoint's fingerprint."""
        self._quiet_until = -math.inf
        self._last_lost_names: list[str] = []
        """Names of the servers that the last attempt to remove lost servers knew. Another loss does not wait
        until that attempt may be repeated."""
        self._spread: tuple[int, dict[int, str]] = (-1, {})
        """Version of the placement, and the servers' hosts, when it was last asked how copies are spread."""
        self._has_warned = False

    @property
    def layout(self) -> ExpertLayout | None:
        return self.changes.layout

    @property
    def change_description(self) -> str | None:
        """Description of the change under way; None if there is none."""
        changes = [self._current, *self._arriving]
        return next((change.description for change in changes if change is not None), None)

    def set_layout(self, layout: ExpertLayout, homes: Placement | None = None) -> None:
        """Set the layout of the experts. homes: see `Balancing`."""
        self.changes.layout = layout
        copies, servers = self._cluster.redundant_experts, len(self._members.servers)
        max_copies = layout.num_experts * (servers - 1)  # a server holds at most one copy of an expert
        message = "--redundant-experts: got %d; with --expert-servers %d at most %d have a place"
        if copies > max_copies:
            LOG.warning(message, copies, servers, max_copies)
        self.balancing = Balancing(layout, self._cluster, self._clock(), homes)
        early_servers, self._early_servers = self._early_servers, []
        for process, weights in early_servers:
            self.join(process, weights)

    # ---- requests

    def scale(
        self, servers: int | None, workers: int | None, prefill: int | None, future: Future[None]
    ) -> None:
        """Requests these numbers. A requested change that is under way ends, and this one goes on from there.

        Numbers that only the former change named become what they were before it.
        """
        requested_changes = self._list_requested_changes()
        former_counts: tuple[int | None, ...] = (None, None, None)
        for change in requested_changes:
            former_counts = tuple(
                count if earlier_count is None else earlier_count
                for earlier_count, count in zip(former_counts, change.former_counts, strict=True)
            )
        counts = tuple(
            former_count if count is None else count
            for count, former_count in zip((servers, workers, prefill), former_counts, strict=True)
        )
        try:
            self.changes.resolve_counts(*counts)
        except (ScalingError, ConfigError) as error:
            future.set_exception(error)
            return
        for change in requested_changes:
            replacement = ReplacedError("a newer scaling call replaced this one", conflict=True)
            change.interruption = replacement
            if change is not self._current:
                self._queue.remove(change)
                self._report_end(change, replacement)
        now = self.changes.count_processes()
        former_counts = tuple(
            None if count is None else present_count if former_count is None else former_count
            for count, present_count, former_count in zip(counts, now, former_counts, strict=True)
        )
        recreate = partial(self.changes.scale, *counts, former_counts=former_counts)
        self._queue.append(_QueuedChange("scaling", recreate(), future, recreate, former_counts))

    def cancel_scaling(self, future: Future[None]) -> None:
        """Ends the requested change and undoes it. The future ends when that is done."""
        requested_changes = self._list_requested_changes()
        if not requested_changes:
            future.set_exception(ScalingError("no scaling call is under way", conflict=True))
            return
        for change in requested_changes:
            error = ScalingError("the scaling call was cancelled", conflict=True)
            if change is self._current:
                change.interruption = error
            else:  # it may have replaced one that had begun
                change.recreate = partial(self.changes.revert, error, change.former_counts)
                change.change = change.recreate()
        change_future = requested_changes[-1].future
        assert change_future is not None
        change_future.add_done_callback(lambda _: future.set_result(None))

    def _list_requested_changes(self) -> list[_QueuedChange]:
        """The changes that users wait for, the one under way first."""
        changes = [self._current, *self._queue]
        return [change for change in changes if change is not None and change.future is not None]

    def join(self, process: RemoteProcess, weights: str) -> None:
        """Adds a change for a process that joins from another machine, unless a launcher waits for it.

        weights: fingerprint that its checkpoint must have.
        """
        if self._members.launcher.take(process):
            return
        if process.ticket:
            process.kill()  # the launcher has given it up meanwhile
            return
        server = process.role is Role.SERVER
        if server and self.layout is None:
            self._early_servers.append((process, weights))
            return
        reason = self._members.explain_difference(process)
        if reason is not None:
            self._note(f"{process.peer} is refused: {reason}")
            # A thread of its own: `refuse` waits for seconds until the peer has read the reason.
            threading.Thread(target=process.refuse, args=(reason,), daemon=True).start()
            return
        if process.role is Role.RANKS:  # they wait for a group, and change nothing
            self._members.adopt(self._members.add(Role.RANKS), process, weights, None)
            return
        newcomer = JoinedProcess(process, weights)
        change = (
            self.changes.add_server(newcomer) if server else self.changes.add_worker(process.role, newcomer)
        )
        queued_change = _QueuedChange(f"{process.role.value} joins from {process.peer}", change)
        # A server changes the placement, so it waits for its turn. A worker does not.
        (self._queue if server else self._arriving).append(queued_change)

    def add_report(self, member: Member, stats: ExpertServerStats, load: list[list[int]]) -> None:
        """Adds a report of a server's process. load: [L][E] pairs, see `Loads.add_report`."""
        if self.balancing is not None:
            self.balancing.loads.add_report(member.number, member.incarnation, stats, load)

    def advance(self, now: float) -> None:
        """Continues the change under way, or begins the next one."""
        if self.balancing is not None:
            self.balancing.loads.tick(now, [member.number for member in self._members.servers])
        for queued_change in list(self._arriving):
            if self._step(queued_change):
                self._arriving.remove(queued_change)
        if self._current is None:
            self._current = self._next_change(now)
        if self._current is not None and self._step(self._current, now):
            self._current = None

    def leave(self, worker: Member) -> None:
        """Adds the removal of a worker, before all other changes."""
        self._queue.appendleft(_QueuedChange(f"{worker.name} leaves", self.changes.remove_worker(worker)))

    def drop_broken_changes(self) -> bool:
        """Drops what is under way if a thread ended in the middle of it. Returns whether one did.

        A change that a user requested is then the next one, once.
        """
        queued_changes = [
            queued_change for queued_change in (self._current, *self._arriving) if queued_change is not None
        ]
        # A generator in another state raised, or its thread ended while it ran.
        if all(
            getgeneratorstate(queued_change.change) in (GEN_CREATED, GEN_SUSPENDED)
            for queued_change in queued_changes
        ):
            return False
        self._current, self._arriving = None, []
        for queued_change in queued_changes:
            if (
                queued_change.recreate is not None
                and queued_change.future is not None
                and not queued_change.future.done()
            ):
                self._queue.appendleft(
                    replace(queued_change, change=queued_change.recreate(), recreate=None, may_interrupt=True)
                )
                continue
            self._report_end(
                queued_change,
                ScalingError(
                    f"{queued_change.description}: the supervisor was restarted in the middle of it"
                ),
            )
        if self.live is not None:
            self.live.record_failure("the supervisor was restarted")
        return True

    def stop(self, reason: str) -> None:
        """Refuses all waiting changes. reason: the reason for their users."""
        open_changes, self._current = [self._current, *self._queue], None
        self._queue.clear()
        self._arriving.clear()
        for process, _ in self._early_servers:
            process.kill()
        for queued_change in open_changes:
            if (
                queued_change is not None
                and queued_change.future is not None
                and not queued_change.future.done()
            ):
                queued_change.future.set_exception(ScalingError(reason))

    # ---- internal

    def _step(self, queued_change: _QueuedChange, now: float = -math.inf) -> bool:
        """Continues a change. Returns whether it ended. now: for a change after whose failure others wait.

        An exception that no change should raise is raised again once the change counts as ended.
        """
        try:
            queued_change.advance()
        except StopIteration:
            self._report_end(queued_change, None)
            return True
        except (ScalingError, ConfigError) as error:
            self._note(f"{queued_change.description}: {error}")
            # A change that fails at once would otherwise be repeated in each turn of the loop.
            self._quiet_until = max(self._quiet_until, now + RETRY_SECONDS)
            self._report_end(queued_change, error)
            return True
        except Exception as error:
            self._quiet_until = max(self._quiet_until, now + RETRY_SECONDS)
            self._arriving = [
                other_change for other_change in self._arriving if other_change is not queued_change
            ]
            self._current = None if self._current is queued_change else self._current
            self._report_end(
                queued_change,
                ScalingError(f"{queued_change.description} failed: {type(error).__name__}: {error}"),
            )
            raise
        return False

    @staticmethod
    def _report_end(queued_change: _QueuedChange, error: Exception | None) -> None:
        """Tells the user of a change how it ended."""
        LOG.info("%s: %s", queued_change.description, error or "done")
        if queued_change.future is None or queued_change.future.done():
            return
        if error is None:
            queued_change.future.set_result(None)
        else:
            queued_change.future.set_exception(error)

    def _next_change(self, now: float) -> _QueuedChange | None:
        clients = [client for client in self._members.clients if client.is_external and not client.on_trial]
        left_workers = [client for client in clients if client.stage is Stage.STOPPED]
        # Members that are gone come first: while they have a place, no other change can finish.
        if left_workers:
            change = self.changes.remove_worker(left_workers[0])
            return _QueuedChange(f"{left_workers[0].name} is gone", change)
        lost_names = [member.name for member in self._members.servers if member.stage is Stage.STOPPED]
        if lost_names and (now >= self._quiet_until or lost_names != self._last_lost_names):
            self._last_lost_names = lost_names
            return _QueuedChange(f"{', '.join(lost_names)}: gone", self.changes.remove_gone())
        if self._queue:
            return self._queue.popleft()
        return self._change_by_load(now) if now >= self._quiet_until else None

    def _change_by_load(self, now: float) -> _QueuedChange | None:
        """Returns the change that the load requires; usually None."""
        scaling = self._plan_autoscaling(now)
        balancing, placement = self.balancing, self._publisher.placement
        if scaling is not None or balancing is None or placement is None:
            return scaling
        if self.live is not None:
            result = self.live.take(
                now,
                lambda profile: self._make_job(profile, placement),
                lambda: balancing.traffic(self.changes.copy_bandwidth),
            )
            if result is not None:
                return self._plan_swap(*result, placement, self.live)
        spread = self._plan_spread(placement, balancing)
        if spread is not None:
            return spread
        capacities, hosts = self._members.capacities, self._hosts()
        new = balancing.plan_rebalance(now, placement, capacities, self.changes.copy_bandwidth, hosts)
        if new is None:
            return None
        return _QueuedChange("rebalancing", self._rebalance(new))

    def _rebalance(self, new: Placement) -> Change:
        """Moves experts between the same servers to balance their load."""
        yield from self.changes.rebalance(new)
        self.rebalances += 1

    def _plan_spread(self, placement: Placement, balancing: Balancing) -> _QueuedChange | None:
        """The change that spreads copies over hosts, once placement or hosts are others; usually None.

        A launcher says only later on which host a process is, and may restart it on another one.
        """
        hosts, capacities = self._hosts(), self._members.capacities
        starting = any(member.stage is not Stage.SERVING for member in self._members.servers)
        if starting or self._spread == (placement.version, hosts):
            return None
        self._spread = placement.version, hosts
        new = balancing.plan_spread(placement, capacities, hosts)
        if new is not None:
            return _QueuedChange("spreading copies over hosts", self.changes.rebalance(new))
        num_exposed = count_exposed(placement, list(capacities), hosts)
        if num_exposed and self._cluster.min_replicas > 1 and not self._has_warned:
            self._has_warned = True
            LOG.warning(
                "--min-replicas: %d experts have all of their copies on one host, since hosts share them by "
                "capacity; give each host at most half of the capacity",
                num_exposed,
            )
        return None

    def _plan_autoscaling(self, now: float) -> _QueuedChange | None:
        """The change to as many processes of each role as --autoscale wants; usually None."""
        sample = take_sample(self._members, self._router)
        wanted_counts = self._autoscaling.decide_counts(now, sample)
        counts = self.changes.limit(wanted_counts) if wanted_counts else {}
        if all(count == sample.processes[name] for name, count in counts.items()):
            return None
        numbers = [
            f"{sample.processes[name]} to {count} {name.replace('_', ' ')}" for name, count in counts.items()
        ]
        change = self.changes.scale(*map(counts.get, COUNT_NAMES))
        return _QueuedChange(f"autoscaling from {', '.join(numbers)}", change)

    def _make_job(self, profile: Profile, placement: Placement) -> Job:
        """What the solver is asked. Rank i has the i-th worker and the i-th server of this host."""
        members, cluster = self._members, self._cluster
        ranks = tuple(member.number for member in members.servers_of_launcher)
        fleet = Fleet(ranks, members.capacities, cluster.redundant_experts, cluster.min_replicas)
        if self._links is not None:
            local_workers = [member for member in members.workers if not member.is_external]
            prices = self._links.prices(local_workers[: len(ranks)], fleet.servers)
            hosts = tuple(self._hosts().get(server, "") for server in fleet.servers)
            fleet = replace(fleet, prices=prices, hosts=hosts)
        rule: Rule = "rounds" if cluster.dispatch == "affinity-rounds" else "affinity"
        workers = [member.number for member in members.workers]
        tables = None if self.live is None else self.live.tables_for(workers)
        return Job(profile, placement, tables, fleet, live_placement.SOLVER, rule)

    def _plan_swap(
        self, solution: Solution, traffic: Traffic, placement: Placement, live: LivePlacement
    ) -> _QueuedChange | None:
        """The change to a solved placement, if it is worth its moves."""
        assert self.layout is not None
        local_servers = [member.number for member in self._members.servers_of_launcher]
        if list(solution.homes.servers) != sorted(local_servers) or not set(
            solution.placement.servers
        ) <= set(self._members.capacities):
            live.record_failure("servers came or left while it was solved")
            return None
        moves = balance.moves(placement, solution.placement)
        expert = self.layout.expert_bytes
        verdict = judge(
            solution.old_forecast,
            solution.new_forecast,
            len(moves),
            balance.busiest_bytes(moves, expert),
            traffic,
        )
        live.record_verdict(solution, verdict)
        return (
            None
            if verdict.reason
            else _QueuedChange("placing by routing", self._swap_placement(solution, live))
        )

    def _swap_placement(self, solution: Solution, live: LivePlacement) -> Change:
        """Moves the experts, then dispatches by the new tables. Copies follow the load from then on."""
        now = self._publisher.placement
        assert now is not None and self.balancing is not None
        try:
            yield from self.changes.rebalance(replace(solution.placement, version=now.version + 1))
        except Exception as error:
            live.record_failure(str(error))
            raise
        workers = [member.number for member in self._members.workers]
        servers = [member.number for member in self._members.servers_of_launcher]
        worth = None if self._links is None else self._links.worth
        ranks = {worker: rank for rank, worker in enumerate(workers)}
        self._router.dispatch = dispatch_by_tables(self._cluster, solution.tables, ranks, worth, servers)
        self.balancing.homes = solution.homes
        self.rebalances += 1
        live.record_swap(solution, workers)

    def _load(self) -> IntArray:
        assert self.layout is not None
        if self.balancing is not None:
            return self.balancing.loads.window()
        return np.zeros((len(self.layout.layers), self.layout.num_experts), dtype=np.int64)


def take_sample(members: Members, router: Router) -> Sample:
    """The sample of this moment."""
    waiting, prompts = router.stats().waiting, router.waiting_prompts()
    prefill = router.prefill_seconds()
    return Sample(
        processes={
            "expert_servers": len(members.servers),
            "attention_workers": len(members.workers),
            "prefill_workers": len(members.prefill_workers),
        },
        waiting={
            "expert_servers": waiting,
            "attention_workers": waiting - prompts,
            "prefill_workers": prompts,
        },
        missed_objectives=router.objectives.total_misses,
        busy={
            "expert_servers": {
                member.process_key: member.stats.busy_seconds - member.past_stats.busy_seconds
                for member in members.servers
            },
            "prefill_workers": {
                member.process_key: prefill[member.worker_id]
                for member in members.prefill_workers
                if member.worker_id in prefill
            },
        },
        occupancy=router.measure_occupancy(),
    )
