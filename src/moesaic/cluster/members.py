"""The processes of a cluster: starts them, reads from each in a thread of its own, and ends them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import replace

from moesaic.cluster import admission, numa
from moesaic.cluster.admission import MESSAGES_BY_ROLE, ROUTER_MESSAGES
from moesaic.cluster.cores import Cores
from moesaic.cluster.join_listener import JoinListener, RemoteProcess
from moesaic.cluster.launcher import Launcher, LocalLauncher
from moesaic.cluster.member import Member, Process, Role, Stage, explain_misfit
from moesaic.cluster.rank_hosts import RankHosts
from moesaic.cluster.router import Router
from moesaic.cluster.settings import Settings
from moesaic.cluster.totals import PastMembers, server_counters_only, sum_stats
from moesaic.config import SMALL_MODEL, ClusterConfig, WorkerConfig, gpus
from moesaic.config.values import KernelName
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.experts import ExpertLayout
from moesaic.policy.fleet.devices import Devices, choose, count_sharing
from moesaic.trace.parts import part_path
from moesaic.transport.host import this_host


class Members:
    """The members of a cluster. Only the supervisor's thread changes them.

    on_message: called in that thread with each message of a member's process, or with its ConnectionLost. If
    the supervisor has failed, only ConnectionLost is passed on, from reader threads, one at a time.
    """

    def __init__(
        self,
        worker: WorkerConfig,
        router: Router,
        on_message: Callable[[Member, messages.Message | ConnectionLost], None],
        clock: Callable[[], float],
        cluster: ClusterConfig = ClusterConfig(),
        launcher: Launcher | None = None,
    ) -> None:
        """launcher: starts the processes; None: on this host."""
        self.launcher: Launcher = LocalLauncher() if launcher is None else launcher
        self._ranks = cluster.data_parallel_size if cluster.enable_expert_parallel else None
        """Number of ranks at the start, each a worker and a server; None: there are no ranks."""
        self._cores = Cores(worker, numa.list_bindable_nodes("off" if cluster.is_remote else cluster.numa))
        num_pinned = len(self._cores.cpus(Role.SERVER, 0, self._ranks))
        threads = [
            worker.model.threads or num_pinned or self._cores.threads(place, cluster.expert_servers)
            for place in range(max(1, cluster.expert_servers))
        ]
        is_remote = self.launcher.is_remote
        self._gpus = () if is_remote or worker.model.device == "cpu" else gpus(cluster.devices)
        self._capacities = cluster.capacities or ((1.0,) if is_remote else tuple(map(float, threads)))
        """Capacity weights of the launcher's servers, by number. Later servers have the last weight."""
        self.workers: list[Member] = []
        self.prefill_workers: list[Member] = []
        self.servers: list[Member] = []
        self.ranks = RankHosts(worker.parallel.nnodes)
        """Ranks of the workers that are on other hosts than their first rank."""
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Work for the supervisor's thread; None ends the thread."""
        self.is_supervised = True
        """False once the supervisor was given up. Then requests continue, but nothing is restarted."""
        self._urgent_lock = threading.Lock()
        """Lock for reader threads that do urgent work in place of the supervisor's thread."""
        self._stopping = False
        self._past_members = PastMembers()
        self._list_lock = threading.Lock()
        """Lock for readers that need the lists of members and `_past_members` of one moment."""
        self._worker_config = worker
        self._settings = Settings(worker, cluster.prefill_workers > 0)
        self._router = router
        self._on_message = on_message
        self._clock = clock
        self._count = dict.fromkeys(Role, 0)
        self._ending: list[threading.Thread] = []

    @property
    def all_members(self) -> list[Member]:
        return [*self.clients, *self.servers, *self.ranks.members]

    def snapshot(self) -> tuple[list[Member], PastMembers]:
        """All members of one moment, and what remains of those that have left. Any thread may call it."""
        with self._list_lock:
            return self.all_members, self._past_members

    @property
    def all_serve(self) -> bool:
        """Whether all workers and servers serve. Ranks without a group do not count."""
        return all(member.stage is Stage.SERVING for member in [*self.clients, *self.servers])

    @property
    def clients(self) -> list[Member]:
        """Attention workers of both roles, which ask the servers."""
        return self.workers + self.prefill_workers

    @property
    def servers_of_launcher(self) -> list[Member]:
        """Servers that the launcher started: those that did not join by themselves. With ranks, each worker's
        server has the worker's index."""
        return self._select_launched(self.servers)

    @property
    def capacities(self) -> dict[int, float]:
        """Server -> capacity weight."""
        return {member.number: member.capacity for member in self.servers}

    def add(self, role: Role, on_trial: bool = False, capacity: float | None = None) -> Member:
        """Adds a member without a process; `spawn_*` or `adopt` follows. capacity: weight of a server that
        joined by itself."""
        member = Member(role, self._count[role], on_trial=on_trial)
        self._count[role] += 1
        if role is Role.SERVER:
            own_capacity = self._capacities[min(member.number, len(self._capacities) - 1)]
            member.capacity = own_capacity if capacity is None else capacity
        member.devices = self._devices_of(role)
        match role:
            case Role.WORKER:
                self.workers = [*self.workers, member]
            case Role.PREFILL:
                self.prefill_workers = [*self.prefill_workers, member]
            case Role.SERVER:
                self.servers = [*self.servers, member]
            case Role.RANKS:
                self.ranks.members = [*self.ranks.members, member]
        return member

    def begin(self, listener: JoinListener | None) -> None:
        """Asks for hosts for all members. listener: where processes of other hosts connect."""
        if listener is not None:
            self.launcher.set_address(listener.address)
        self.request_hosts(len(self.servers), len(self.workers), len(self.prefill_workers))

    def set_checkpoint_stamp(self, stamp: str) -> None:
        """Sets the stamp of the files that processes must find."""
        self._worker_config = replace(self._worker_config, checkpoint_stamp=stamp)
        self._settings = self._settings.with_checkpoint_stamp(stamp)

    def request_hosts(self, servers: int, workers: int, prefill: int) -> None:
        """Asks for hosts for these numbers of processes."""
        self.launcher.request_hosts({Role.SERVER: servers, Role.WORKER: workers, Role.PREFILL: prefill})

    def spawn_worker(self, member: Member) -> None:
        """Starts the next process of a worker of either role, unless its ranks of other hosts are missing."""
        if self.ranks.has_remote_ranks and not self.ranks.take(member):
            return
        prefill = member.role is Role.PREFILL
        member.has_tcp_connection = self.launcher.is_remote
        alike = self._select_launched(self.prefill_workers if prefill else self.workers)
        place = self._place(member, alike)
        cpus = self._cores.cpus(Role.WORKER, self._select_launched(self.clients).index(member), self._ranks)
        config = replace(
            self._settings.worker_config(member),
            beside=self._count_gpu_sharers(member),
            devices=member.devices,
            # A prefill worker belongs to no rank, so no server is its own.
            own_server=self.servers_of_launcher[place].number if self._ranks and not prefill else None,
            most_threads=len(cpus) or self._cores.threads(place, len(alike)),
            cpus=cpus,
            trace=self._part(member),
            # The process gets its incarnation, one more than now, when it has been started.
            record=part_path(self._worker_config.record, member.name, member.incarnation + 1),
        )
        with numa.bind_to_nodes(self._cores.nodes(place, len(alike))):
            child = self.launcher.start_worker(member, config)
        self._listen(member, child)

    def spawn_server(self, member: Member, layout: ExpertLayout) -> None:
        """Starts the server's next process, which waits for a Hold."""
        member.has_tcp_connection = self.launcher.is_remote
        place = self._place(member, self.servers_of_launcher)
        cpus = self._cores.cpus(Role.SERVER, place, self._ranks)
        config = replace(
            self._settings.server_config(layout),
            devices=member.devices,
            threads=self._worker_config.model.threads or len(cpus) or self._server_threads(layout, place),
            cpus=cpus,
            trace=self._part(member),
            checkpoint_stamp=self._worker_config.checkpoint_stamp,
        )
        with numa.bind_to_nodes(self._cores.nodes(place, len(self.servers_of_launcher))):
            child = self.launcher.start_server(member, config)
        self._listen(member, child)

    @staticmethod
    def set_host(member: Member, process: RemoteProcess) -> None:
        """Says on which host the process of a member is."""
        member.host = process.host
        member.host_id = "" if process.host_id == this_host() else process.host_id

    def adopt(
        self, member: Member, process: RemoteProcess, weights: str, layout: ExpertLayout | None
    ) -> None:
        """Adds a process that joined by itself, and sends it its settings.

        weights: fingerprint that its checkpoint must have. layout: of the experts, for a server.
        """
        member.is_external = member.has_tcp_connection = True
        member.devices = ()
        self.set_host(member, process)
        member.weights, instruction_set = weights, self._instruction_set(member.role)
        config = self._settings.config_for_newcomer(member, layout, instruction_set)
        answer = messages.EnlistReply(self._worker_config.model.model, weights, config)
        with contextlib.suppress(ConnectionLost):  # its reader thread reports it
            process.connection.send(answer)
        self._listen(member, process)

    def explain_difference(self, process: RemoteProcess) -> str | None:
        """Why a process that joins would compute other bits than this cluster; None if it would not."""
        return admission.explain_difference(process, self._instruction_set(process.role))

    def _instruction_set(self, role: Role) -> KernelName | None:
        """The instruction set with which members of this role compute. None: it is not fixed yet."""
        set_in_use = admission.find_set_in_use(self.servers if role is Role.SERVER else self.clients)
        if set_in_use is None and role is Role.RANKS and not self._gpus:
            return admission.choose_local_set(self._worker_config.model.kernels)
        return set_in_use

    def explain_misfit(self, member: Member, ready: messages.Ready) -> str | None:
        """Why a worker that joined cannot serve beside the others; None if it can."""
        return explain_misfit(
            member, ready, [worker.info for worker in self.clients if not worker.is_external]
        )

    def explain_refusal(self, role: Role) -> str | None:
        """Why no process of this role can join the cluster; None if one can."""
        return admission.explain_refusal(role, self._worker_config, self._settings.prefill)

    def refuse(self, member: Member, reason: str) -> None:
        """Tells a process that joined why it must leave, and disconnects it in the background."""
        member.complaint = reason
        if member.child is not None:
            thread = threading.Thread(target=_dismiss, args=(member.child, messages.Refuse(reason)))
            thread.start()

    def remove(self, member: Member) -> None:
        """Removes a member, and ends its process in the background. Its requests must have moved before."""
        with self._list_lock:
            if id(member) in map(id, [*self.clients, *self.servers]):
                counts = sum_stats([self._past_members.server_stats, server_counters_only(member.stats)])
                self._past_members = PastMembers(self._past_members.deaths + member.all_deaths, counts)
            self.workers = [other for other in self.workers if other is not member]
            self.prefill_workers = [other for other in self.prefill_workers if other is not member]
            self.servers = [other for other in self.servers if other is not member]
        self.remove_group(member)
        child, member.child = member.child, None
        # Late messages of its process have the old incarnation, so they are dropped.
        member.stage, member.incarnation = Stage.STOPPED, member.incarnation + 1
        if child is not None:
            arguments = child, messages.Shutdown()
            thread = threading.Thread(target=_dismiss, args=arguments, name=f"ending {member.name}")
            self._ending = [other for other in self._ending if other.is_alive()] + [thread]
            thread.start()

    def remove_group(self, member: Member) -> None:
        """A process is gone. If it belonged to a group with ranks of other hosts, these are ended."""
        with self._list_lock:
            former_ranks = self.ranks.members
            self.ranks.remove_group(member)
            ids = set(map(id, self.ranks.members))
            deaths = sum(rank.all_deaths for rank in former_ranks if id(rank) not in ids)
            self._past_members = replace(self._past_members, deaths=self._past_members.deaths + deaths)

    def empty_inbox(self) -> None:
        """Carries out what is left in the inbox, in place of the supervisor's thread."""
        with self._urgent_lock, contextlib.suppress(queue.Empty):
            while (action := self.inbox.get_nowait()) is not None:
                with contextlib.suppress(BaseException):  # such an action ended the supervisor
                    action()

    def stop(self) -> None:
        """Ends every process."""
        # A reader thread that stands in for the supervisor must not report deaths that this causes.
        with self._urgent_lock:
            self._stopping = True
            children = [member.child for member in self.all_members if member.child is not None]
        for child in children:
            child.stop()
        for thread in self._ending:
            thread.join()
        self.launcher.stop()

    @staticmethod
    def _select_launched(members: list[Member]) -> list[Member]:
        """Those that the launcher started."""
        return [member for member in members if not member.is_external]

    @staticmethod
    def _place(member: Member, alike: list[Member]) -> int:
        """Returns the index of a member among `alike`. Its number is no index: numbers of members that left
        are not reused."""
        return [other.number for other in alike].index(member.number)

    def _devices_of(self, role: Role) -> Devices:
        """The GPUs of a new member. Servers use the CPU unless the device is given."""
        on_cpu = role is Role.SERVER and self._worker_config.model.device != "cuda"
        ranks = 1 if role is Role.SERVER else self._worker_config.parallel.ranks_per_node
        return () if on_cpu else choose(self._gpus, [member.devices for member in self.all_members], ranks)

    @property
    def own_gpus(self) -> int | None:
        """GPUs of this host, if each process here needs one of its own. None: processes may share them, or
        all of them are elsewhere."""
        needs_own = self._worker_config.model.cudagraph_mode == "full" and not self.launcher.is_remote
        return len(self._gpus) if needs_own else None

    def _count_gpu_sharers(self, worker: Member) -> int:
        """Number of other processes that may use a GPU of this worker."""
        if self.launcher.is_remote:
            return 0  # Ray gives a GPU to one process only
        other_members = [member for member in self.all_members if member is not worker]
        if worker.devices:
            return count_sharing(worker.devices, [member.devices for member in other_members])
        servers = len(self.servers_of_launcher) if self._worker_config.model.device == "cuda" else 0
        return len(self._select_launched(self.clients)) + servers - 1

    def _part(self, member: Member) -> str | None:
        """Returns the file for its next process's part of the trace; None: there is no trace."""
        return part_path(self._worker_config.trace, member.name, member.incarnation + 1)

    def _server_threads(self, layout: ExpertLayout, place: int) -> int:
        if layout.num_bytes < SMALL_MODEL:
            return 1
        return self._cores.threads(place, len(self.servers_of_launcher))

    def _listen(self, member: Member, child: Process) -> None:
        member.stage, member.incarnation = Stage.STARTING, member.incarnation + 1
        member.child, member.settled_version, member.complaint = child, -1, None
        member.last_seen = member.start_time = self._clock()
        arguments = (member, member.incarnation, child)
        reader = threading.Thread(target=self._read, args=arguments, name=member.name, daemon=True)
        member.reader = reader
        reader.start()

    def _read(self, member: Member, incarnation: int, child: Process) -> None:
        """Runs the reader thread of a process. Messages that requests wait for go directly to the router, the
        others to the inbox."""

        def put(message: messages.Message | ConnectionLost) -> None:
            if self.is_supervised:
                self.inbox.put(lambda: pass_on(message))
            elif isinstance(message, ConnectionLost):
                # All other messages concern changes, which nobody makes without the supervisor.
                with self._urgent_lock:
                    if not self._stopping:
                        pass_on(message)

        def pass_on(message: messages.Message | ConnectionLost) -> None:
            if incarnation == member.incarnation:
                self._on_message(member, message)

        while True:
            try:
                message = child.connection.receive(None)
                if isinstance(message, ROUTER_MESSAGES) and member.is_client:
                    self._router.take(member.worker_id, message)
                    continue
            except ConnectionLost as lost:
                self._end_reading(member, lost, put)
                return
            except Exception as error:  # a bug in moesaic: its requests must not wait without end
                self._end_reading(member, ConnectionLost(f"a message failed: {error!r}"), put)
                raise
            if message is None:
                continue
            if not isinstance(message, MESSAGES_BY_ROLE.get(member.role, object)):
                put(ConnectionLost(f"{member.name} sent {type(message).__name__}"))
                return
            put(message)

    def _end_reading(
        self, member: Member, error: ConnectionLost, put: Callable[[ConnectionLost], None]
    ) -> None:
        """Ends the work with a process from which nothing more is read."""
        if member.is_client:
            self._leave(member)
        put(error)

    def _leave(self, member: Member) -> None:
        """Moves a worker's requests to other workers, even while the supervisor is busy or has failed."""
        self._router.leave(member.worker_id)
        if not self.is_supervised and not self._router.can_generate:
            self._router.fail(f"{member.name} was the last attention worker, and the supervisor has stopped")


def _dismiss(child: Process, word: messages.Message) -> None:
    with contextlib.suppress(ConnectionLost):  # the process has ended already
        child.connection.send(word)
    child.stop()
