"""A process that a launcher starts on another host, from the search for a host to the end of the process."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.joining.options import JoinOptions
from moesaic.cluster.member import Member
from moesaic.config import ExpertServerConfig, KernelName, WorkerConfig
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.transport.awaited_connection import AwaitedConnection
from moesaic.transport.host import this_host

LOG = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0
"""Seconds that a host has to say how its process ended. After that it counts as lost."""
STOP_SECONDS = 5.0
"""Seconds that a process has to leave after it was asked to."""

Settings = WorkerConfig | ExpertServerConfig


class Room(Protocol):
    """Room for one process on some host. Its methods raise ConnectionLost if the host cannot be asked."""

    @property
    def node(self) -> str:
        """Id of the host."""
        ...

    @property
    def name(self) -> str:
        """The host's name for people."""
        ...

    def start(self, joining: JoinOptions) -> str | None:
        """Starts the process. Returns None, or why it cannot run there, in words for people."""
        ...

    def wait(self) -> str:
        """Waits for the end of the process. Returns how it ended, in words for people."""
        ...

    def kill(self) -> None:
        """Kills the process, without waiting for its end."""
        ...

    def free(self) -> None:
        """Gives the room back, after the process has ended."""
        ...


class LaunchedProcess:
    """A process on a host that is still to be found. Its connection waits until the process calls."""

    pid: int | None = None

    def __init__(
        self,
        member: Member,
        joining: JoinOptions,
        settings: Settings,
        find: Callable[[LaunchedProcess], Room | None],
        lose: Callable[[str], None],
    ) -> None:
        """settings: of the process. find: waits for room, and returns None once the process was given up.
        lose: called with the id of a host that does not answer."""
        self.connection = AwaitedConnection(self._name_host)
        self.member = member
        self.joining = joining
        self.settings = settings
        self.partner: str | None = None
        """Name of the member that should be on the same host."""
        self.room: Room | None = None
        self.cancel_event = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"life of {member.name}", daemon=True)
        self._find = find
        self._lose = lose
        self.peer: RemoteProcess | None = None
        """The process, once it has called."""
        self._end_description = ""
        self._end_event = threading.Event()

    @property
    def is_running(self) -> bool:
        """True until it has ended."""
        return not self._end_event.is_set()

    def take(self, peer: RemoteProcess, weights: str, kernels: KernelName | None) -> None:
        """Connects to the process, which has called.

        weights: fingerprint of the checkpoint. kernels: those that it must use; None: as its settings say.
        """
        config = self.settings if kernels is None else _with_kernels(self.settings, kernels)
        with contextlib.suppress(ConnectionLost):  # `receive` reports it
            peer.connection.send(messages.EnlistReply(self.joining.model or "", weights, config.to_json()))
        if self.connection.connect(peer.connection):
            self.member.host = peer.host
            self.member.host_id = "" if peer.host_id == this_host() else peer.host_id
            self.peer = peer
        else:  # the place has a process already, or was given up
            peer.kill()

    def refuse(self, peer: RemoteProcess, reason: str) -> None:
        """Ends a process that has called and cannot serve here."""
        self._fail(f"{self._host_name}: {reason}", user_error=True)
        peer.kill()

    def set_waiting(self, reason: str) -> None:
        """Sets why it has no host yet; empty: it has one. The log has the first reason."""
        if self.member.child not in (None, self):
            return  # the member has a later process
        if reason and not self.member.waiting:
            LOG.warning("%s: %s", self.member.name, reason)
        self.member.waiting = reason

    def describe_end(self) -> str:
        if self._end_event.wait(ANSWER_SECONDS):
            return self._end_description
        if self.room is not None:
            self._lose(self.room.node)
        connection_end = "" if self.peer is None else f"{self.peer.describe_end()}; "
        return f"{connection_end}{self._host_name} does not answer"

    def kill(self) -> None:
        self.cancel_event.set()
        if self.peer is not None:
            self.peer.kill()
        self.connection.close()
        if self.room is not None and self.is_running:
            self.room.kill()

    def stop(self) -> None:
        with contextlib.suppress(ConnectionLost):
            self.connection.send(messages.Shutdown())
        if not self.connection.is_waiting:
            self._end_event.wait(STOP_SECONDS)
        self.kill()

    @property
    def _host_name(self) -> str:
        return "no host" if self.room is None else self.room.name

    def _run(self) -> None:
        """Runs the thread of the process."""
        self._end_description, reason = "it was given up before it was started", None
        try:
            self.room = self._find(self)
            if self.room is not None and not self.cancel_event.is_set():
                reason = self.room.start(self.joining)
                self._end_description = f"{self._host_name}: {reason or self.room.wait()}"
        except ConnectionLost as error:
            self._end_description = f"{self._host_name}: {error}"
        finally:
            # The event comes first: a failure makes the supervisor ask how the process ended.
            self._end_event.set()
            self._fail(self._end_description, user_error=reason is not None)
            if self.room is not None:
                self.room.free()

    def _fail(self, reason: str, user_error: bool) -> None:
        self.connection.fail(reason, messages.WorkerFailed(reason, user_error=True) if user_error else None)

    def _name_host(self, message: messages.Message) -> messages.Message:
        """The message, with the host in what the process says about itself."""
        if isinstance(message, messages.WorkerFailed):
            return replace(message, error=f"{self._host_name}: {message.error}")
        return message


def _with_kernels(settings: Settings, kernels: KernelName) -> Settings:
    if isinstance(settings, WorkerConfig):
        return replace(settings, model=replace(settings.model, kernels=kernels))
    return replace(settings, kernels=kernels)
