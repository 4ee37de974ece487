"""`moesaic serve`: starts worker processes, and serves the HTTP API in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from ipaddress import ip_address
from pathlib import Path
from socket import socket

from moesaic import __version__
from moesaic.commands.announce import Announcer
from moesaic.commands.tracing import announced
from moesaic.config import ClusterConfig, ServerConfig, WorkerConfig
from moesaic.core.cluster_status import ClusterStatus
from moesaic.core.errors import EngineDeadError
from moesaic.core.messages import Message
from moesaic.launch import Launched, launch
from moesaic.server.run import bind, serve
from moesaic.trace.options import RecordConfig
from moesaic.transport.base import Connection


class Observed:
    """A connection that calls `observe` with each message after the engine has handled it.

    It calls `observe` at the next `receive`, since the engine has handled the previous message by then.
    """

    def __init__(self, connection: Connection, observe: Callable[[Message], None]) -> None:
        self._connection = connection
        self._observe = observe
        self._last: Message | None = None

    def send(self, message: Message) -> None:
        self._connection.send(message)

    def receive(self, timeout: float | None = None) -> Message | None:
        last, self._last = self._last, None
        if last is not None:
            self._observe(last)
        self._last = self._connection.receive(timeout)
        return self._last

    def close(self) -> None:
        self._connection.close()


def run(
    config: WorkerConfig, cluster: ClusterConfig, server: ServerConfig, record: RecordConfig, as_json: bool
) -> int:
    """Serve until a signal arrives or the worker dies. Returns the exit code."""
    name = server.served_model_name or config.model.model
    template = Path(server.chat_template) if server.chat_template else None
    with (
        _stoppable(),
        closing(bind(server.host, server.port)) as listener,
        announced(config.trace),
        announced(record.record_routing, "the routing is in {0}: print it with moesaic profile show {0}"),
        launch(
            config, cluster, chat_template=template, max_waiting=server.max_queue, record=record
        ) as launched,
    ):
        return _serve(launched, listener, name, server, as_json)


@contextmanager
def _stoppable() -> Iterator[None]:
    """End quietly at a signal that arrives before the server has installed its own handlers.

    No request has arrived by then, and the processes that were started end with this one.
    """

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(0)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _serve(launched: Launched, listener: socket, name: str, server: ServerConfig, as_json: bool) -> int:
    """Serve the HTTP API of `launched`. Returns the exit code."""
    from moesaic.server.app import create_app  # a slow import, during which the worker already loads
    from moesaic.server.async_engine import AsyncEngine
    from moesaic.server.service import Service

    host, port = listener.getsockname()[:2]
    with Announcer(name, host, port, as_json, reported(launched)) as announcer:
        connection = Observed(launched.connection, announcer.observe)
        engine = AsyncEngine(launched.engine, connection, how_it_ended=launched.how_it_ended)
        service = Service(
            engine,
            name,
            launched.default_sampling,
            __version__,
            cluster=launched.supervisor,
            may_change=server.api_key is not None or ip_address(host.partition("%")[0]).is_loopback,
        )
        app = create_app(service, api_key=server.api_key)
        level = "info" if server.access_log else "warning"
        try:
            return serve(app, engine, listener, log_level=level, access_log=server.access_log)
        except EngineDeadError as error:
            ended = launched.how_it_ended()
            raise EngineDeadError(f"{ended}, and the server with it ({error})") from error


def reported(launched: Launched) -> Callable[[], ClusterStatus] | None:
    """The function that reports the status of the processes. None if one worker process does everything."""
    return None if launched.supervisor is None else launched.supervisor.report
