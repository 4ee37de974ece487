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

    is_remote = True

    def __init__(self, worker: WorkerConfig) -> None:
        self._path = Path(worker.model.model)
        self._kernels, self._device = worker.model.kernels, worker.model.device
        self._requested_counts: Mapping[Role, int] = dict.fromkeys(Role, 0)
        """Role -> number of places, before the first of that role is there."""
        self._waiting: dict[Role, list[RemoteProcess]] = {role: [] for role in Role}
        """Processes that have called and have no place yet."""
        self._processes: list[LaunchedProcess] = []
        self._condition = threading.Condition()
        self._sets: dict[bool, KernelName] = {}
        """Whether it is that of expert servers -> instruction set of the native kernels."""

    def set_address(self, address: str) -> None:
        pass

    def start_worker(self, member: Member, config: WorkerConfig) -> LaunchedProcess:
        return self._start(member, config, config.model.model)

    def start_server(self, member: Member, config: ExpertServerConfig) -> LaunchedProcess:
        return self._start(member, config, config.model)

    def take(self, process: RemoteProcess) -> bool:
        role = process.role
        with self._condition:
            self._waiting[role] = [
                place for place in self._waiting[role] if not place.connection.wait_for_end(0.0)
            ]
            places = [place for place in self._processes if place.member.role is role]
            free = (
                sum(place.room is None and place.is_running for place in places)
                if places
                else self._requested_counts[role]
            )
            if len(self._waiting[role]) >= free:
                return False
            self._waiting[role].append(process)
            self._condition.notify_all()
        return True

    def request_hosts(self, numbers: Mapping[Role, int]) -> None:
        with self._condition:
            self._requested_counts = dict(numbers)

    def stop(self) -> None:
        for waiting in self._waiting.values():
            for process in waiting:
                process.stop()

    # ---- internal

    def _start(self, member: Member, settings: Settings, model: str) -> LaunchedProcess:
        joining = JoinOptions("", member.role.flag, model=model)
        member.weights = fingerprint.compute_fingerprint(self._path)
        # No host is avoided: processes join from where they are started.
        process = LaunchedProcess(member, joining, settings, self._wait_for_process, lambda node: None)
        self._processes.append(process)
        process.thread.start()
        return process

    def _wait_for_process(self, place: LaunchedProcess) -> JoinedRoom | None:
        """Waits for a process of the role. Returns None if the place was given up meanwhile."""
        role = place.member.role
        try:
            with self._condition:
                while not place.cancel_event.is_set():
                    for process in list(self._waiting[role]):
                        self._waiting[role].remove(process)
                        # The process may have left while it waited for a place.
                        if not process.connection.wait_for_end(0.0):
                            place.room = room = JoinedRoom(
                                process, place, self._choose_instruction_set(process)
                            )
                            return room
                    place.set_waiting(f"waiting for moesaic join --role {role.flag}")
                    self._condition.wait(POLL_SECONDS)
            return None
        finally:
            place.set_waiting("")

    def _choose_instruction_set(self, process: RemoteProcess) -> KernelName | None:
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

    def __init__(
        self, process: RemoteProcess, place: LaunchedProcess, instruction_set: KernelName | None
    ) -> None:
        self.name = process.host
        self._process, self._place, self._instruction_set = process, place, instruction_set

    def start(self, joining: JoinOptions) -> str | None:
        instruction_set, sets = self._instruction_set, self._process.instruction_sets
        if instruction_set is not None and instruction_set not in sets:
            reason = (
                f"--kernels: this cluster computes with {instruction_set}, which the CPU of {self.name} lacks"
            )
            self._process.refuse(reason)
            return reason
        self._place.take(self._process, self._place.member.weights, instruction_set)
        return None

    def wait(self) -> str:
        while not self._process.connection.wait_for_end(POLL_SECONDS):
            pass
        return self._process.describe_end()

    def kill(self) -> None:
        self._process.kill()

    def free(self) -> None:
        pass
