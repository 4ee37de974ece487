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
from moesaic.cluster.publishing import Held
from moesaic.core import messages
from moesaic.core.errors import CheckpointError
from moesaic.core.experts import ExpertLayout
from moesaic.models.fingerprint import ExpertDigests

SECONDS = 60.0
"""Maximum seconds that a server which has loaded its experts waits for their digests."""

Told = dict[int, dict[int, str]]
"""Layer -> expert -> digest."""


@dataclass
class _Checked:
    """What is known of one process that joined."""

    equal: set[tuple[int, int]] = field(default_factory=set)
    """(layer, expert) pairs whose bytes are those of the checkpoint here."""
    waiting: messages.Holds | None = None
    """Its last Holds, which is not passed on yet."""
    since: float = 0.0
    """When `waiting` came."""


class WeightCheck:
    """The checks of one cluster. Only the supervisor's thread uses it.

    later: runs a function in that thread.
    accept: called with the Holds message of a server whose experts were compared.
    refuse: called with a server and the reason why it must leave.
    """

    def __init__(
        self,
        path: Path,
        later: Callable[[Callable[[], None]], None],
        accept: Callable[[Member, messages.Holds], None],
        refuse: Callable[[Member, str], None],
        clock: Callable[[], float],
    ) -> None:
        """path: of the checkpoint here."""
        self._path = path
        self._weights = ""
        """Fingerprint of the checkpoint, once the layout is known."""
        self._later = later
        self._accept = accept
        self._refuse = refuse
        self._clock = clock
        self._known: dict[tuple[int, int], _Checked] = {}
        """By the member's number and incarnation."""
        self._received: queue.SimpleQueue[tuple[Member, int, Told] | None] = queue.SimpleQueue()

    def lay_out(self, layout: ExpertLayout) -> None:
        """Starts the thread that reads the experts of `layout` when a server has sent digests."""
        self._weights = layout.weights
        arguments = ExpertDigests(self._path, layout), layout
        threading.Thread(target=self._run, args=arguments, name="digesting", daemon=True).start()

    def holds(self, member: Member, message: messages.Holds) -> None:
        """Keeps the Holds of a server that joined until its experts were compared. Passes on all others."""
        if not member.joined:
            self._accept(member, message)
            return
        if message.weights != self._weights:
            self._refuse(member, "its checkpoint has another fingerprint than this cluster's")
            return
        checked = self._of(member)
        checked.waiting, checked.since = message, self._clock()

    def digests(self, member: Member, message: messages.Digests) -> None:
        """Compares a server's digests, in the background."""
        self._received.put((member, member.incarnation, message.experts))

    def tick(self, member: Member, held: Callable[[], Held]) -> None:
        """Passes on the Holds of a server once the experts that it holds were compared, or SECONDS later.

        held: returns these experts.
        """
        checked = self._known.get((member.number, member.incarnation), _Checked())
        message = checked.waiting
        if message is None or message.version != member.last_hold:
            return
        pairs = {(layer, expert) for layer, experts in held().items() for expert in experts}
        if pairs <= checked.equal or self._clock() - checked.since > SECONDS:
            checked.waiting = None
            self._accept(member, message)

    def keep(self, members: Iterable[Member]) -> None:
        """Forgets all servers but these."""
        there = {(member.number, member.incarnation) for member in members}
        for gone in self._known.keys() - there:
            del self._known[gone]

    def close(self) -> None:
        """Ends the thread."""
        self._received.put(None)

    def _of(self, member: Member) -> _Checked:
        return self._known.setdefault((member.number, member.incarnation), _Checked())

    def _run(self, digests: ExpertDigests, layout: ExpertLayout) -> None:
        while (received := self._received.get()) is not None:
            member, incarnation, told = received
            equal, other = _compare(told, digests, layout)
            self._later(partial(self._compared, member, incarnation, equal, other))
            if self._received.empty():
                digests.save()

    def _compared(self, member: Member, incarnation: int, equal: set[tuple[int, int]], other: str) -> None:
        if member.incarnation != incarnation or member.child is None:
            return
        self._of(member).equal |= equal
        if other:
            self._refuse(member, other)


def _compare(told: Told, digests: ExpertDigests, layout: ExpertLayout) -> tuple[set[tuple[int, int]], str]:
    """The pairs that are equal, and what is not, in words."""
    equal: set[tuple[int, int]] = set()
    for layer, experts in told.items():
        for expert, digest in experts.items():
            if layer not in layout.prefixes or not 0 <= expert < layout.num_experts:
                return equal, f"the checkpoint has no expert {expert} of layer {layer}"
            try:
                own = digests.digest_of(layer, expert)
            except CheckpointError as error:
                return equal, f"expert {expert} of layer {layer} cannot be compared: {error}"
            if digest != own:
                why = "its bytes are not those of this cluster's checkpoint"
                return equal, f"expert {expert} of layer {layer}: {why}"
            equal.add((layer, expert))
    return equal, ""
