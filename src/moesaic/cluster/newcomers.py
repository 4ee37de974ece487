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
        return [standby.host for standby in self._standbys if not standby.connection.wait_for_end(0.0)]

    def close(self) -> None:
        """Stops listening, and tells those that watch this cluster that it ends on purpose."""
        self.listener.close()
        for standby in self._standbys:
            with contextlib.suppress(ConnectionLost):
                standby.connection.send(messages.Shutdown())
                standby.connection.wait_for_end(GOODBYE_SECONDS)
            standby.connection.close()

    def _welcome(self, process: RemoteProcess) -> None:
        """Adds a process, or refuses it. Called in a thread of the listener."""
        if process.is_standby:
            self._add_standby(process)
            return
        if process.link is not None:
            self._links.record_link(process.host_id, process.link)
        refusal = self._members.explain_refusal(process.role)
        # This thread is the listener's. Only the supervisor's thread changes members, by its inbox.
        if refusal is not None:
            self._members.inbox.put(lambda: self._note(f"{process.peer} is refused: {refusal}"))
            process.refuse(refusal)
        elif self._members.is_supervised:
            weights = fingerprint.compute_fingerprint(self._model)
            self._members.inbox.put(lambda: self._changes.join(process, weights))
        else:
            process.stop()

    def _add_standby(self, process: RemoteProcess) -> None:
        """Keeps the connection of a standby. Its signs of life, and those to it, need nothing else."""
        LOG.info("%s stands by", process.host)
        with contextlib.suppress(ConnectionLost):
            answer = messages.EnlistReply(str(self._model), fingerprint.compute_fingerprint(self._model), "")
            process.connection.send(answer)
        connected_standbys = [
            standby for standby in self._standbys if not standby.connection.wait_for_end(0.0)
        ]
        self._standbys = [*connected_standbys, process]
