"""The client side of the barrier at which all clients begin a step together (barrier schedule)."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.core.errors import ConnectionLost
from moesaic.experts import wire
from moesaic.experts.outstanding import ServerConnection
from moesaic.transport.calls import Call


class BarrierClient:
    """Arrives at the barrier of every server, and may begin the step when one of them answers.

    One server would be enough, but it may be frozen. Every server also learns that this client runs no step.
    """

    def __init__(self, hidden: int, worker: int = 0) -> None:
        """worker: this worker's number in requests."""
        self._hidden, self._worker = hidden, worker
        self._step = 1
        """Number of the step that it begins next.

        A client that is newer than its servers begins a step at once, and learns its number from the answer.
        """
        self._work: bool | None = None
        """The `work` flag to arrive with. None when the client does not wait at the barrier."""
        self._told: list[ServerConnection] = []
        """Connections on which it has arrived with this flag.

        A server that was started again has a new connection, and does not know of a call on the old one.
        """
        self._passed = False

    @property
    def waiting(self) -> bool:
        """True from `enter` until `entered` has returned True."""
        return self._work is not None or self._passed

    @property
    def idle(self) -> bool:
        """True while it waits at the barrier without rows: it waits for requests, not for experts."""
        return self._work is False

    def enter(self, work: bool) -> None:
        """Wait at the barrier, with rows to compute or without. Call it again when that changes."""
        self._work, self._told = work, []

    def entered(self) -> bool:
        """Returns True once after the barrier opened."""
        passed, self._passed = self._passed, False
        return passed

    def arrive(self, ends: Sequence[ServerConnection]) -> None:
        """Arrive at the barrier of each of these servers, unless it has done so already."""
        if self._work is None:
            return
        for end in ends:
            if not any(told is end for told in self._told):
                self._arrive(end, self._work)

    def _arrive(self, end: ServerConnection, work: bool) -> None:
        try:
            call = end.caller.open(wire.ARRIVAL_BYTES, 1, 4 * self._hidden)
            if call is not None:
                wire.arrive(call.request, self._hidden, work, self._step, self._worker)
                end.caller.post(call)
                self._told.append(end)
                end.barrier_calls.add(call.number)
        except ConnectionLost:
            pass  # the next poll of this connection reports it

    def answered(self, end: ServerConnection, call: Call) -> None:
        """Handle the answer to a call that has no request for experts.

        If the call did not arrive at a barrier either, it is an old call that was answered twice. It is
        ignored. So is the answer of a barrier that opens late, for a step that this client has begun before.
        """
        if call.number not in end.barrier_calls:
            return
        end.barrier_calls.discard(call.number)
        begun = wire.read_begun(call.answer)
        end.caller.release(call)
        if self._work is not None and begun >= self._step:
            self._work, self._told, self._passed, self._step = None, [], True, begun + 1
