"""The server's end of a mailbox: kernels of a worker's device write requests, and read the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moesaic.core.errors import DamagedMessage, MoesaicError
from moesaic.core.tokens import IntArray
from moesaic.experts import wire
from moesaic.gpu.exchange.mailbox import HEAD, MailboxServer
from moesaic.gpu.exchange.server_mailbox import RowMemory
from moesaic.gpu.ipc.device_calls import CallRows, DeviceIncoming
from moesaic.gpu.ipc.device_heap import SharedMemory, try_close
from moesaic.transport.calls import Incoming, Outstanding


class MailboxRequest:
    """The Incoming that is in a mailbox, without its rows. The answer is seen once all its rows are there."""

    def __init__(
        self, number: int, request: memoryview, pairs: int, on_answer: Callable[[int, bool], None]
    ) -> None:
        """on_answer: gets the number, and whether the client should look at the numbers of the answer."""
        self.number, self.request, self.rows, self.row_bytes = number, request, max(1, pairs), 1
        self._pairs, self.answer = pairs, memoryview(bytearray(self.rows))
        """[rows] whether all numbers of a row are finite."""
        self._on_answer, self._outstanding = on_answer, Outstanding(self.rows)

    def publish(self, indices: IntArray) -> None:
        """Count these rows, and answer once all rows were published."""
        self._outstanding.take(indices)
        if not self._outstanding.count:
            self._on_answer(self.number, bool(self._pairs) and not all(self.answer))


class MailboxAnswerer:
    """An Answerer whose rows are in memory of the worker's device."""

    def __init__(self, end: MailboxServer, open_memory: Callable[[bytes], SharedMemory], hidden: int) -> None:
        """hidden: size of a row. Raises DamagedMessage and ConfigError if the memory cannot be opened."""
        self._end, self._width = end, 4 * hidden
        memory = RowMemory.unpack(end.names)
        if memory.hidden != hidden or memory.request_bytes > len(end.memory) - HEAD:
            raise DamagedMessage("a mailbox is meant for another model, or too small")
        self._rows, self._pairs = memory.rows, memory.pairs
        self._memories: list[SharedMemory] = []
        try:
            self._hidden = self._open(open_memory, memory.rows_name, memory.rows)
            self._answers = self._open(open_memory, memory.answers_name, memory.pairs)
        except MoesaicError:
            self._give_back()
            raise

    @property
    def events(self) -> int:
        return self._end.events

    def fileno(self) -> int:
        return self._end.fileno()

    def ready(self) -> bool:
        return self._end.ready()

    def arm(self) -> bool:
        return self._end.arm()

    def disarm(self) -> None:
        self._end.disarm()

    def poll(self) -> list[Incoming]:
        """Returns the new request, if there is one. A mailbox has at most one."""
        number = self._end.take()
        if number is None:
            return []
        rows, pairs = wire.read_counts(self._end.request)
        if pairs > self._pairs or rows > self._rows:
            raise DamagedMessage(f"a request claims {rows} of {self._rows} rows, and {pairs} pairs")
        request = self._end.request[: wire.size(rows, pairs, 0, False, on_device=True)].toreadonly()
        incoming = MailboxRequest(number, request, pairs, self._post_answer)
        call_rows = CallRows(self._hidden, self._answers[: incoming.rows * self._width])
        return [DeviceIncoming(incoming, 0, self._width, call_rows)]

    def _post_answer(self, number: int, doubt: bool) -> None:
        if doubt:
            self._end.doubt()
        self._end.answer(number)

    def close(self) -> None:
        """Close the worker's memory and say so. Nothing that uses it may be under way on the own GPU.

        Where the GPU cannot close some of it, the worker is not told.
        """
        self._end.close(goodbye=self._give_back())

    def _open(self, open_memory: Callable[[bytes], SharedMemory], name: bytes, rows: int) -> Any:
        memory = open_memory(name)
        self._memories.append(memory)
        if len(memory.tensor) < rows * self._width:
            raise DamagedMessage(f"a worker's memory of {len(memory.tensor)} bytes should have {rows} rows")
        return memory.tensor[: rows * self._width]

    def _give_back(self) -> bool:
        """Whether all memory is closed."""
        memories, self._memories = self._memories, []
        outcomes = [try_close(memory) for memory in memories]  # every one, also after one that fails
        return all(outcomes)
