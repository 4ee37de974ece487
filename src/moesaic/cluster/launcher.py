"""Where the processes of a cluster come from: this host (`local`), or the nodes of a Ray cluster (`ray`).

A launcher starts a process once. Whether it is started again is the supervisor's decision.

Question: Where does a process start: on this host, or on a node of a Ray cluster?
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.local import spawn_server, spawn_worker
from moesaic.cluster.member import Member, Process, Role
from moesaic.config import ExpertServerConfig, WorkerConfig


class Launcher(Protocol):
    """Starts the processes of members. Only the supervisor's thread calls it."""

    @property
    def is_remote(self) -> bool:
        """True if the processes run on hosts of its choice, and join over TCP. This host's cores and GPUs
        are then not shared out among them."""
        ...

    def start_worker(self, member: Member, config: WorkerConfig) -> Process:
        """Starts the next process of an attention worker of either role.

        The process may not run yet: see `Member.waiting`. If it cannot run, its connection says why.
        """
        ...

    def start_server(self, member: Member, config: ExpertServerConfig) -> Process:
        """Starts the next process of an expert server, as `worker` does."""
        ...

    def set_address(self, address: str) -> None:
        """Sets the address to which processes connect, tcp:HOST:PORT."""
        ...

    def take(self, process: RemoteProcess) -> bool:
        """Takes a process that joined with a ticket. Returns False for a ticket of no process that it waits
        for."""
        ...

    def request_hosts(self, numbers: Mapping[Role, int]) -> None:
        """Asks for hosts for so many processes of each role, those that run already among them."""
        ...

    def stop(self) -> None:
        """Ends what the launcher itself has started. Called after every process has ended."""
        ...


class LocalLauncher:
    """Starts processes as children on this host. Each inherits its end of a socket pair."""

    is_remote = False

    def start_worker(self, member: Member, config: WorkerConfig) -> Process:
        return spawn_worker(config)

    def start_server(self, member: Member, config: ExpertServerConfig) -> Process:
        return spawn_server(config)

    def set_address(self, address: str) -> None:
        pass

    def take(self, process: RemoteProcess) -> bool:
        return False

    def request_hosts(self, numbers: Mapping[Role, int]) -> None:
        pass

    def stop(self) -> None:
        pass
