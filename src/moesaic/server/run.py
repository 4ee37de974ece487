"""The server's process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from moesaic.core.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:  # `bind` is there before the slow imports
    from moesaic.server.async_engine import AsyncEngine

_BACKLOG = 2048
_LAST_WORDS_SECONDS = 10
"""How long clients may take to read, or to send, the rest of a call when nothing is computed any more."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. ConfigError when the address cannot be had.

    Call it before anything slow: a taken port should not cost the loading of a model.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host: got {host!r}; cannot be resolved: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        flag = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise ConfigError(f"{flag}: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def serve(
    app: ASGIApp,
    engine: AsyncEngine,
    listener: socket.socket,
    *,
    log_level: str = "info",
    access_log: bool = True,
) -> int:
    """Serve `app` until a signal ends it; returns the exit code.

    The first SIGTERM or SIGINT refuses new requests (503), finishes those in flight and gives clients a
    few seconds to read the rest: 0. The second stops at once: 128 + signal. When the worker dies, what
    is in flight is answered, then EngineDeadError is raised, or ConfigError when a setting or the
    checkpoint was to blame.
    """
    config = uvicorn.Config(app, lifespan="off", log_level=log_level, access_log=access_log)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_serve(config, engine, listener))


async def _serve(config: uvicorn.Config, engine: AsyncEngine, listener: socket.socket) -> int:
    server = _Server(config)
    ending = _Ending(engine, server)
    watching = asyncio.create_task(ending.when_dead())
    engine.start()
    try:
        with _signals(ending.on_signal):
            await server.serve(sockets=[listener])
    finally:
        watching.cancel()
    if ending.code == 0 and engine.ended.is_set():
        _raise_cause(engine)
    return ending.code


@contextlib.contextmanager
def _signals(handler: Callable[[int], None]) -> Iterator[None]:
    """SIGTERM and SIGINT go to `handler`, in the loop. Threads other than the main one get none."""
    main = threading.current_thread() is threading.main_thread()
    wanted = (signal.SIGTERM, signal.SIGINT) if main else ()
    loop = asyncio.get_running_loop()
    for signum in wanted:
        loop.add_signal_handler(signum, handler, signum)
    try:
        yield
    finally:
        for signum in wanted:
            loop.remove_signal_handler(signum)


def _is_news(record: logging.LogRecord) -> bool:
    """False for the traceback of a call cut off on purpose: by a second signal, or as its client stalled."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, asyncio.CancelledError)


def _raise_cause(engine: AsyncEngine) -> None:
    if engine.failure is not None and engine.failure.user_error:
        raise ConfigError(engine.failure.error)
    raise EngineDeadError(f"the worker is gone: {engine.engine.dead}")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `_Ending` has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Ending:
    """Decides when the server stops, and with which exit code."""

    def __init__(self, engine: AsyncEngine, server: uvicorn.Server) -> None:
        self.code = 0
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
        """Once the worker is gone every stream has its error; let them be read, then stop."""
        await self._engine.ended.wait()
        self._exit()

    async def _drain(self) -> None:
        await self._engine.drain()
        self._exit()

    def _exit(self) -> None:
        """Stop once the clients have their answers; one that never reads must not keep the server."""
        self._server.config.timeout_graceful_shutdown = _LAST_WORDS_SECONDS
        self._server.should_exit = True
