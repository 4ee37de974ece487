"""Accepts or refuses the processes that connect to `--cluster-address`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from moesaic.cluster.change_queue import ChangeQueue
from moesaic.cluster.join_listener import JoinListener, RemoteProcess
from moesaic.cluster.links import Links
from moesaic.cluster.members import Members
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.models import fingerprint

LOG = logging.getLogger(__name__)
GOODBYE_SECONDS = 1.0
"""Seconds that a standby has to read that the cluster ends."""


class Newcomers:
    """Listens for processes that want to join one cluster."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        model: Path,
        members: Members,
        links: Links,
        changes: ChangeQueue,
        note: Callable[[str], None],
    ) -> None:
        """address: tcp:HOST:PORT to listen at. model: path of the checkpoint that is served. note: records a
        failure, in the supervisor's thread.

        Raises ConfigError if it cannot listen at the address.
        """
        self._model, self._members, self._links = model, members, links
        self._changes, self._note = changes, note
        self._standbys: list[RemoteProcess] = []
        self.listener = JoinListener(address, secret, self._welcome)

    @property
    def standbys(self) -> list[str]:
        """Hosts that watch this one and would take over."""
        return [one.host for one in self._standbys if not one.connection.ended(0.0)]

    def close(self) -> None:
        """Stops listening, and tells those that watch this cluster that it ends on purpose."""
        self.listener.close()
        for standby in self._standbys:
            with contextlib.suppress(ConnectionLost):
                standby.connection.send(messages.Shutdown())
                standby.connection.ended(GOODBYE_SECONDS)
            standby.connection.close()

    def _welcome(self, process: RemoteProcess) -> None:
        """Adds a process, or refuses it. Called in a thread of the listener."""
        if process.standby:
            self._watched_by(process)
            return
        if process.link is not None:
            self._links.measured(process.host_id, process.link)
        why_not = self._members.why_not(process.role)
        if why_not is not None:
            self._members.inbox.put(lambda: self._note(f"{process.peer} is refused: {why_not}"))
            process.refuse(why_not)
        elif self._members.watched:
            weights = fingerprint.compute_fingerprint(self._model)
            self._members.inbox.put(lambda: self._changes.join(process, weights))
        else:
            process.stop()

    def _watched_by(self, process: RemoteProcess) -> None:
        """Keeps the connection of a standby. Its signs of life, and those to it, need nothing else."""
        LOG.info("%s stands by", process.host)
        with contextlib.suppress(ConnectionLost):
            told = messages.Enlisted(str(self._model), fingerprint.compute_fingerprint(self._model), "")
            process.connection.send(told)
        there = [one for one in self._standbys if not one.connection.ended(0.0)]
        self._standbys = [*there, process]
