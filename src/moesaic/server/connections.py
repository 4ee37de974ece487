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
from moesaic.server.errors import NotServingError, Problem, make_problem
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
STALLED_SECONDS = 60.0
"""Seconds after which a client that reads nothing of a complete answer is gone."""
LOOK_SECONDS = 0.5
"""Seconds between two looks for requests that take too long."""
RETRY_SECONDS = 0.05
"""Seconds until the next attempt to accept, while there is no descriptor for another connection."""
LOG_SECONDS = 60.0
"""Seconds between two log lines about refused connections."""
REFUSED_BODY_SECONDS = 1.0
"""Seconds for the body of a request that is refused. A client may read no answer before it has sent it."""
RETRY_AFTER = 1.0
"""Seconds after which a refused client should try again."""


class HttpAcceptor:
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
        self._num_refused = 0
        self._last_log_time = -math.inf

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

    def mark_waiting(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)  # it moves to the end, behind those that wait for longer
        self._waiting[connection] = None

    def mark_working(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._open -= 1
        if self._retry is not None:
            self._resume()

    @property
    def is_crowded(self) -> bool:
        """Whether there are more connections than requests that may be answered at the same time."""
        return self._open > self.room.max_requests

    @contextlib.contextmanager
    def count_request(self) -> Iterator[None]:
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    def make_refusal(self) -> NotServingError:
        """The refusal of a connection, which is also logged if none was for a while."""
        self._num_refused += 1
        if self._may_log():
            _log.warning(
                "%d requests or %d connections are open, the maximum; refused since the last such line: %d "
                "(see --max-connections and ulimit -n)",
                *(
                    self.room.max_requests,
                    self.room.max_requests + self.room.spare_connections,
                    self._num_refused,
                ),
            )
            self._num_refused = 0
        return NotServingError("the server has too many connections", "too_many_connections", RETRY_AFTER)

    def _may_log(self) -> bool:
        """Whether the last line is LOG_SECONDS ago. Then the next one is due."""
        now = time.monotonic()
        due = now - self._last_log_time >= LOG_SECONDS
        if due:
            self._last_log_time = now
        return due

    def _accept(self) -> None:
        """Accept what has come, as far as there is room. The listener is readable."""
        max_open = self.room.max_requests + self.room.spare_connections
        if self._open >= max_open:
            self._make_room()
            self._pause(RETRY_SECONDS)  # otherwise the readable listener would keep the loop busy
        while self._open < max_open:
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
        # Small pieces of a stream must not wait for the acknowledgement of the one before (Nagle).
        with contextlib.suppress(OSError):  # the client is gone already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(self, self._server)
        loop = asyncio.get_running_loop()
        task: asyncio.Task[object] = loop.create_task(loop.connect_accepted_socket(lambda: connection, sock))
        self._accepting.add(task)
        task.add_done_callback(lambda task: self._forget_unopened(task, connection, sock))

    def _forget_unopened(
        self, task: asyncio.Task[object], connection: Connection, sock: socket.socket
    ) -> None:
        """Forget a connection that never began, such as one that its client closed meanwhile."""
        self._accepting.discard(task)
        if not task.cancelled() and task.exception() is not None and not connection.is_open:
            sock.close()
            self.forget(connection)

    def _make_room(self) -> None:
        """Close the connections that have waited longest for a request, if they have waited long enough."""
        now = time.monotonic()
        late = (connection for connection in self._waiting if connection.is_closable(now))
        for connection in list(itertools.islice(late, self.room.spare_connections)):
            connection.close_with(make_problem(self.make_refusal()))

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
                if connection.is_overdue(now, self._limits.timeout_header):
                    connection.close_with(late)


class Connection(H11Protocol):
    """A connection of a client. It waits for a request, has it answered, and waits again."""

    def __init__(self, acceptor: HttpAcceptor, server: uvicorn.Server) -> None:
        super().__init__(server.config, server.server_state, {})
        self.is_open = False
        """The connection exists, so that its end will be reported."""
        self.waiting_since = time.monotonic()
        """When it began to wait: for a first head, for the rest of a head, or for the next request."""
        self._acceptor = acceptor
        self._fresh = True
        """No request has arrived so far."""
        self._has_next_request = False
        """The client has begun another request after an answer."""
        self._unsent_bytes = 0
        """Bytes that the client had not read at the last look."""
        self._serve = cast("ASGIApp", self.app)
        self.app = self._admit  # what uvicorn runs for each request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.is_open = True
        self._acceptor.mark_waiting(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._acceptor.forget(self)

    def data_received(self, data: bytes) -> None:
        if self._is_answered() and not self._has_next_request:
            self._has_next_request, self.waiting_since = True, time.monotonic()
        super().data_received(data)
        self._look_at_request()

    def on_response_complete(self) -> None:
        self._has_next_request, self.waiting_since = False, time.monotonic()
        self._acceptor.mark_waiting(self)
        super().on_response_complete()  # which begins a request that has arrived meanwhile
        self._look_at_request()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP. uvicorn's own answer has no OpenAI shape and fails during a response."""
        self._end(Problem(400, "this is not an HTTP request", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore the header Upgrade quietly, as HTTP allows. uvicorn would log two lines for each request."""

    def is_closable(self, now: float) -> bool:
        """Whether the connection has waited for long enough to be closed for a new one."""
        quiet = self._fresh or self._is_answered()
        reading = self.transport.is_closing() or self.transport.get_write_buffer_size()
        return now - self.waiting_since > (PATIENCE if quiet and not reading else READER_PATIENCE)

    def is_overdue(self, now: float, header_seconds: float) -> bool:
        """Whether the client has taken too long. uvicorn's keep-alive timer ends idle connections."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes != self._unsent_bytes:  # the client reads an answer
            self._unsent_bytes, self.waiting_since = unsent_bytes, now
        if unsent_bytes or self.transport.is_closing():
            return now - self.waiting_since > STALLED_SECONDS
        incomplete = self._fresh or (self._is_answered() and self._has_next_request)
        return incomplete and now - self.waiting_since > header_seconds

    def close_with(self, problem: Problem) -> None:
        """Close the connection, with `problem` as the answer to a request that has not arrived."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self._is_answered():
            self.transport.close()
        else:
            self._end(problem)

    def _end(self, problem: Problem) -> None:
        """Close the connection, with `problem` as the last answer where no other one has begun."""
        has_started, path = False, ""
        if self.cycle is not None and not self.cycle.response_complete:
            has_started, path = self.cycle.response_started, str(self.cycle.scope["path"])
            self.cycle.disconnected = True  # the application's answer has no place any more
            self.cycle.message_event.set()
        if not has_started:
            self.transport.write(_raw(problem, path))
        self.transport.close()

    def _is_answered(self) -> bool:
        """Whether the last request was answered and no further one has arrived."""
        return self.cycle is not None and self.cycle.response_complete

    def _look_at_request(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._fresh = False
            self.waiting_since = time.monotonic()
            if not self.cycle.more_body and self.cycle.scope["path"] not in ALIVE_PATHS:
                self._acceptor.mark_working(self)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it where there are too many."""
        if scope["path"] in ALIVE_PATHS:
            # A monitor that keeps its connection must not take a place for good.
            await self._serve(scope, receive, _closing(send) if self._acceptor.is_crowded else send)
        elif self._acceptor.busy < self._acceptor.room.max_requests:
            with contextlib.ExitStack() as seat:
                if self.cycle.more_body:
                    receive = self._until_complete(receive, seat)
                else:
                    seat.enter_context(self._acceptor.count_request())
                await self._serve(scope, receive, send)
        else:
            self.waiting_since = time.monotonic()
            self._acceptor.mark_waiting(self)
            problem = make_problem(self._acceptor.make_refusal())
            # A client that sent Expect waits for an answer before it sends its body.
            if b"expect" not in dict(scope["headers"]):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REFUSED_BODY_SECONDS):
                        while (await receive()).get("more_body"):
                            pass
            await problem.response(scope["path"])(scope, receive, _closing(send))

    def _until_complete(self, receive: Receive, seat: contextlib.ExitStack) -> Receive:
        """`receive` that counts the request once its body is complete. Until then it may give way."""
        start_time, num_bytes, is_complete = time.monotonic(), 0, False

        async def counting() -> Message:
            nonlocal num_bytes, is_complete
            message = await receive()
            if is_complete:
                return message
            num_bytes += len(message.get("body", b""))
            self.waiting_since = min(time.monotonic(), start_time + num_bytes / BODY_RATE)
            is_complete = not message.get("more_body", False)
            if is_complete:
                if self._acceptor.busy >= self._acceptor.room.max_requests:
                    raise make_problem(self._acceptor.make_refusal())
                seat.enter_context(self._acceptor.count_request())
                self._acceptor.mark_working(self)
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
