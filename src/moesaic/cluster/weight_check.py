"""Compares the experts of servers that joined with this cluster's checkpoint, byte by byte.

A server that joined must have the fingerprint of the checkpoint, and sends the digest of each expert that it
holds. It gets rows once all of these equal the digests of the files here. Reading a large checkpoint takes
long, so after SECONDS a server gets rows by its fingerprint alone, and is refused later if a digest differs.

Question: Are the weights of a server that joins those of the cluster?
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from moesaic.cluster.member import Member
from moesaic.cluster.publishing import ExpertsByLayer
from moesaic.core import messages
from moesaic.core.errors import CheckpointError
from moesaic.core.experts import ExpertLayout
from moesaic.models.fingerprint import ExpertDigests

SECONDS = 60.0
"""Maximum seconds that a server which has loaded its experts waits for their digests."""

DigestsByLayer = dict[int, dict[int, str]]
"""Layer -> expert -> digest."""


@dataclass
class _CheckedServer:
    """What is known of one process that joined."""

    equal: set[tuple[int, int]] = field(default_factory=set)
    """(layer, expert) pairs whose bytes are those of the checkpoint here."""
    waiting: messages.HoldReply | None = None
    """The last Holds of the server, which is not passed on yet."""
    receipt_time: float = 0.0
    """When `waiting` came."""


class WeightCheck:
    """The checks of one cluster. Only the supervisor's thread uses it.

    run_later: runs a function in that thread.
    accept: called with the Holds message of a server whose experts were compared.
    refuse: called with a server and the reason why it must leave.
    """

    def __init__(
        self,
        path: Path,
        run_later: Callable[[Callable[[], None]], None],
        accept: Callable[[Member, messages.HoldReply], None],
        refuse: Callable[[Member, str], None],
        clock: Callable[[], float],
    ) -> None:
        """path: of the checkpoint here."""
        self._path = path
        self._weights = ""
        """Fingerprint of the checkpoint, once the layout is known."""
        self._run_later = run_later
        self._accept = accept
        self._refuse = refuse
        self._clock = clock
        self._servers: dict[tuple[int, int], _CheckedServer] = {}
        """(number, incarnation) of a member -> what is known of its process."""
        self._digest_queue: queue.SimpleQueue[tuple[Member, int, DigestsByLayer] | None] = queue.SimpleQueue()

    def set_layout(self, layout: ExpertLayout) -> None:
        """Starts the thread that reads the experts of `layout` when a server has sent digests."""
        self._weights = layout.weights
        arguments = ExpertDigests(self._path, layout), layout
        threading.Thread(target=self._run, args=arguments, name="digesting", daemon=True).start()

    def record_holds(self, member: Member, message: messages.HoldReply) -> None:
        """Keeps the Holds of a server that joined until its experts were compared. Passes on all others."""
        if not member.has_tcp_connection:
            self._accept(member, message)
            return
        if message.weights != self._weights:
            self._refuse(member, "its checkpoint has another fingerprint than this cluster's")
            return
        server = self._find_server(member)
        server.waiting, server.receipt_time = message, self._clock()

    def record_digests(self, member: Member, message: messages.Digests) -> None:
        """Compares a server's digests, in the background."""
        self._digest_queue.put((member, member.incarnation, message.experts))

    def tick(self, member: Member, list_experts: Callable[[], ExpertsByLayer]) -> None:
        """Passes on the Holds of a server once the experts that it holds were compared, or SECONDS later.

        list_experts: returns these experts.
        """
        server = self._servers.get((member.number, member.incarnation), _CheckedServer())
        message = server.waiting
        if message is None or message.version != member.last_hold:
            return
        pairs = {(layer, expert) for layer, experts in list_experts().items() for expert in experts}
        if pairs <= server.equal or self._clock() - server.receipt_time > SECONDS:
            server.waiting = None
            self._accept(member, message)

    def keep(self, members: Iterable[Member]) -> None:
        """Forgets all servers but these."""
        keys = {(member.number, member.incarnation) for member in members}
        for key in self._servers.keys() - keys:
            del self._servers[key]

    def close(self) -> None:
        """Ends the thread."""
        self._digest_queue.put(None)

    def _find_server(self, member: Member) -> _CheckedServer:
        return self._servers.setdefault((member.number, member.incarnation), _CheckedServer())

    def _run(self, digests: ExpertDigests, layout: ExpertLayout) -> None:
        while (item := self._digest_queue.get()) is not None:
            member, incarnation, sent_digests = item
            equal, difference = _compare(sent_digests, digests, layout)
            self._run_later(partial(self._record_comparison, member, incarnation, equal, difference))
            if self._digest_queue.empty():
                digests.save()

    def _record_comparison(
        self, member: Member, incarnation: int, equal: set[tuple[int, int]], difference: str
    ) -> None:
        if member.incarnation != incarnation or member.child is None:
            return
        self._find_server(member).equal |= equal
        if difference:
            self._refuse(member, difference)


def _compare(
    sent_digests: DigestsByLayer, own_digests: ExpertDigests, layout: ExpertLayout
) -> tuple[set[tuple[int, int]], str]:
    """The pairs that are equal, and what is not, in words."""
    equal: set[tuple[int, int]] = set()
    for layer, experts in sent_digests.items():
        for expert, digest in experts.items():
            if layer not in layout.prefixes or not 0 <= expert < layout.num_experts:
                return equal, f"the checkpoint has no expert {expert} of layer {layer}"
            try:
                own_digest = own_digests.digest_of(layer, expert)
            except CheckpointError as error:
                return equal, f"expert {expert} of layer {layer} cannot be compared: {error}"
            if digest != own_digest:
                reason = "its bytes are not those of this cluster's checkpoint"
                return equal, f"expert {expert} of layer {layer}: {reason}"
            equal.add((layer, expert))
    return equal, ""
