"""Starts attention workers and expert servers, restarts dead ones, and changes their number while they serve.

One thread does all of it. A reader thread per process passes on its messages. Nothing that requests need goes
through the supervisor: clients and servers connect directly, and each client decides by itself that a server
is gone (`policy.fleet.replicas`). The supervisor restarts processes and changes the cluster
(`cluster.scaling`).

An unexpected exception ends only the action that raised it. It is logged and recorded, and the supervisor
continues. If its thread ends nevertheless, or hangs, another thread takes its place (`cluster.watchdog`), and
requests continue meanwhile. If that happens too often, dead processes are not restarted any more.

Question: What happens when an expert server dies?
Question: Who restarts a process?
Question: Who kills a process by hand?
"""

from __future__ import annotations

import queue
import secrets
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from moesaic.cluster.change_queue import ChangeQueue
from moesaic.cluster.checkpoint_watch import CheckpointWatch, Verdict
from moesaic.cluster.dispatching import choose_dispatch
from moesaic.cluster.failures import Failures
from moesaic.cluster.host_transport import choose_transport
from moesaic.cluster.job_places import places_of
from moesaic.cluster.join_listener import JoinListener
from moesaic.cluster.launched_process import LaunchedProcess
from moesaic.cluster.launcher import Launcher
from moesaic.cluster.links import Links
from moesaic.cluster.live_placement import LivePlacement
from moesaic.cluster.member import Member, RestartRule, Role, Stage
from moesaic.cluster.members import Members
from moesaic.cluster.newcomers import Newcomers
from moesaic.cluster.placing import FirstPlacement, read_placement
from moesaic.cluster.publishing import Publisher, union
from moesaic.cluster.recovery import recover
from moesaic.cluster.report import counters, describe_pace, layer_locality, layer_replicas, process_status
from moesaic.cluster.router import Router
from moesaic.cluster.service_health import ServiceHealth
from moesaic.cluster.settings import make_worker_config
from moesaic.cluster.suspicion import Lateness, Suspicion
from moesaic.cluster.trust import Trust
from moesaic.cluster.watchdog import Watchdog
from moesaic.config import ClusterConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.cluster_status import ClusterLoad, ClusterStatus, ProcessStatus
from moesaic.core.errors import ConfigError, ConnectionLost, ScalingError
from moesaic.core.experts import ExpertLayout
from moesaic.core.metrics import WorkerStats
from moesaic.core.placement import Placement
from moesaic.policy.fleet.health import State
from moesaic.trace.live_routing import LiveRouting
from moesaic.transport.secret import create_secret

TICK = 0.1
"""Maximum seconds between two checks of the processes."""
FROZEN_SECONDS = 5.0
"""Seconds without a message after which a process of this host is killed and restarted."""
RETRY_SECONDS = 1.0
"""Seconds until a process is started again that the system could not start."""
NO_SUPERVISOR = "the supervisor has stopped, so processes are not restarted any more"


class Supervisor:
    """The supervisor of one cluster. Its thread runs from `start` to `stop`."""

    def __init__(
        self,
        worker: WorkerConfig,
        cluster: ClusterConfig,
        router: Router,
        clock: Callable[[], float],
        routing: LiveRouting | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        """routing: what the workers record, with --rebalance routing. launcher: starts the processes; None:
        on this host. Raises ConfigError for settings of `cluster` that are not possible."""
        self._cluster, self._router, self._clock = cluster, router, clock
        self._placement_file = read_placement(cluster)
        self._rule = RestartRule()
        secret_file = cluster.cluster_secret_file
        self._secret = secrets.token_bytes(32) if secret_file is None else create_secret(Path(secret_file))
        transport = choose_transport(cluster, worker)
        self._transport = transport if cluster.expert_servers > 0 else None
        member = make_worker_config(worker, cluster, transport)
        self._members = Members(member, router, self._receive, clock, cluster, launcher)
        self._job_places = places_of(self._members, cluster)
        self._links = Links(self._members, cluster)
        self._dispatch, router.dispatch = choose_dispatch(cluster, self._placement_file, self._links.worth)
        self._publisher = Publisher(self._members, self._secret, self._links)
        parts = self._members, self._publisher, self._links
        self._first_placement = FirstPlacement(*parts, cluster, self._placement_file)
        self._suspicion = Suspicion(self._publisher, router)
        self._failures, self._lateness = Failures(), Lateness(FROZEN_SECONDS / 5)
        self._note = self._failures.note
        live = self._make_live_placement(routing)
        self._changes = ChangeQueue(
            self._members, self._publisher, router, cluster, clock, self._note, live, self._links
        )
        self._has_announced = False
        self._paced_source = None if cluster.paced is None else describe_pace(cluster.paced)
        self._end_reason: str | None = None
        self._watchdog = Watchdog(self._loop, self._resume, self._fault, self._give_up, clock)
        model = Path(worker.model.model)
        self._trust = Trust(model, self._members, self._publisher, self._note, clock)
        self._health = ServiceHealth(self._members, self._publisher, router, self._note, cluster)
        self._checkpoint_watch = self._make_checkpoint_watch(model, worker.checkpoint_stamp)
        self._checkpoint_obstacle: str | None = None
        """Why no process of this host can load the checkpoint. None: one can."""
        self._newcomers: Newcomers | None = None
        if cluster.cluster_address is not None:
            listening = cluster.cluster_address, self._secret, model
            self._newcomers = Newcomers(*listening, self._members, self._links, self._changes, self._note)

    def start(self) -> None:
        """Starts the attention workers. The servers start when the first worker has sent its layout."""
        for role, number in (
            (Role.WORKER, self._cluster.attention_workers),
            (Role.PREFILL, self._cluster.prefill_workers),
            (Role.SERVER, self._cluster.expert_servers),
        ):
            for _ in range(number):
                self._members.add(role)
        self._members.begin(self._listener)
        for member in self._members.clients:
            self._members.spawn_worker(member)
        self._watchdog.start()
        if self._checkpoint_watch is not None:
            self._checkpoint_watch.start()

    def stop(self) -> None:
        """Ends every process."""
        self._watchdog.stop(lambda: self._members.inbox.put(None))
        self._changes.stop("the cluster was stopped")
        if self._changes.live is not None:
            self._changes.live.stop()
        if self._newcomers is not None:
            self._newcomers.close()
        self._trust.weights.close()
        if self._checkpoint_watch is not None:
            self._checkpoint_watch.stop()
        self._members.stop()

    def _make_live_placement(self, routing: LiveRouting | None) -> LivePlacement | None:
        """The placement that follows live routing. None without --rebalance routing."""
        if routing is None:
            return None
        return LivePlacement.from_cluster(routing, self._cluster, self._placement_file, self._clock())

    def _make_checkpoint_watch(self, model: Path, stamp: str) -> CheckpointWatch | None:
        """The watch over the checkpoint's files. None if processes of this host load none."""
        if not stamp or self._members.launcher.is_remote:
            return None

        def report(verdict: Verdict) -> None:
            self._members.inbox.put(lambda: self._apply_verdict(verdict))

        return CheckpointWatch(model, stamp, report)

    # ---- called by other threads

    def scale(
        self,
        expert_servers: int | None = None,
        attention_workers: int | None = None,
        prefill_workers: int | None = None,
    ) -> Future[None]:
        """Changes to these numbers of processes; None: as many as now. The future ends with the change.

        A change that an earlier call began ends, and this one goes on from there. The future raises
        ConfigError for numbers that are out of bounds, and ScalingError if nothing was changed, or if a later
        call took over.
        """
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        if self._members.is_supervised:
            numbers = expert_servers, attention_workers, prefill_workers
            self._members.inbox.put(lambda: self._changes.scale(*numbers, future))
        else:
            future.set_exception(ScalingError(NO_SUPERVISOR))
        return future

    def cancel_scaling(self) -> Future[None]:
        """Ends the change of `scale` that is under way. The future ends once what it did is undone.

        The future raises ScalingError if there is none. That of `scale` raises one too.
        """
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        if self._members.is_supervised:
            self._members.inbox.put(lambda: self._changes.cancel_scaling(future))
        else:
            future.set_exception(ScalingError(NO_SUPERVISOR))
        return future

    def kill(self, name: str) -> str:
        """Kills the process of one member by its name. See `kill_member`."""
        return kill_member(self._members.all_members, name, self._clock(), self._rule)

    def worker_stats(self) -> dict[str, WorkerStats]:
        """Returns the statistics of each worker of either role that serves, by its name."""
        stats = self._router.stats_by_worker()
        return {
            member.name: stats[member.worker_id]
            for member in self._members.clients
            if member.worker_id in stats
        }

    def describe_end(self) -> str:
        """How the cluster ended, in words for people. Called once the router's connection is lost."""
        return self._end_reason or (
            "the cluster was stopped" if self._members.is_supervised else NO_SUPERVISOR
        )

    def status(self) -> list[ProcessStatus]:
        """Returns the status of every process: the attention workers, then the expert servers."""
        return self._describe_processes(self._members.all_members)

    def _describe_processes(self, members: Collection[Member]) -> list[ProcessStatus]:
        now, placement, is_supervised = self._clock(), self._publisher.placement, self._members.is_supervised
        return [process_status(member, placement, now, is_supervised) for member in members]

    def report(self) -> ClusterStatus:
        """Returns the status of the whole cluster."""
        placement, members, live = self.placement, self._members, self._changes.live
        all_members, past_members = members.snapshot()
        by_tables = live is not None and live.tables is not None and self._dispatch == "least-loaded"
        return ClusterStatus(
            directory_version=self._publisher.version,
            placement_version=None if placement is None else placement.version,
            change=self._changes.change_description,
            processes=self._describe_processes(all_members),
            past_servers=past_members.server_stats,
            replicas=layer_replicas(placement, members.servers, self._links.server_hosts()),
            failures=self._failures.list_failures(),
            counters=counters(
                all_members,
                past_members,
                self._router,
                self._changes.rebalances,
                self._listener,
                self._watchdog.restarts,
            ),
            join_address=None if self._listener is None else self._listener.address,
            standbys=[] if self._newcomers is None else self._newcomers.standbys,
            transport=self._transport,
            dispatch=self._cluster.dispatch or "affinity" if by_tables else self._dispatch,
            locality=layer_locality(placement, self._router.stats().experts),
            placement_solve=None if live is None else live.status,
            paced=self._paced_source,
            hosts=self._links.hosts(),
            links=self._links.links(),
            watched=members.is_supervised,
            health=self._health.health.state.value,
            outage=self._health.health.reason,
        )

    def load(self) -> ClusterLoad | None:
        """Returns the load of the experts; None if there are no expert servers."""
        balancing = self._changes.balancing
        if balancing is None:
            return None
        loads = balancing.loads
        return ClusterLoad(balancing.layout.layers, loads.total, loads.balancedness())

    @property
    def placement(self) -> Placement | None:
        """The current placement."""
        return self._publisher.placement

    @property
    def _listener(self) -> JoinListener | None:
        return None if self._newcomers is None else self._newcomers.listener

    # ---- the thread

    def _resume(self) -> None:
        """Goes on where another thread ended."""
        self._run_safely(partial(recover, self._members, self._publisher, self._router, self._changes))

    def _fault(self, reason: str, error: BaseException | None) -> None:
        self._note(f"the supervisor is restarted: {reason}", error)

    def _give_up(self, reason: str) -> None:
        self._members.is_supervised = False
        self._note(f"{NO_SUPERVISOR}: {reason}")
        if not (self._has_announced and self._router.can_generate):
            self._end(NO_SUPERVISOR)
        self._changes.stop(NO_SUPERVISOR)
        self._members.empty_inbox()
        self._changes.stop(NO_SUPERVISOR)  # once more, for what was in the inbox

    def _loop(self) -> None:
        while True:
            self._watchdog.beat()
            try:
                action = self._members.inbox.get(timeout=TICK)
            except queue.Empty:
                action = _skip_turn
            if action is None:
                return
            self._run_safely(action)
            now = self._clock()
            self._tick(now)
            if self._has_announced and self._end_reason is None:
                self._run_safely(partial(self._changes.advance, now))

    def _run_safely(self, action: Callable[[], None]) -> None:
        """Runs `action`. An exception before the cluster serves ends the service, as the start would hang."""
        self._watchdog.beat()
        failure = self._failures.run_safely(action)
        if failure is not None and not self._has_announced:
            self._end(failure)

    def _receive(self, member: Member, message: messages.Message | ConnectionLost) -> None:
        member.last_seen = self._clock()
        match message:
            case ConnectionLost():
                self._handle_end(member)
            case messages.Layout(layout) if not member.is_external:  # theirs changes nothing
                self._set_layout(layout)
            case messages.Ready() if (misfit := self._members.explain_misfit(member, message)) is not None:
                self._trust.refuse(member, misfit)
            case messages.Ready(info):
                member.stage, member.info, member.kernels = Stage.SERVING, info, info.kernels
                member.job_id = message.nvshmem
                assert member.child is not None
                self._publisher.send_directory(member)
                prefill = member.role is Role.PREFILL
                self._router.join(member.worker_id, member.child.connection, info, prefill, member.kv)
                self._members.ranks.serve(member)
            case messages.RanksWait(weights):
                member.is_fit = weights == member.weights
            case messages.RanksMeet():
                self._members.ranks.meet(member, message)
            case messages.ReceivesKV():
                member.kv = message
            case messages.FaultyServer(server, incarnation, reason):
                self._trust.blame(server, incarnation, reason)
            case messages.DirectorySettled(version):
                member.settled_version = version
            case messages.HoldReply():
                self._trust.weights.record_holds(member, message)
            case messages.Digests():
                self._trust.weights.record_digests(member, message)
            case messages.ServerReport(stats, load):
                member.record_stats(stats)
                self._changes.add_report(member, stats, load)
            case messages.WorkerFailed() if message.user_error and not (
                self._has_announced or member.is_spare
            ):
                self._router.tell(message)
            case messages.WorkerFailed():
                self._record_failure(member, message)
            # All workers load the same files, so the progress of the first one stands for all.
            case messages.Loading() if member.number == 0 and member.role is Role.WORKER:
                self._router.tell(message)
        self._announce()

    def _record_failure(self, member: Member, message: messages.WorkerFailed) -> None:
        """Records why a process could not do what it was told. It leaves if that was its first task."""
        member.complaint = message.error
        self._note(f"{member.name}: {message.error}")
        if message.user_error and member.stage is Stage.STARTING and not member.is_external:
            member.refusal = message.error

    def _tick(self, now: float) -> None:
        # If the inbox is not empty, this thread was late, not the process.
        has_read_all = self._members.inbox.empty()
        self._lateness.excuse(self._members.all_members, now)
        self._run_safely(self._first_placement.look)
        if self._job_places is not None:
            self._run_safely(self._job_places.look)
        self._trust.weights.keep(self._members.servers)
        placements = self._publisher.placement, self._publisher.next_placement
        for member in self._members.all_members:
            self._run_safely(partial(self._check, member, has_read_all, now))
            self._run_safely(
                partial(self._trust.weights.tick, member, partial(union, member.number, placements))
            )
        if self._has_announced:
            self._run_safely(partial(self._look_at_health, now))

    def _look_at_health(self, now: float) -> None:
        """Ends the service if nothing can be served any more, and nobody else can take over."""
        is_supervised = self._members.is_supervised
        obstacle = self._checkpoint_obstacle if is_supervised else NO_SUPERVISOR
        health = self._health.look(now, self._rule, obstacle)
        if health.state is State.END or not (is_supervised or health.state is State.SERVING):
            self._end(health.reason)

    def _check(self, member: Member, has_read_all: bool, now: float) -> None:
        may_start = self._end_reason is None and self._checkpoint_obstacle is None
        if member.stage is Stage.WAITING and now >= member.restart_at and may_start:
            self._spawn(member)
        unread = member.reader is not None and not member.reader.is_alive()
        if has_read_all and unread and member.child is not None:  # a thread ended before it handled that
            self._handle_end(member)
        reason = self._suspicion.look(member, now) if member.has_tcp_connection else None
        if reason is not None and member.child is not None:
            self._note(reason)
            member.child.kill()
        silent = has_read_all and not member.has_tcp_connection and now - member.last_seen > FROZEN_SECONDS
        if member.in_service and silent and member.child is not None:
            self._note(f"{member.name} sent nothing for {FROZEN_SECONDS:g} s: killing it")
            member.child.kill()
            member.last_seen = now

    def _apply_verdict(self, verdict: Verdict) -> None:
        """Starts no process while the checkpoint's files are missing or changed."""
        self._checkpoint_obstacle = verdict.obstacle
        if verdict.obstacle is None:
            self._note("the checkpoint can be loaded again")
            self._members.set_checkpoint_stamp(verdict.stamp)
            for member in self._members.all_members:  # those that refused it need not wait any more
                member.restart_at = min(member.restart_at, self._clock())
            return
        self._note(f"no process is started: {verdict.obstacle}")

    def _announce(self) -> None:
        """Tells the engine, once all processes serve, that it may submit requests."""
        if not self._has_announced and self._members.all_serve:
            self._has_announced = self._watchdog.is_armed = True
            for member in self._members.all_members if self._cluster.standby_for is not None else ():
                member.is_external = True  # nobody here could start it again
            self._router.tell_ready()

    def _end(self, reason: str) -> None:
        """Reports that nothing can be served any more."""
        if self._end_reason is None:
            self._end_reason = reason
            self._router.fail(reason)

    # ---- processes

    def _spawn(self, member: Member) -> None:
        try:
            self._start_process(member)
        except OSError as error:
            if not self._has_announced:
                raise
            reason = f"no process can be started: {error.strerror or error}"
            if member.last_failure != reason:
                self._note(f"{member.name}: {reason}; it is tried again every {RETRY_SECONDS:g} s")
            member.last_failure, member.restart_at = reason, self._clock() + RETRY_SECONDS

    def _start_process(self, member: Member) -> None:
        if member.is_client:
            self._members.spawn_worker(member)
        elif self._changes.layout is not None:
            self._members.spawn_server(member, self._changes.layout)
            self._publisher.hold(member)

    def _handle_end(self, member: Member) -> None:
        """A process has ended. A worker's requests move; the clients of a server have noticed already."""
        if member.child is None:
            return
        end_description = member.child.describe_end()
        member.child.connection.close()
        member.child.kill()
        self._note(f"{member.name}: {end_description}")
        is_expected = member.stage is Stage.DRAINING or member.is_external or member.on_trial
        can_restart = member.record_death(end_description, self._clock(), self._rule)
        if member.is_client:
            self._router.leave(member.worker_id)
        self._members.remove_group(member)
        may_die = self._has_announced or self._cluster.standby_for is not None
        if self._members.is_supervised and not is_expected and not (can_restart and may_die):
            message = f"{member.name} keeps dying; last failure: {end_description}"
            if not may_die:
                self._end(end_description if can_restart else message)
            elif member.role is Role.PREFILL:
                member.stage = Stage.STOPPED
                self._note(f"{message}; it is given up, and other workers compute its prompts")
            else:
                self._note(message)
        if not self._members.is_supervised and self._has_announced:
            self._look_at_health(self._clock())  # nobody else does

    def _set_layout(self, layout: ExpertLayout) -> None:
        """Sets the placement for the first layout, and starts the servers."""
        if self._changes.layout is not None:
            return
        try:
            self._first_placement.set_layout(layout)
        except ConfigError as error:
            self._router.tell(messages.WorkerFailed(str(error), user_error=True))
            return
        file = self._placement_file
        self._changes.set_layout(layout, None if file is None else file.with_layer(layout.prediction))
        self._trust.weights.set_layout(layout)
        for member in self._members.servers:
            self._spawn(member)


def _skip_turn() -> None:
    """The action if no message has arrived."""


def kill_member(members: Collection[Member], name: str, now: float, rule: RestartRule) -> str:
    """Kills the process of the member `name`, to see that the cluster goes on.

    Returns what was done and what follows, in words for people.

    A process of this host gets SIGKILL, and so does one that a launcher started on another host. The
    supervisor restarts both, as after any death. Of a process that joined by itself only the connection can
    be closed. For the cluster that is its death, and the process joins again.

    Raises ConfigError if no member has that name. Raises ScalingError if there is no process now, if one more
    death would end the service, or if a process that joined does not serve yet.
    """
    members_by_name = {member.name: member for member in members}
    if name not in members_by_name:
        raise ConfigError.field("name", name, ", ".join(members_by_name))
    member = members_by_name[name]
    child, stage = member.child, member.stage
    if child is None:
        raise ScalingError(f"{name} has no process now: it is {stage.value}", conflict=True)
    if member.is_external:
        if not member.in_service:  # `moesaic join` would end instead of joining again
            raise ScalingError(f"{name} does not serve yet: it is {stage.value}", conflict=True)
        child.kill()
        return f"the connection to {name} on {member.host} was closed; the process joins again as a new one"
    window = rule.window_for(member.start_seconds)
    recent = sum(now - death < window for death in member.deaths)
    if recent + 1 >= rule.max_deaths:
        message = f"{name} died {recent} times within {window:g} s; one more death could end the service"
        raise ScalingError(message, conflict=True)
    child.kill()
    outlook = (
        "it is not started again, as it was leaving" if stage is Stage.DRAINING else "it is started again"
    )
    location = f" on {member.host}" if isinstance(child, LaunchedProcess) and member.host else ""
    return f"{name}{location} was killed; {outlook}"
