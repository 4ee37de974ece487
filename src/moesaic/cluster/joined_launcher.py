"""Gives the places of a new cluster to processes that join it, in place of starting any (`--standby-for`).

A standby takes over a cluster whose processes run already. So the places that its settings name are for those
that call: first come, first served. Until enough have called, the others wait.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.joining.options import JoinOptions
from moesaic.cluster.launched_process import LaunchedProcess, Settings
from moesaic.cluster.member import Member, Role
from moesaic.config import ExpertServerConfig, KernelName, WorkerConfig
from moesaic.models import fingerprint

POLL_SECONDS = 0.1


class JoinedLauncher:
    """The places of one cluster, and the processes that have called."""

    elsewhere = True

    def __init__(self, worker: WorkerConfig) -> None:
        self._path = Path(worker.model.model)
        self._kernels, self._device = worker.model.kernels, worker.model.device
        self._asked: Mapping[Role, int] = dict.fromkeys(Role, 0)
        """Role -> number of places, before the first of that role is there."""
        self._waiting: dict[Role, list[RemoteProcess]] = {role: [] for role in Role}
        """Processes that have called and have no place yet."""
        self._processes: list[LaunchedProcess] = []
        self._changed = threading.Condition()
        self._sets: dict[bool, KernelName] = {}
        """Whether it is that of expert servers -> instruction set of the native kernels."""

    def call_back_at(self, address: str) -> None:
        pass

    def worker(self, member: Member, config: WorkerConfig) -> LaunchedProcess:
        return self._start(member, config, config.model.model)

    def server(self, member: Member, config: ExpertServerConfig) -> LaunchedProcess:
        return self._start(member, config, config.model)

    def take(self, process: RemoteProcess) -> bool:
        role = process.role
        with self._changed:
            self._waiting[role] = [one for one in self._waiting[role] if not one.connection.ended(0.0)]
            places = [one for one in self._processes if one.member.role is role]
            free = sum(one.room is None and one.runs for one in places) if places else self._asked[role]
            if len(self._waiting[role]) >= free:
                return False
            self._waiting[role].append(process)
            self._changed.notify_all()
        return True

    def ask(self, numbers: Mapping[Role, int]) -> None:
        with self._changed:
            self._asked = dict(numbers)

    def stop(self) -> None:
        for waiting in self._waiting.values():
            for process in waiting:
                process.stop()

    # ---- internal

    def _start(self, member: Member, settings: Settings, model: str) -> LaunchedProcess:
        joining = JoinOptions("", member.role.flag, model=model)
        member.weights = fingerprint.compute_fingerprint(self._path)
        process = LaunchedProcess(member, joining, settings, self._find, lambda node: None)
        self._processes.append(process)
        process.thread.start()
        return process

    def _find(self, place: LaunchedProcess) -> JoinedRoom | None:
        """Waits for a process of the role. Returns None if the place was given up meanwhile."""
        role = place.member.role
        try:
            with self._changed:
                while not place.given_up.is_set():
                    for process in list(self._waiting[role]):
                        self._waiting[role].remove(process)
                        if not process.connection.ended(0.0):
                            place.room = room = JoinedRoom(process, place, self._set(process))
                            return room
                    place.waits(f"waiting for moesaic join --role {role.flag}")
                    self._changed.wait(POLL_SECONDS)
            return None
        finally:
            place.waits("")

    def _set(self, process: RemoteProcess) -> KernelName | None:
        """The instruction set of processes like this one: with --kernels auto on CPUs that of the first one.
        None: as the settings say. A worker with --device auto may have a GPU, which nobody here knows."""
        on_cpu = self._device == "cpu" or (self._device == "auto" and process.role is Role.SERVER)
        if self._kernels != "auto" or not on_cpu or not process.instruction_sets:
            return None
        best = cast("KernelName", process.instruction_sets[0])
        return self._sets.setdefault(process.role is Role.SERVER, best)


class JoinedRoom:
    """The host of a process that has called, which runs already."""

    node = ""

    def __init__(self, process: RemoteProcess, place: LaunchedProcess, used: KernelName | None) -> None:
        self.name = process.host
        self._process, self._place, self._used = process, place, used

    def start(self, joining: JoinOptions) -> str | None:
        used, sets = self._used, self._process.instruction_sets
        if used is not None and used not in sets:
            why = f"--kernels: this cluster computes with {used}, which the CPU of {self.name} lacks"
            self._process.refuse(why)
            return why
        self._place.take(self._process, self._place.member.weights, used)
        return None

    def wait(self) -> str:
        while not self._process.connection.ended(POLL_SECONDS):
            pass
        return self._process.how_it_ended()

    def kill(self) -> None:
        self._process.kill()

    def free(self) -> None:
        pass
