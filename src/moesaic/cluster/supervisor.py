"""Starts attention workers and expert servers, restarts what died, publishes who serves what.

One thread owns all of it; a reader thread for each process hands it what that process says. Nothing that
requests need passes through here: clients and servers meet by themselves, and a client decides alone that a
server is gone (`policy.replicas`). The supervisor only heals.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from moesaic.cluster.local import ChildProcess, spawn_server, spawn_worker
from moesaic.cluster.member import Member, RestartRule, Role, Stage
from moesaic.cluster.placing import first_placement
from moesaic.cluster.router import Router
from moesaic.config import ClusterConfig, ExpertServerConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.experts import Directory, ExpertLayout, ServerEntry
from moesaic.core.placement import Placement

LOG = logging.getLogger(__name__)
TICK = 0.1
"""Seconds between two looks at the clock."""
FROZEN_SECONDS = 5.0
"""Without a sign of life: the process is killed, then started again."""

Heard = tuple[Member, int, messages.Message | ConnectionLost]
"""Who, which incarnation, what."""


@dataclass(frozen=True)
class MemberStatus:
    """A process, for people and admin endpoints."""

    name: str
    stage: str
    pid: int | None
    incarnation: int
    deaths: int
    last_failure: str | None


class Supervisor:
    """Runs in its own thread from `start` to `stop`."""

    def __init__(
        self, worker: WorkerConfig, cluster: ClusterConfig, router: Router, clock: Callable[[], float]
    ) -> None:
        self._worker_config = replace(worker, remote_experts=cluster.expert_servers > 0)
        self._cluster = cluster
        self._router = router
        self._clock = clock
        self._rule = RestartRule()
        self._secret = secrets.token_bytes(32)
        self._folder = Path(tempfile.mkdtemp(prefix="moesaic-"))
        self._inbox: queue.SimpleQueue[Heard | None] = queue.SimpleQueue()
        self._workers = [Member(Role.WORKER, number) for number in range(cluster.attention_workers)]
        self._servers = [Member(Role.SERVER, number) for number in range(cluster.expert_servers)]
        self._layout: ExpertLayout | None = None
        self._placement: Placement | None = None
        self._version = 0
        """Of the directory."""
        self._announced = False
        self._ended: str | None = None
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Spawn the attention workers; the first one's layout starts the servers."""
        for member in self._workers:
            self._spawn(member)
        self._thread.start()

    def stop(self) -> None:
        """End every process."""
        self._inbox.put(None)
        self._thread.join()
        for member in self._members:
            if member.child is not None:
                member.child.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def how_it_ended(self) -> str:
        """For a person, once the router's connection is lost."""
        return self._ended or "the cluster was stopped"

    def status(self) -> list[MemberStatus]:
        return [
            MemberStatus(
                name=member.name,
                stage=member.stage.value,
                pid=None if member.child is None else member.child.pid,
                incarnation=member.incarnation,
                deaths=len(member.deaths),
                last_failure=member.last_failure,
            )
            for member in self._members
        ]

    @property
    def placement(self) -> Placement | None:
        """The one that is served."""
        return self._placement

    @property
    def _members(self) -> list[Member]:
        return self._workers + self._servers

    # ---- the loop

    def _run(self) -> None:
        while True:
            try:
                heard = self._inbox.get(timeout=TICK)
            except queue.Empty:
                heard = ()  # type: ignore[assignment]
            if heard is None:
                return
            if heard:
                member, incarnation, message = heard
                if incarnation == member.incarnation:
                    self._hear(member, message)
            self._tick(self._clock())

    def _hear(self, member: Member, message: messages.Message | ConnectionLost) -> None:
        member.last_seen = self._clock()
        match message:
            case ConnectionLost():
                self._lost(member)
            case messages.Layout(layout):
                self._lay_out(layout)
            case messages.Ready(info):
                member.stage = Stage.SERVING
                assert member.child is not None
                self._introduce(member)
                self._router.join(member.number, member.child.connection, info)
            case messages.Holds():
                member.address, member.holds, member.kernels = (
                    message.address,
                    message.version,
                    message.kernels,
                )
                member.stage = Stage.SERVING
                self._publish()
            case messages.ServerReport():
                member.stats = message.stats
            case messages.Failed() if message.user_error and not self._announced:
                self._router.tell(message)
            case messages.Failed():
                LOG.error("%s: %s", member.name, message.error)
            case messages.Loading() if member.number == 0:
                self._router.tell(message)
        self._announce()

    def _tick(self, now: float) -> None:
        for member in self._members:
            if member.stage is Stage.WAITING and now >= member.restart_at and self._ended is None:
                self._spawn(member)
            silent = now - member.last_seen > FROZEN_SECONDS
            if member.stage is Stage.SERVING and silent and member.child is not None:
                LOG.warning("%s shows no sign of life: killing it", member.name)
                member.child.process.kill()
                member.last_seen = now

    def _announce(self) -> None:
        """Once everything serves: the engine may submit."""
        if not self._announced and all(member.stage is Stage.SERVING for member in self._members):
            self._announced = True
            self._router.tell(messages.Ready(self._router.info()))

    # ---- processes

    def _spawn(self, member: Member) -> None:
        member.stage, member.incarnation = Stage.STARTING, member.incarnation + 1
        if member.role is Role.WORKER:
            member.child = spawn_worker(self._worker_config)
        else:
            assert self._layout is not None and self._placement is not None
            member.child = spawn_server(self._server_config(member, self._layout))
            held = {layer: list(ids) for layer, ids in self._placement.of(member.number).items()}
            member.child.connection.send(messages.Hold(self._placement.version, held, self._secret))
        member.last_seen = self._clock()
        arguments = (member, member.incarnation, member.child)
        threading.Thread(target=self._read, args=arguments, name=member.name, daemon=True).start()

    def _server_config(self, member: Member, layout: ExpertLayout) -> ExpertServerConfig:
        model = self._worker_config.model
        return ExpertServerConfig(
            model=model.model,
            layout=layout,
            address=f"unix:{self._folder}/server-{member.number}-{member.incarnation}",
            kernels=model.kernels,
            device="cpu" if model.device == "auto" else model.device,
            threads=model.threads or self._threads(),
            pin_threads=model.pin_threads,
            schedule=self._worker_config.scheduler.schedule,
            queue_policy=self._worker_config.scheduler.queue_policy,
        )

    def _threads(self) -> int:
        """Of each process, when all share this machine's cores."""
        return max(1, len(os.sched_getaffinity(0)) // len(self._members))

    def _read(self, member: Member, incarnation: int, child: ChildProcess) -> None:
        """A process's reader thread: what requests wait for goes straight on, the rest to the loop."""
        while True:
            try:
                message = child.connection.receive(None)
            except ConnectionLost as lost:
                self._inbox.put((member, incarnation, lost))
                return
            match message:
                case messages.Tokens() | messages.Admitted() | messages.PromptLogprobs() | messages.Stats():
                    self._router.take(member.number, message)
                case None:
                    continue
                case _:
                    self._inbox.put((member, incarnation, message))

    def _lost(self, member: Member) -> None:
        """A process ended. Requests of a worker move; a server's clients knew before us."""
        assert member.child is not None
        how = member.child.how_it_ended()
        member.child.connection.close()
        if member.child.process.poll() is None:
            member.child.process.kill()
        LOG.warning("%s: %s", member.name, how)
        again = member.died(how, self._clock(), self._rule)
        if member.role is Role.WORKER:
            self._router.leave(member.number)
        if self._ended is None and not (again and self._announced):
            self._ended = how if again else f"{member.name} keeps dying, the last time so: {how}"
            self._router.fail(self._ended)

    # ---- who serves what

    def _lay_out(self, layout: ExpertLayout) -> None:
        """The first layout decides the placement and starts the servers."""
        if self._layout is not None:
            return
        self._layout = layout
        try:
            self._placement = first_placement(layout, self._cluster)
        except ConfigError as error:
            self._router.tell(messages.Failed(str(error), user_error=True))
            return
        for member in self._servers:
            self._spawn(member)

    def _directory(self) -> Directory:
        assert self._placement is not None
        serving = [member for member in self._servers if member.stage is Stage.SERVING]
        held = {
            member.number: {layer: list(ids) for layer, ids in self._placement.of(member.number).items()}
            for member in serving
        }
        entries = [ServerEntry(member.number, member.incarnation, member.address) for member in serving]
        return Directory(self._version, entries, held)

    def _publish(self) -> None:
        """Tell every worker who serves what."""
        self._version += 1
        for member in self._workers:
            if member.stage is Stage.SERVING:
                self._introduce(member)

    def _introduce(self, member: Member) -> None:
        if self._placement is None or member.child is None:
            return
        try:
            member.child.connection.send(messages.Serving(self._directory(), self._secret))
        except ConnectionLost:
            pass  # its reader thread tells
