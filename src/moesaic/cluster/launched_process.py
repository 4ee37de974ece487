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
from moesaic.transport.awaited import AwaitedConnection
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
        self.connection = AwaitedConnection(self._named)
        self.member = member
        self.joining = joining
        self.settings = settings
        self.partner: str | None = None
        """Name of the member that should be on the same host."""
        self.room: Room | None = None
        self.given_up = threading.Event()
        self.thread = threading.Thread(target=self._live, name=f"life of {member.name}", daemon=True)
        self._find = find
        self._lose = lose
        self.peer: RemoteProcess | None = None
        """The process, once it has called."""
        self._how = ""
        self._ended = threading.Event()

    @property
    def runs(self) -> bool:
        """True until it has ended."""
        return not self._ended.is_set()

    def take(self, peer: RemoteProcess, weights: str, kernels: KernelName | None) -> None:
        """Connects to the process, which has called.

        weights: fingerprint of the checkpoint. kernels: those that it must use; None: as its settings say.
        """
        config = self.settings if kernels is None else _with_kernels(self.settings, kernels)
        with contextlib.suppress(ConnectionLost):  # `receive` reports it
            peer.connection.send(messages.Enlisted(self.joining.model or "", weights, config.to_json()))
        if self.connection.connect(peer.connection):
            self.member.host = peer.host
            self.member.host_id = "" if peer.host_id == this_host() else peer.host_id
            self.peer = peer
        else:
            peer.kill()

    def refuse(self, peer: RemoteProcess, why: str) -> None:
        """Ends a process that has called and cannot serve here."""
        self._fail(f"{self._where}: {why}", user_error=True)
        peer.kill()

    def waits(self, why: str) -> None:
        """Sets why it has no host yet; empty: it has one. The log has the first reason."""
        if self.member.child not in (None, self):
            return  # the member has a later process
        if why and not self.member.waiting:
            LOG.warning("%s: %s", self.member.name, why)
        self.member.waiting = why

    def how_it_ended(self) -> str:
        if self._ended.wait(ANSWER_SECONDS):
            return self._how
        if self.room is not None:
            self._lose(self.room.node)
        lost = "" if self.peer is None else f"{self.peer.how_it_ended()}; "
        return f"{lost}{self._where} does not answer"

    def kill(self) -> None:
        self.given_up.set()
        if self.peer is not None:
            self.peer.kill()
        self.connection.close()
        if self.room is not None and self.runs:
            self.room.kill()

    def stop(self) -> None:
        with contextlib.suppress(ConnectionLost):
            self.connection.send(messages.Shutdown())
        if not self.connection.is_waiting:
            self._ended.wait(STOP_SECONDS)
        self.kill()

    @property
    def _where(self) -> str:
        return "no host" if self.room is None else self.room.name

    def _live(self) -> None:
        """Runs the thread of the process."""
        self._how, why = "it was given up before it was started", None
        try:
            self.room = self._find(self)
            if self.room is not None and not self.given_up.is_set():
                why = self.room.start(self.joining)
                self._how = f"{self._where}: {why or self.room.wait()}"
        except ConnectionLost as error:
            self._how = f"{self._where}: {error}"
        finally:
            self._ended.set()
            self._fail(self._how, user_error=why is not None)
            if self.room is not None:
                self.room.free()

    def _fail(self, why: str, user_error: bool) -> None:
        self.connection.fail(why, messages.Failed(why, user_error=True) if user_error else None)

    def _named(self, message: messages.Message) -> messages.Message:
        """The message, with the host in what the process says about itself."""
        if isinstance(message, messages.Failed):
            return replace(message, error=f"{self._where}: {message.error}")
        return message


def _with_kernels(settings: Settings, kernels: KernelName) -> Settings:
    if isinstance(settings, WorkerConfig):
        return replace(settings, model=replace(settings.model, kernels=kernels))
    return replace(settings, kernels=kernels)
