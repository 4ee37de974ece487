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
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from moesaic.config import ConnectionConfig
from moesaic.core.errors import ConfigError, EngineDeadError
from moesaic.server.async_engine import AsyncEngine
from moesaic.server.connections import HttpAcceptor
from moesaic.server.room import room_now
from moesaic.server.throughput import log_throughput

_GRACE_SECONDS = 10
"""Seconds for clients to finish reading, or sending, once no request is computed any more."""


def serve(
    app: ASGIApp,
    engine: AsyncEngine,
    listener: socket.socket,
    *,
    limits: ConnectionConfig = ConnectionConfig(),
    access_log: bool = False,
    log_stats: bool = False,
) -> int:
    """Serve `app` until a signal ends it. Returns the exit code.

    At the first SIGTERM or SIGINT the server refuses new requests (503), finishes those in flight within
    --shutdown-timeout and gives clients a few seconds to read the rest; it returns 0. A second signal stops
    it at once; it returns 128 + signal. If the worker dies, requests in flight end with an error. Then it
    raises EngineDeadError, or ConfigError if a setting or the checkpoint was the cause. Raises ConfigError,
    too, if the descriptor limit is too small for `limits`. log_stats: log the throughput every ten seconds
    while requests run.
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
        return runner.run(_serve(config, engine, listener, limits, log_stats))


async def _serve(
    config: uvicorn.Config,
    engine: AsyncEngine,
    listener: socket.socket,
    limits: ConnectionConfig,
    log_stats: bool,
) -> int:
    server = _Server(config, listener, limits)
    shutdown = _Shutdown(engine, server, limits.shutdown_timeout)
    watching = [asyncio.create_task(shutdown.when_dead())]
    if log_stats:
        watching.append(asyncio.create_task(log_throughput(engine, time.monotonic)))
    engine.start()
    try:
        with _signals(shutdown.on_signal):
            await server.serve(sockets=[])
    finally:
        for task in watching:
            task.cancel()
    # After a second signal the exit code says so, whatever happened to the worker then.
    if shutdown.code == 0 and engine.worker_ended.is_set():
        _raise_cause(engine)
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


def _raise_cause(engine: AsyncEngine) -> None:
    if engine.failure is not None and engine.failure.user_error:
        raise ConfigError(engine.failure.error)
    raise EngineDeadError(f"the worker is gone: {engine.engine.dead}")


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

    def __init__(self, engine: AsyncEngine, server: uvicorn.Server, seconds: float) -> None:
        """seconds: for requests in flight, once the server stops."""
        self.code = 0
        self._seconds = seconds
        self._engine = engine
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
        await self._engine.worker_ended.wait()
        self._exit()

    async def _drain(self) -> None:
        await self._engine.drain(self._seconds)
        self._exit()

    def _exit(self) -> None:
        """Stop once the clients have their answers. A client that never reads must not keep the server up."""
        self._server.config.timeout_graceful_shutdown = _GRACE_SECONDS
        self._server.should_exit = True
