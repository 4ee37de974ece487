"""The connections of the HTTP server: how many there are, and how long a request's head may take.

The server never runs out of file descriptors: it accepts a connection only when it has one to spare, and
leaves further ones in the kernel's queue for the moment. Requests beyond the maximum are answered with 503.
Connections that wait for a request give way to new ones, so that /health and /metrics are always answered.

Question: How many connections may clients open?
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import socket
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from starlette.datastructures import MutableHeaders
from uvicorn.protocols.http.h11_impl import H11Protocol

from moesaic.config import ConnectionConfig
from moesaic.server.errors import NotServingError, Problem, problem_of
from moesaic.server.guard import ALIVE_PATHS, BODY_RATE
from moesaic.server.room import Room

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)

PATIENCE = 0.25
"""Seconds after which a connection that waits for a request may be closed for a new one."""
READER_PATIENCE = 2.0
"""The same for a client that sends nothing of a body or reads nothing of an answer."""
STALLED = 60.0
"""Seconds after which a client that reads nothing of a complete answer is gone."""
LOOK_SECONDS = 0.5
"""Seconds between two looks for requests that take too long."""
RETRY_SECONDS = 0.05
"""Seconds until the next attempt to accept, while there is no descriptor for another connection."""
LOG_SECONDS = 60.0
"""Seconds between two log lines of the door."""
REFUSED_BODY_SECONDS = 1.0
"""Seconds for the body of a request that is refused. A client may read no answer before it has sent it."""
RETRY_AFTER = 1.0
"""Seconds after which a refused client should try again."""


class Door:
    """Accepts the connections of `server` at `listener`, and closes those that stall."""

    def __init__(
        self, server: uvicorn.Server, listener: socket.socket, limits: ConnectionConfig, room: Room
    ) -> None:
        self.room = room
        self.busy = 0
        """Requests that are being answered."""
        self._server = server
        self._listener = listener
        self._limits = limits
        self._open = 0
        self._waiting: dict[Connection, None] = {}
        """Connections without a complete request, the longest first. Further those with a request for
        ALIVE_PATHS or one that is refused: they are beyond the maximum, so they must not last.
        """
        self._accepting: set[asyncio.Task[object]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._refused = 0
        self._logged = -math.inf

    def open(self) -> None:
        """Start to accept. The event loop must run."""
        self._listener.setblocking(False)
        self._looking = asyncio.create_task(self._look())
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting. Connections stay open."""
        if self._looking is not None:
            self._pause(math.inf)
            self._looking.cancel()
            self._looking = None

    def waits(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def works(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def left(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._open -= 1
        if self._retry is not None:
            self._resume()

    @property
    def crowded(self) -> bool:
        """Whether there are more connections than requests that may be answered at the same time."""
        return self._open > self.room.served

    @contextlib.contextmanager
    def seat(self) -> Iterator[None]:
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    def full(self) -> NotServingError:
        """The refusal of a connection, which is also logged if none was for a while."""
        self._refused += 1
        if self._may_log():
            _log.warning(
                "%d requests or %d connections are open, the maximum; refused since the last such line: %d "
                "(see --max-connections and ulimit -n)",
                *(self.room.served, self.room.served + self.room.spare, self._refused),
            )
            self._refused = 0
        return NotServingError("the server has too many connections", "too_many_connections", RETRY_AFTER)

    def _may_log(self) -> bool:
        """Whether the last line is LOG_SECONDS ago. Then the next one is due."""
        now = time.monotonic()
        due = now - self._logged >= LOG_SECONDS
        if due:
            self._logged = now
        return due

    def _accept(self) -> None:
        """Accept what has come, as far as there is room. The listener is readable."""
        most = self.room.served + self.room.spare
        if self._open >= most:
            self._make_room()
            self._pause(RETRY_SECONDS)
        while self._open < most:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # something else took the descriptors, or there is no memory
                if self._may_log():
                    _log.warning("cannot accept a connection: %s", error.strerror)
                self._pause(LOOK_SECONDS)
                return
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        self._open += 1
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # the client is gone already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(self, self._server)
        loop = asyncio.get_running_loop()
        task: asyncio.Task[object] = loop.create_task(loop.connect_accepted_socket(lambda: connection, sock))
        self._accepting.add(task)
        task.add_done_callback(lambda task: self._begun(task, connection, sock))

    def _begun(self, task: asyncio.Task[object], connection: Connection, sock: socket.socket) -> None:
        """Forget a connection that never began, such as one that its client closed meanwhile."""
        self._accepting.discard(task)
        if not task.cancelled() and task.exception() is not None and not connection.made:
            sock.close()
            self.left(connection)

    def _make_room(self) -> None:
        """Close the connections that have waited longest for a request, if they have waited long enough."""
        now = time.monotonic()
        late = (connection for connection in self._waiting if connection.gives_way(now))
        for connection in list(itertools.islice(late, self.room.spare)):
            connection.turn_away(problem_of(self.full()))

    def _pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        if self._retry is not None:
            self._retry.cancel()
        self._retry = None if seconds == math.inf else loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._retry = None
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def _look(self) -> None:
        """Close connections whose request takes too long to arrive."""
        late = Problem(
            408,
            f"the request's head did not arrive within {self._limits.timeout_header:g} s (--timeout-header)",
            code="request_timeout",
        )
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            for connection in list(self._waiting):
                if connection.overdue(now, self._limits.timeout_header):
                    connection.turn_away(late)


class Connection(H11Protocol):
    """One connection. It waits for a request, has one answered, and waits again."""

    def __init__(self, door: Door, server: uvicorn.Server) -> None:
        super().__init__(server.config, server.server_state, {})
        self.made = False
        """The connection exists, so that its end will be reported."""
        self.since = time.monotonic()
        """When it began to wait: for a first head, for the rest of a head, or for the next request."""
        self._door = door
        self._fresh = True
        """No request has arrived so far."""
        self._begun = False
        """The client has begun another request after an answer."""
        self._unsent = 0
        """Bytes that the client had not read at the last look."""
        self._serve = cast("ASGIApp", self.app)
        self.app = self._admit  # what uvicorn runs for each request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.made = True
        self._door.waits(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._door.left(self)

    def data_received(self, data: bytes) -> None:
        if self._answered() and not self._begun:
            self._begun, self.since = True, time.monotonic()
        super().data_received(data)
        self._look_at_request()

    def on_response_complete(self) -> None:
        self._begun, self.since = False, time.monotonic()
        self._door.waits(self)
        super().on_response_complete()  # which begins a request that has arrived meanwhile
        self._look_at_request()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP. uvicorn's own answer has no OpenAI shape and fails during a response."""
        self._end(Problem(400, "this is not an HTTP request", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore the header Upgrade quietly, as HTTP allows. uvicorn would log two lines for each request."""

    def gives_way(self, now: float) -> bool:
        """Whether the connection has waited for long enough to be closed for a new one."""
        quiet = self._fresh or self._answered()
        reading = self.transport.is_closing() or self.transport.get_write_buffer_size()
        return now - self.since > (PATIENCE if quiet and not reading else READER_PATIENCE)

    def overdue(self, now: float, header_seconds: float) -> bool:
        """Whether the client has taken too long. uvicorn's keep-alive timer ends idle connections."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:  # the client reads an answer
            self._unsent, self.since = unsent, now
        if unsent or self.transport.is_closing():
            return now - self.since > STALLED
        incomplete = self._fresh or (self._answered() and self._begun)
        return incomplete and now - self.since > header_seconds

    def turn_away(self, problem: Problem) -> None:
        """Close the connection, with `problem` as the answer to a request that has not arrived."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self._answered():
            self.transport.close()
        else:
            self._end(problem)

    def _end(self, problem: Problem) -> None:
        """Close the connection, with `problem` as the last answer where no other one has begun."""
        started, path = False, ""
        if self.cycle is not None and not self.cycle.response_complete:
            started, path = self.cycle.response_started, str(self.cycle.scope["path"])
            self.cycle.disconnected = True  # the application's answer has no place any more
            self.cycle.message_event.set()
        if not started:
            self.transport.write(_raw(problem, path))
        self.transport.close()

    def _answered(self) -> bool:
        """Whether the last request was answered and no further one has arrived."""
        return self.cycle is not None and self.cycle.response_complete

    def _look_at_request(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._fresh = False
            self.since = time.monotonic()
            if not self.cycle.more_body and self.cycle.scope["path"] not in ALIVE_PATHS:
                self._door.works(self)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it where there are too many."""
        if scope["path"] in ALIVE_PATHS:
            await self._serve(scope, receive, _closing(send) if self._door.crowded else send)
        elif self._door.busy < self._door.room.served:
            with contextlib.ExitStack() as seat:
                if self.cycle.more_body:
                    receive = self._until_complete(receive, seat)
                else:
                    seat.enter_context(self._door.seat())
                await self._serve(scope, receive, send)
        else:
            self.since = time.monotonic()
            self._door.waits(self)
            problem = problem_of(self._door.full())
            if b"expect" not in dict(scope["headers"]):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REFUSED_BODY_SECONDS):
                        while (await receive()).get("more_body"):
                            pass
            await problem.response(scope["path"])(scope, receive, _closing(send))

    def _until_complete(self, receive: Receive, seat: contextlib.ExitStack) -> Receive:
        """`receive` that counts the request once its body is complete. Until then it may give way."""
        began, seen, complete = time.monotonic(), 0, False

        async def counting() -> Message:
            nonlocal seen, complete
            message = await receive()
            if complete:
                return message
            seen += len(message.get("body", b""))
            self.since = min(time.monotonic(), began + seen / BODY_RATE)
            complete = not message.get("more_body", False)
            if complete:
                if self._door.busy >= self._door.room.served:
                    raise problem_of(self._door.full())
                seat.enter_context(self._door.seat())
                self._door.works(self)
            return message

        return counting


def _closing(send: Send) -> Send:
    """`send` that closes the connection after the answer."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["Connection"] = "close"
        await send(message)

    return closing


def _raw(problem: Problem, path: str) -> bytes:
    """The bytes of an answer after which the connection is closed.

    path: of the request; empty for an answer that does not belong to one.
    """
    body = problem.json(path).encode()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **(problem.headers or {}),
    }
    lines = [f"HTTP/1.1 {problem.status_code} {HTTPStatus(problem.status_code).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
