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
        self._arrived_connections: list[ServerConnection] = []
        """Connections on which it has arrived with this flag.

        A server that was started again has a new connection, and does not know of a call on the old one.
        """
        self._has_passed = False

    @property
    def is_waiting(self) -> bool:
        """True from `enter` until `poll` has returned True."""
        return self._work is not None or self._has_passed

    @property
    def is_idle(self) -> bool:
        """True while it waits at the barrier without rows: it waits for requests, not for experts."""
        return self._work is False

    def enter(self, work: bool) -> None:
        """Wait at the barrier, with rows to compute or without. Call it again when that changes."""
        self._work, self._arrived_connections = work, []

    def poll(self) -> bool:
        """Returns True once after the barrier opened."""
        has_passed, self._has_passed = self._has_passed, False
        return has_passed

    def arrive(self, connections: Sequence[ServerConnection]) -> None:
        """Arrive at the barrier of each of these servers, unless it has done so already."""
        if self._work is None:
            return
        for connection in connections:
            if not any(told is connection for told in self._arrived_connections):
                self._arrive(connection, self._work)

    def _arrive(self, connection: ServerConnection, work: bool) -> None:
        try:
            call = connection.caller.open(wire.ARRIVAL_BYTES, 1, 4 * self._hidden)
            if call is not None:
                wire.write_arrival(call.request, self._hidden, work, self._step, self._worker)
                connection.caller.post(call)
                self._arrived_connections.append(connection)
                connection.barrier_calls.add(call.number)
        except ConnectionLost:
            pass  # the next poll of this connection reports it

    def on_answer(self, connection: ServerConnection, call: Call) -> None:
        """Handle the answer to a call that has no request for experts.

        If the call did not arrive at a barrier either, it is an old call that was answered twice. It is
        ignored. So is the answer of a barrier that opens late, for a step that this client has begun before.
        """
        if call.number not in connection.barrier_calls:
            return
        connection.barrier_calls.discard(call.number)
        step = wire.read_step_begun(call.answer)
        connection.caller.release(call)
        if self._work is not None and step >= self._step:
            self._work, self._arrived_connections, self._has_passed, self._step = None, [], True, step + 1
