"""Calls whose rows stay on the GPUs of the two processes. All else is in shared memory, as in `shm`.

Both kinds of rows lie in memory of the client's GPU, which the server opens by its name (`device_heap`). The
rows of a request are in memory that all servers read. Answers are in memory of their connection. Before its
request each call has the names of both memories and the places in them:

    bytes of the two names | begin and size of the rows | begin and bytes of the answer's place | names

In shared memory an answer has one byte for each row: whether all its numbers are finite. The server counts
them where it computes, so that the client need not wait for its GPU to look.

The server writes answers by its own GPU, and it may do so late: it was frozen, and the client gave it up. So
the memory of a connection that is closed is freed only when the server says that it has closed the memory,
or when the server's process has ended (`Departures`). What it writes until then hits nothing that is in use.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesaic.core.errors import ConfigError, ConnectionLost, DamagedMessage
from moesaic.core.tokens import IntArray
from moesaic.experts.client import RowPlace
from moesaic.gpu.ipc.device_heap import DeviceHeap, Place, SharedMemory, try_close
from moesaic.transport.address import peer_process
from moesaic.transport.calls import Call, Incoming
from moesaic.transport.listening import Accept, ProvenPeer, accept_shared_memory

if TYPE_CHECKING:
    from moesaic.transport.shm import ShmAnswerer, ShmCaller

KIND = "cuda_ipc"
"""The kind of these connections, see `authentication.KINDS`."""
GOODBYE = b"."
"""The last byte of a server that has closed the memory of its client's GPU."""
_PLACES = struct.Struct("<HHxxxxQQQQ")
LEAVING_SECONDS, LOOK_SECONDS = 1.0, 1e-3
"""How long a client that ends waits for servers that have its memory open, and how often it looks. A server
that cannot open memory waits so long for the end of the client's process."""
_REQUEST_ALIGNMENT = 64
"""The request begins at a multiple of so many bytes."""


@dataclass(frozen=True)
class CallRows:
    """Rows of a call in memory of the client's GPU."""

    rows: Any
    """[bytes] of the rows that the request reads."""
    answer: Any
    """[rows * row_bytes] of the answer."""


class DeviceCall:
    """A Call of a DeviceCaller. Without `shared` its answer is in the host's memory."""

    def __init__(self, call: Call, begin: int, row_bytes: int, place: Place | None) -> None:
        self.call, self.place, self._begin, self._row_bytes = call, place, begin, row_bytes
        self.left = call.rows

    @property
    def number(self) -> int:
        return self.call.number

    @property
    def rows(self) -> int:
        return self.call.rows

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    @property
    def request(self) -> memoryview:
        return self.call.request[self._begin :]

    @property
    def answer(self) -> memoryview:
        """[rows] 1 where all numbers of a row are finite, else 0, if the call is on the device."""
        return self.call.answer

    @property
    def device_answer(self) -> Any:
        """[rows * row_bytes] bytes on the own GPU. None for a call of the host."""
        return None if self.place is None else self.place.tensor[: self.rows * self._row_bytes]


class DeviceCaller:
    """A Caller that can also open calls whose rows are on the own GPU."""

    def __init__(self, caller: ShmCaller, heap: DeviceHeap, departures: Departures) -> None:
        """heap: of the answers of this connection, which belongs to it. departures: frees the heap later."""
        self._caller, self.heap, self._departures = caller, heap, departures
        self._process = process_of(caller)
        self._calls: dict[int, DeviceCall] = {}
        self._is_closed = False

    events = select.POLLIN

    def fileno(self) -> int:
        return self._caller.fileno()

    def ready(self) -> bool:
        return self._caller.ready()

    def arm(self) -> bool:
        return self._caller.arm()

    def disarm(self) -> None:
        self._caller.disarm()

    def open(self, request_bytes: int, rows: int, row_bytes: int) -> DeviceCall | None:
        """A call of the host's memory."""
        return self._open(bytes(_REQUEST_ALIGNMENT), request_bytes, rows, row_bytes, row_bytes, None)

    def open_on_device(
        self, request_bytes: int, rows: int, row_bytes: int, read: RowPlace
    ) -> DeviceCall | None:
        """A call that reads rows from `read` and whose answer is on the own GPU, otherwise as `open`.

        Raises ConfigError if the GPU has no room for the answer.
        """
        assert isinstance(read, Place)
        place = self.heap.take(rows * row_bytes)
        names = read.memory.name, place.memory.name
        places = read.begin, read.size, place.begin, row_bytes
        prefix = _PLACES.pack(len(names[0]), len(names[1]), *places) + b"".join(names)
        call = self._open(prefix, request_bytes, rows, 1, row_bytes, place)
        if call is None:
            self.heap.give_back(place)
        return call

    def _open(
        self, prefix: bytes, request: int, rows: int, host_bytes: int, row_bytes: int, place: Place | None
    ) -> DeviceCall | None:
        begin = -(-len(prefix) // _REQUEST_ALIGNMENT) * _REQUEST_ALIGNMENT
        call = self._caller.open(begin + request, rows, host_bytes)
        if call is None:
            return None
        call.request[: len(prefix)] = prefix
        device_call = self._calls[call.number] = DeviceCall(call, begin, row_bytes, place)
        return device_call

    def post(self, call: Call) -> None:
        assert isinstance(call, DeviceCall)
        self._caller.post(call.call)

    def poll(self) -> list[tuple[Call, IntArray]]:
        news: list[tuple[Call, IntArray]] = []
        for call, indices in self._caller.poll():
            device_call = self._calls[call.number]
            device_call.left -= len(indices)
            news.append((device_call, indices))
        return news

    def release(self, call: Call) -> None:
        """Ends a call. Its answer's place is used again once the own GPU has done what it was told before.

        A call that ends before all of its rows arrived keeps its place as long as the connection.
        """
        assert isinstance(call, DeviceCall)
        self._caller.release(call.call)
        if self._calls.pop(call.number, None) is not None and call.place is not None and not call.left:
            self.heap.give_back(call.place)

    def close(self) -> None:
        """Close this end. Its memory is kept until the server has left it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._departures.add(*self._caller.leave(), self._process, self.heap)
        self._calls.clear()


class Departures:
    """The memory of connections that were closed here, while the servers may still write into it.

    A server says goodbye on the socket once it has closed the memory. A process that ends does not: its
    GPU's work has ended when the process has, which its pidfd shows. The socket closes earlier.

    Any thread may call it: one that connects closes what nobody wants any more.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[socket.socket, bytes, int, DeviceHeap]] = []
        self._changing, self._is_closed = threading.RLock(), False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sock: socket.socket, last_byte: bytes, process: int, heap: DeviceHeap) -> None:
        """last_byte: the last byte that came by the socket. process: the server's, a pidfd."""
        with self._changing:
            self._waiting.append((sock, last_byte, process, heap))
            if self._is_closed:
                self._give_up()

    def poll(self) -> None:
        """Free the memory of the servers that have left it. Never blocks."""
        with self._changing:
            waiting, self._waiting = self._waiting, []
            for sock, last_byte, process, heap in waiting:
                last_byte = _last_byte(sock, last_byte)
                if last_byte != GOODBYE and not has_ended(process):
                    self._waiting.append((sock, last_byte, process, heap))
                    continue
                sock.close()
                os.close(process)
                heap.close()

    def close(self) -> None:
        """Give the servers a moment to leave, at the end of the process. What they keep is not freed."""
        deadline = time.monotonic() + LEAVING_SECONDS
        self.poll()
        while self._waiting and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            self.poll()
        with self._changing:
            self._is_closed = True
            self._give_up()

    def _give_up(self) -> None:
        for sock, _, process, _ in self._waiting:
            sock.close()
            os.close(process)
        self._waiting.clear()


def _last_byte(sock: socket.socket, last_byte: bytes) -> bytes:
    """The last byte that came by the socket so far. last_byte: the last one before."""
    with contextlib.suppress(OSError):  # nothing came, or the process is gone
        while data := sock.recv(4096):
            last_byte = data[-1:]
    return last_byte


def has_ended(process: int, seconds: float = 0.0) -> bool:
    """Whether the process of a pidfd has ended, or does within so many seconds."""
    poller = select.poll()
    poller.register(process, select.POLLIN)
    return bool(poller.poll(1e3 * seconds))


def process_of(end: ShmCaller | ShmAnswerer) -> int:
    """A pidfd of the process at the other end. Raises ConfigError if it cannot be known."""
    try:
        return os.pidfd_open(peer_process(end.sock))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--transport cuda_ipc: cannot watch the other process: {reason}") from None


class DeviceIncoming:
    """An Incoming of a DeviceAnswerer."""

    def __init__(self, incoming: Incoming, begin: int, row_bytes: int, call_rows: CallRows | None) -> None:
        self._incoming, self._begin, self._row_bytes = incoming, begin, row_bytes
        self.call_rows = call_rows
        """The rows, if they are on the device."""

    @property
    def number(self) -> int:
        return self._incoming.number

    @property
    def rows(self) -> int:
        return self._incoming.rows

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    @property
    def request(self) -> memoryview:
        return self._incoming.request[self._begin :]

    @property
    def answer(self) -> memoryview:
        """The finite flags of the rows, as `DeviceCall.answer` has them."""
        return self._incoming.answer

    def publish(self, indices: IntArray) -> None:
        """Publish rows that the own GPU has written. Its stream was waited for."""
        self._incoming.publish(indices)


class DeviceAnswerer:
    """The Answerer of such a connection. `open_memory` opens what the client's process exported."""

    def __init__(self, answerer: ShmAnswerer, open_memory: Callable[[bytes], SharedMemory]) -> None:
        self._answerer, self._open_memory = answerer, open_memory
        self._memories: dict[bytes, SharedMemory] = {}
        self._process = process_of(answerer)
        self._is_closed = False

    events = select.POLLIN
    has_opened = False
    """Whether this process has opened memory of any client."""

    def fileno(self) -> int:
        return self._answerer.fileno()

    def ready(self) -> bool:
        return self._answerer.ready()

    def arm(self) -> bool:
        return self._answerer.arm()

    def disarm(self) -> None:
        self._answerer.disarm()

    def poll(self) -> list[Incoming]:
        """Returns the new calls. Raises ConfigError where the GPUs cannot share memory."""
        return [self._on_device(incoming) for incoming in self._answerer.poll()]

    def close(self) -> None:
        """Close the client's memory and say so. Nothing that uses it may be under way on the own GPU.

        Where the GPU cannot close some of it, the client is not told. It keeps that memory until this process
        has ended.
        """
        if self._is_closed:
            return
        self._is_closed = True
        left = [memory for memory in self._memories.values() if not try_close(memory)]
        self._memories.clear()
        os.close(self._process)
        if not left:
            self._answerer.say(GOODBYE)
        self._answerer.close()

    def _on_device(self, incoming: Incoming) -> DeviceIncoming:
        request = bytes(incoming.request[: _PLACES.size])
        if len(request) < _PLACES.size:
            raise DamagedMessage(f"a call of {len(request)} bytes is too short")
        first, second, begin, size, answer, row_bytes = _PLACES.unpack(request)
        end = _PLACES.size + first + second
        start = max(_REQUEST_ALIGNMENT, -(-end // _REQUEST_ALIGNMENT) * _REQUEST_ALIGNMENT)
        names = bytes(incoming.request[_PLACES.size : end])
        if start > len(incoming.request):
            raise DamagedMessage(f"a call of {len(incoming.request)} bytes has names up to byte {start}")
        if not first:
            return DeviceIncoming(incoming, start, incoming.row_bytes, None)
        rows = self._part(names[:first], begin, size)
        answers = self._part(names[first:], answer, incoming.rows * row_bytes)
        return DeviceIncoming(incoming, start, row_bytes, CallRows(rows, answers))

    def _part(self, name: bytes, begin: int, size: int) -> Any:
        if name not in self._memories:
            self._memories[name] = self._open(name)
        tensor = self._memories[name].tensor
        if begin % _REQUEST_ALIGNMENT or begin + size > len(tensor):
            raise DamagedMessage(f"a call names bytes {begin} to {begin + size} of {len(tensor)}")
        return tensor[begin : begin + size]

    def _open(self, name: bytes) -> SharedMemory:
        """Open memory of the client. Raises ConnectionLost if its process has ended, or is about to.

        If no memory of any client could be opened so far, it raises ConfigError: GPUs cannot share memory.
        Otherwise only this client is wrong.
        """
        try:
            memory = self._open_memory(name)
        except ConfigError as error:
            if has_ended(self._process, LEAVING_SECONDS):
                raise ConnectionLost("the process of the client has ended") from None
            if DeviceAnswerer.has_opened:
                raise DamagedMessage(str(error)) from None
            raise
        DeviceAnswerer.has_opened = True
        return memory


def device_kind(open_memory: Callable[[bytes], SharedMemory]) -> dict[str, Accept]:
    """What a Listener needs to accept such connections. open_memory: opens memory of GPUs by its name."""

    def accept(client: ProvenPeer) -> DeviceAnswerer:
        return DeviceAnswerer(accept_shared_memory(client), open_memory)

    return {KIND: accept}
