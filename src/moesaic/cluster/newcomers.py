"""Accepts or refuses the processes that connect to `--cluster-address`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moesaic.cluster.change_queue import ChangeQueue
from moesaic.cluster.join_listener import JoinListener, RemoteProcess
from moesaic.cluster.links import Links
from moesaic.cluster.members import Members
from moesaic.models import fingerprint


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
        self.listener = JoinListener(address, secret, self._welcome)

    def _welcome(self, process: RemoteProcess) -> None:
        """Adds a process, or refuses it. Called in a thread of the listener."""
        if process.link is not None:
            self._links.measured(process.host_id, process.link)
        why_not = self._members.why_not(process.role)
        if why_not is not None:
            self._members.inbox.put(lambda: self._note(f"{process.peer} is refused: {why_not}"))
            process.refuse(why_not)
        elif self._members.watched:
            weights = fingerprint.of(self._model)
            self._members.inbox.put(lambda: self._changes.join(process, weights))
        else:
            process.stop()
