"""The barrier at which all clients of an expert server begin a step together (barrier schedule)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class _Arrival:
    calls: list[int] = field(default_factory=list)
    work: bool = False


class StepBarrier:
    """Opens when every client has arrived and at least one of them has work.

    Example: clients 0 and 1 arrive without work, in calls 5 and 6. Nothing happens. Then client 0 gets a
    request and arrives again, in call 7. Now calls 5, 7 and 6 are answered.
    """

    def __init__(self) -> None:
        self._clients: dict[int, _Arrival | None] = {}

    def joined(self, client: int) -> None:
        """Add a client. From now on the barrier waits for it."""
        self._clients[client] = None

    def left(self, client: int) -> list[int]:
        """Remove a client. Returns the calls to answer now, since the others need not wait for it."""
        self._clients.pop(client, None)
        return self._try()

    def arrived(self, client: int, call: int, work: bool) -> list[int]:
        """Record that a client arrived. Returns the calls to answer now.

        work: whether the client has rows to compute.
        """
        arrive = self._clients[client] or _Arrival()
        arrive.calls.append(call)
        arrive.work |= work
        self._clients[client] = arrive
        return self._try()

    def _try(self) -> list[int]:
        barrier_calls = [arrive for arrive in self._clients.values() if arrive is not None]
        if len(barrier_calls) < len(self._clients) or not any(arrive.work for arrive in barrier_calls):
            return []
        self._clients = dict.fromkeys(self._clients)
        return [call for arrive in barrier_calls for call in arrive.calls]
