"""The gate that lets all clients of an expert server begin a step together (the barrier schedule)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class _Knock:
    calls: list[int] = field(default_factory=list)
    work: bool = False


class Gate:
    """Opens when every client has knocked and one of them has work.

    Example: clients 0 and 1 knock without work, in calls 5 and 6: nothing happens. Client 0 gets a request
    and knocks again, in call 7: calls 5, 7 and 6 are answered.
    """

    def __init__(self) -> None:
        self._clients: dict[int, _Knock | None] = {}

    def joined(self, client: int) -> None:
        self._clients[client] = None

    def left(self, client: int) -> list[int]:
        """Calls that are answered now: the others need not wait for it."""
        self._clients.pop(client, None)
        return self._try()

    def knocked(self, client: int, call: int, work: bool) -> list[int]:
        """Calls that are answered now."""
        knock = self._clients[client] or _Knock()
        knock.calls.append(call)
        knock.work |= work
        self._clients[client] = knock
        return self._try()

    def _try(self) -> list[int]:
        knocks = [knock for knock in self._clients.values() if knock is not None]
        if len(knocks) < len(self._clients) or not any(knock.work for knock in knocks):
            return []
        self._clients = dict.fromkeys(self._clients)
        return [call for knock in knocks for call in knock.calls]
