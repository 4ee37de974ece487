"""The barrier at which all clients of an expert server begin a step together (barrier schedule).

Each server has such a barrier, and a client arrives at all of them. It begins the step when the first one
opens. Messages take different times to different servers, so steps have numbers. Without numbers a server
could take an arrival for a step that it has begun as one for the next step. Then servers would not wait for
the same clients, and two of them could each wait for the client that the other one keeps waiting.
"""

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

    A client that computes shows that another server's barrier has opened. Then this one opens as well.
    """

    def __init__(self) -> None:
        self.step = 1
        """Number of the step that begins when the barrier opens next."""
        self._clients: dict[int, _Arrival | None] = {}

    def has_begun_step(self, step: int) -> bool:
        """Whether the barrier was opened for this step. A client that arrives for it may begin at once."""
        return step < self.step

    def add_client(self, client: int) -> None:
        """Add a client. From now on the barrier waits for it."""
        self._clients[client] = None

    def remove_client(self, client: int) -> list[int]:
        """Remove a client. Returns the calls to answer now, since the others need not wait for it."""
        self._clients.pop(client, None)
        return self._try()

    def record_computing(self, client: int) -> list[int]:
        """Record that a client asked for experts. Returns the calls to answer now."""
        return [] if self._clients.get(client) is None else self._open()

    def record_arrival(self, client: int, call: int, work: bool, step: int) -> list[int]:
        """Record that a client arrived for a step that has not begun. Returns the calls to answer now.

        work: whether the client has rows to compute. step: number of the step. If it is above that of this
        barrier, this server is newer than the others.
        """
        # A server that joined late has counted fewer steps than the clients.
        self.step = max(self.step, step)
        arrive = self._clients[client] or _Arrival()
        arrive.calls.append(call)
        arrive.work |= work
        self._clients[client] = arrive
        return self._try()

    def _try(self) -> list[int]:
        arrivals = [arrive for arrive in self._clients.values() if arrive is not None]
        if len(arrivals) < len(self._clients) or not any(arrive.work for arrive in arrivals):
            return []
        return self._open()

    def _open(self) -> list[int]:
        calls = [call for arrive in self._clients.values() if arrive is not None for call in arrive.calls]
        self._clients = dict.fromkeys(self._clients)
        self.step += 1
        return calls
