"""A client at the gate of a step that all clients begin together (the barrier schedule)."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.core.errors import ConnectionLost
from moesaic.experts import wire
from moesaic.experts.outstanding import End
from moesaic.transport.calls import Call


class BarrierClient:
    """Knocks at every server until one of them lets it in.

    One server could do; but it may be frozen, and each learns from a knock that this client is in no step.
    """

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden
        self._work: bool | None = None
        """What it knocks with; None when it does not want in."""
        self._barrier_calls: list[tuple[End, int]] = []
        """Connections and numbers of the calls that count: a later knock makes those before it void. A server
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
        self._work, self._barrier_calls = work, []

    def entered(self) -> bool:
        """True once after it was let in."""
        entered, self._let_in = self._let_in, False
        return entered

    def arrive(self, gates: Sequence[End]) -> None:
        """Where it has not yet."""
        if self._work is None:
            return
        self._barrier_calls = [
            arrive for arrive in self._barrier_calls if any(arrive[0] is gate for gate in gates)
        ]
        for gate in gates:
            if not any(end is gate for end, _ in self._barrier_calls):
                self._arrive(gate, self._work)

    def _arrive(self, gate: End, work: bool) -> None:
        try:
            size = wire.size(0, 0, self._hidden, False)
            call = gate.caller.open(size, 1, 4 * self._hidden)
            if call is not None:
                wire.arrive(call.request, self._hidden, work)
                gate.caller.post(call)
                self._barrier_calls.append((gate, call.number))
                gate.barrier_calls.add(call.number)
        except ConnectionLost:
            pass  # whoever polls this end hears of it too

    def answered(self, end: End, call: Call) -> None:
        """A call that is no request came back. One that is no knock either is over: it was told twice."""
        if call.number not in end.barrier_calls:
            return
        end.barrier_calls.discard(call.number)
        end.caller.release(call)
        if any(gate is end and number == call.number for gate, number in self._barrier_calls):
            self._work, self._barrier_calls, self._let_in = None, [], True
