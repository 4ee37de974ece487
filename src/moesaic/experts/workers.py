"""Which attention workers a server's scheduler waits for, and by which connections their calls come."""

from __future__ import annotations

from moesaic.policy.scheduling.schedulers.expert_server import ExpertServerScheduler


class Workers:
    """Gives the scheduler's clients their numbers.

    A worker has a connection of its own. Some of its calls may come through relays (`experts.relay`), and
    these have a number for each relay and worker. So the calls of a relay that dies go without others. The
    scheduler waits for one number of each worker at a time: that of its last call.
    """

    def __init__(self, service: ExpertServerScheduler) -> None:
        self._service = service
        self._next = 0
        self._direct: dict[int, int] = {}
        """Number of each connection -> the worker, 0 before its first call."""
        self._relay_callers: dict[int, dict[int, int]] = {}
        """Number of each relay's connection -> worker -> number of the calls that come through it."""

    @property
    def relays(self) -> int:
        """Connections of relays."""
        return len(self._relay_callers)

    def add_connection(self) -> int:
        """The number of a new connection. The scheduler waits for its calls."""
        number, self._next = self._next, self._next + 1
        self._direct[number] = 0
        self._service.client_joined(number)
        return number

    def is_from_relay(self, number: int) -> bool:
        """Whether this connection belongs to a relay."""
        return number in self._relay_callers

    def mark_relay(self, number: int) -> None:
        """This connection belongs to a relay, so nobody waits for it."""
        self._direct.pop(number, None)
        self._relay_callers.setdefault(number, {})
        self._service.client_left(number)

    def caller(self, connection: int, worker: int) -> int:
        """The number of a call that comes now. The scheduler waits for this worker by this number.

        A worker without a connection of its own here is not waited for.
        """
        if connection in self._direct:
            self._direct[connection] = worker
            self._pause_others(worker, active_number=connection)
            self._service.client_joined(connection)  # a run may have begun without it
            return connection
        numbers = self._relay_callers[connection]
        if worker not in numbers:
            numbers[worker], self._next = self._next, self._next + 1
        if worker in self._direct.values():
            self._pause_others(worker, active_number=numbers[worker])
            self._service.client_joined(numbers[worker])
        return numbers[worker]

    def own_connection(self, connection: int, worker: int) -> int | None:
        """The connection of the worker whose call came by this one. None: it has no connection of its own."""
        if connection in self._direct:
            return connection
        return next(
            (number for number, connected_worker in self._direct.items() if connected_worker == worker), None
        )

    def pause(self, connection: int, worker: int) -> None:
        """Wait for no call of this worker until it calls or a step begins."""
        if connection in self._direct:
            self._direct[connection] = worker
            self._service.client_paused(connection)
            self._pause_others(worker, active_number=connection)

    def begin_step(self) -> None:
        """All workers begin a step, so runs wait for all of them."""
        for number in self._direct:
            self._service.client_joined(number)

    def remove_connection(self, connection: int) -> None:
        """The connection is closed. Its calls are dropped, also those that came through it as a relay."""
        for number in self._relay_callers.pop(connection, {}).values():
            self._service.client_left(number)
        # 0 stands for a connection that never called, so no worker is paused for it.
        worker = self._direct.pop(connection, 0)
        self._pause_others(worker)
        self._service.client_left(connection)

    def _pause_others(self, worker: int, active_number: int | None = None) -> None:
        """Wait for no call of this worker that has another number than `active_number`."""
        if not worker:
            return
        direct = [number for number, connected_worker in self._direct.items() if connected_worker == worker]
        relayed = [numbers[worker] for numbers in self._relay_callers.values() if worker in numbers]
        for number in direct + relayed:
            if number != active_number:
                self._service.client_paused(number)
