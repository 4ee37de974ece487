"""A client at the gate of a step that all clients begin together (the barrier schedule)."""

from __future__ import annotations

from collections.abc import Mapping

from moesaic.core.errors import ConnectionLost
from moesaic.experts import wire
from moesaic.experts.outstanding import End
from moesaic.transport.calls import Call


class Entrance:
    """Knocks at the server with the lowest id, where all knock, until that lets it in."""

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden
        self._work: bool | None = None
        """What it knocks with; None when it does not want in."""
        self._knock: tuple[End, int] | None = None
        """Connection and number of the call that counts: a later knock makes those before it void. A server
        that was started again has another connection; it knows nothing of a knock at the one before."""
        self._let_in = False

    @property
    def waiting(self) -> bool:
        """True from `enter` until `entered` said so."""
        return self._work is not None or self._let_in

    @property
    def idle(self) -> bool:
        """True while it waits without rows: for requests, not for experts."""
        return self._work is False

    def enter(self, work: bool) -> None:
        """Want in, with rows to compute or without. Again when that changes."""
        self._work, self._knock = work, None

    def entered(self) -> bool:
        """True once after it was let in."""
        entered, self._let_in = self._let_in, False
        return entered

    def knock(self, ends: Mapping[int, End]) -> None:
        """If nobody has, or another server is the one now."""
        gate = ends[min(ends)] if ends else None
        if self._work is None or gate is None or (self._knock is not None and self._knock[0] is gate):
            return
        try:
            size = wire.size(0, 0, self._hidden, False)
            call = gate.caller.open(size, 1, 4 * self._hidden)
            if call is not None:
                wire.knock(call.request, self._hidden, self._work)
                gate.caller.post(call)
                self._knock = gate, call.number
                gate.knocks.add(call.number)
        except ConnectionLost:
            pass  # whoever polls this end hears of it too

    def answered(self, end: End, call: Call) -> None:
        """A call that is no request came back. One that is no knock either is over: it was told twice."""
        if call.number not in end.knocks:
            return
        end.knocks.discard(call.number)
        end.caller.release(call)
        if self._knock is not None and self._knock[0] is end and self._knock[1] == call.number:
            self._work = self._knock = None
            self._let_in = True
