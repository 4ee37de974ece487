"""The server's process: handles signals and ends the server.

Question: What does SIGTERM do to `moesaic serve`?
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn, Protocol

import uvicorn
from starlette.types import ASGIApp

from moesaic.config import ConnectionConfig
from moesaic.server.connections import HttpAcceptor
from moesaic.server.room import room_now

_GRACE_SECONDS = 10
"""Seconds for clients to finish reading, or sending, once no request is computed any more."""


class Backend(Protocol):
    """What answers the requests of a server: one model, or several."""

    worker_ended: asyncio.Event
    """Set once no request can be answered any more, so that the server ends."""

    def start(self) -> None:
        """Begin, in the running event loop."""
        ...

    async def drain(self, seconds: float | None = None) -> None:
        """Refuse new requests, and wait for the others. After `seconds` they end with an error."""
        ...

    def raise_end(self) -> NoReturn:
        """Raise the reason for `worker_ended`."""
        ...


def serve(
    app: ASGIApp,
    backend: Backend,
    listener: socket.socket,
    *,
    limits: ConnectionConfig = ConnectionConfig(),
    access_log: bool = False,
    report: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> int:
    """Serve `app` until a signal ends it. Returns the exit code.

    At the first SIGTERM or SIGINT the server refuses new requests (503), finishes those in flight within
    --shutdown-timeout and gives clients a few seconds to read the rest; it returns 0. A second signal stops
    it at once; it returns 128 + signal. If the worker dies, requests in flight end with an error. Then it
    raises EngineDeadError, or ConfigError if a setting or the checkpoint was the cause. Raises ConfigError,
    too, if the descriptor limit is too small for `limits`. report: runs beside the server, such as to log the
    throughput.
    """
    config = uvicorn.Config(
        app,
        http="h11",  # `connections.Connection` extends uvicorn's protocol for it
        ws="none",
        lifespan="off",
        log_level="info" if access_log else "warning",
        access_log=access_log,
        log_config=None,  # the lines of all packages look the same
        timeout_keep_alive=limits.timeout_keep_alive,  # type: ignore[arg-type]  # fractions are fine, too
    )
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_serve(config, backend, listener, limits, report))


async def _serve(
    config: uvicorn.Config,
    backend: Backend,
    listener: socket.socket,
    limits: ConnectionConfig,
    report: Callable[[], Coroutine[Any, Any, None]] | None,
) -> int:
    server = _Server(config, listener, limits)
    shutdown = _Shutdown(backend, server, limits.shutdown_timeout)
    watching = [asyncio.create_task(shutdown.when_dead())]
    if report is not None:
        watching.append(asyncio.create_task(report()))
    backend.start()
    try:
        with _signals(shutdown.on_signal):
            await server.serve(sockets=[])
    finally:
        for task in watching:
            task.cancel()
    # After a second signal the exit code says so, whatever happened to the worker then.
    if shutdown.code == 0 and backend.worker_ended.is_set():
        backend.raise_end()
    return shutdown.code


@contextlib.contextmanager
def _signals(handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler` in the event loop for SIGTERM and SIGINT. Only the main thread can handle signals."""
    main = threading.current_thread() is threading.main_thread()
    signums = (signal.SIGTERM, signal.SIGINT) if main else ()
    loop = asyncio.get_running_loop()
    for signum in signums:
        loop.add_signal_handler(signum, handler, signum)
    try:
        yield
    finally:
        for signum in signums:
            loop.remove_signal_handler(signum)


def _is_news(record: logging.LogRecord) -> bool:
    """False for the traceback of a call that was cancelled on purpose, and for a client's invalid HTTP.

    A second signal cancels all calls. The end of the server also cancels calls whose clients do not read.
    Invalid HTTP is answered with a 400. A line for each could fill the log.
    """
    if record.msg == "Invalid HTTP request received.":
        return False
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, asyncio.CancelledError)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers and its way to accept: `_Shutdown` and `Door` do that."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, limits: ConnectionConfig) -> None:
        super().__init__(config)
        self._listener = listener
        self._acceptor = HttpAcceptor(self, listener, limits, room_now(limits.max_connections))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._acceptor.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._acceptor.close()
        self._listener.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Shutdown:
    """Decides when the server stops, and with which exit code."""

    def __init__(self, backend: Backend, server: uvicorn.Server, seconds: float) -> None:
        """seconds: for requests in flight, once the server stops."""
        self.code = 0
        self._seconds = seconds
        self._backend = backend
        self._server = server
        self._draining: asyncio.Task[None] | None = None

    def on_signal(self, signum: int) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self.code = 128 + signum
            self._server.should_exit = self._server.force_exit = True

    async def when_dead(self) -> None:
        """Wait until the worker is gone. Every stream has its error by then, so stop the server."""
        await self._backend.worker_ended.wait()
        self._exit()

    async def _drain(self) -> None:
        await self._backend.drain(self._seconds)
        self._exit()

    def _exit(self) -> None:
        """Stop once the clients have their answers. A client that never reads must not keep the server up."""
        self._server.config.timeout_graceful_shutdown = _GRACE_SECONDS
        self._server.should_exit = True
