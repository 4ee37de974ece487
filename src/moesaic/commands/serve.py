"""`moesaic serve`: starts worker processes, and serves the HTTP API in this process.

Question: What does SIGTERM do to `moesaic serve`?
"""

from __future__ import annotations

import importlib
import json
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from moesaic import __version__
from moesaic.cluster.joining import standby
from moesaic.cluster.launch import LaunchedEngine, check, launch
from moesaic.commands.announce import Announcer
from moesaic.commands.starting import settle, without_plan
from moesaic.commands.tracing import announce_routing, announce_trace
from moesaic.config import (
    ClusterConfig,
    ConnectionConfig,
    CorsConfig,
    OffloadConfig,
    ServerConfig,
    WorkerConfig,
)
from moesaic.core.cluster_status import ClusterStatus
from moesaic.core.errors import ConfigError, EngineDeadError
from moesaic.core.messages import Message
from moesaic.server.hosts import Hosts, is_loopback
from moesaic.server.listener import listen, name_address
from moesaic.text.parsers.table import check_parsers, detect_formats
from moesaic.text.tokenizer import Tokenizer
from moesaic.trace import logs
from moesaic.trace.options import RecordConfig
from moesaic.transport.base import Connection
from moesaic.transport.secret import read_secret

if TYPE_CHECKING:
    from moesaic.server.async_engine import AsyncEngine
    from moesaic.server.guard import Access
    from moesaic.server.otlp import RequestSpans
    from moesaic.server.service import Service

PREFILL_STEP_MS = 200.0
"""What `--prefill-step-ms` is where it is not given."""
SLOW_IMPORTS = ("moesaic.server.app", "moesaic.server.run", "moesaic.server.async_engine")


class ObservedConnection:
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
    config: WorkerConfig,
    cluster: ClusterConfig,
    server: ServerConfig,
    limits: ConnectionConfig,
    record: RecordConfig,
    as_json: bool,
    cors: CorsConfig = CorsConfig(),
    offload: OffloadConfig = OffloadConfig(),
) -> int:
    """Serve until a signal arrives or the worker dies. Returns the exit code."""
    logs.set_up("server", config.log_level)
    check_parsers(server.tool_call_parser, server.reasoning_parser)
    check_packages(server.otlp_traces_endpoint)
    config, offload = settle(config, cluster, offload, record)
    processes: ClusterConfig | None = None
    if config.offload is None:
        config, processes = without_plan(config, cluster, offload)
        if config.scheduler.prefill_step_ms is None and config.server_memory is None:
            scheduler = replace(config.scheduler, prefill_step_ms=PREFILL_STEP_MS)
            config = replace(config, scheduler=scheduler)
    if processes is not None and processes.standby_for is not None:
        with stoppable():
            stand_by(config, processes, server, record, as_json)
    names = server.served_model_name or (config.model.model,)
    template = Path(server.chat_template) if server.chat_template else None
    with (
        stoppable(),
        listen(server.host, server.port, server.uds) as listener,
        announce_trace(config.trace),
        announce_routing(record),
        launch(
            config,
            processes,
            chat_template=template,
            special_tokens_in_content=server.allow_special_tokens_in_content,
            max_waiting=server.max_queue,
            record=record,
        ) as launched_engine,
    ):
        return _serve(launched_engine, listener, names, server, limits, cors, as_json)


@contextmanager
def stoppable() -> Iterator[None]:
    """End quietly at a signal that arrives before the server has installed its own handlers.

    No request has arrived by then, and the processes that were started end with this one.
    """

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(0)

    # Only the main thread may set signal handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers = {signum: signal.signal(signum, stop) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)


def _serve(
    launched_engine: LaunchedEngine,
    listener: socket,
    names: tuple[str, ...],
    server: ServerConfig,
    limits: ConnectionConfig,
    cors: CorsConfig,
    as_json: bool,
) -> int:
    """Serve the HTTP API of `launched_engine`. Returns the exit code."""
    from moesaic.server.app import create_app  # slow imports, during which the worker already loads
    from moesaic.server.async_engine import AsyncEngine
    from moesaic.server.run import serve
    from moesaic.server.throughput import log_throughput

    host, url = name_address(listener)
    new_key = secrets.token_hex(24) if launched_engine.supervisor and server.admin_key is None else None
    tokenizer = launched_engine.engine.tokenizer
    formats = detect_formats(tokenizer.chat_template, server.tool_call_parser, server.reasoning_parser)
    arrivals = tokenizer.arrivals  # the worker loads meanwhile
    moves = [] if arrivals is None else arrivals.describe_instructions()
    with (
        _spans(server.otlp_traces_endpoint, names[0]) as spans,
        Announcer(
            names[0], url, as_json, formats, moves, find_status_report(launched_engine), new_key
        ) as announcer,
    ):
        connection = ObservedConnection(launched_engine.connection, announcer.observe)
        engine = AsyncEngine(launched_engine.engine, connection, describe_end=launched_engine.describe_end)
        app = create_app(
            _service(engine, launched_engine, names, server),
            access=_access(server, host, server.admin_key or new_key, launched_engine),
            body_seconds=limits.timeout_body,
            cors=cors,
            tokenizer_info=server.enable_tokenizer_info_endpoint,
            metrics_prefix=server.metrics_prefix,
            on_trace=None if spans is None else spans.write,
        )
        try:
            report = None if server.disable_log_stats else partial(log_throughput, engine, time.monotonic)
            return serve(app, engine, listener, limits=limits, access_log=server.access_log, report=report)
        except EngineDeadError as error:
            ending = launched_engine.describe_end()
            cause = "" if ending in str(error) else f" ({error})"
            raise EngineDeadError(f"{ending}, and the server with it{cause}") from error


def _service(
    engine: AsyncEngine, launched_engine: LaunchedEngine, names: tuple[str, ...], server: ServerConfig
) -> Service:
    """The served model, as the routes see it."""
    from moesaic.server.service import Service  # slow imports
    from moesaic.server.unknown_fields import UnknownFields

    return Service(
        engine,
        names[0],
        launched_engine.default_sampling,
        __version__,
        tool_call_parser=server.tool_call_parser,
        reasoning_parser=server.reasoning_parser,
        cluster=launched_engine.supervisor,
        fields=UnknownFields(server.strict_fields),
        other_names=names[1:],
    )


def check_packages(endpoint: str | None) -> None:
    """Raise ConfigError if spans are wanted and OpenTelemetry's packages are not installed."""
    if endpoint is None:
        return
    try:
        from moesaic.server import otlp  # noqa: F401 # only wanted with the flag
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("opentelemetry"):
            raise
        advice = f"to leave it out, or pip install 'moesaic[otel]' first ({error})"
        raise ConfigError.field("--otlp-traces-endpoint", endpoint, advice) from error


def _spans(endpoint: str | None, model: str) -> AbstractContextManager[RequestSpans | None]:
    """Sends spans of requests until it is closed. None without --otlp-traces-endpoint."""
    if endpoint is None:
        return nullcontext()
    from moesaic.server.otlp import RequestSpans  # only wanted with the flag

    return closing(RequestSpans(endpoint, model, __version__))


def _access(
    server: ServerConfig, host: str, admin_key: str | None, launched_engine: LaunchedEngine
) -> Access:
    """Who may call what of a server that listens on `host`."""
    from moesaic.server.elastic import admin_paths  # slow imports
    from moesaic.server.guard import Access

    # Without an API key anybody who reaches the port may call the server, but its status tells too much.
    protect_status = server.api_key is None and not is_loopback(host)
    paths = admin_paths(protect_status) if launched_engine.supervisor else frozenset()
    # A web page cannot call a Unix socket.
    hosts = None if server.uds else Hosts.from_listener(server.host, host, server.more_hosts)
    return Access(server.api_key, admin_key, paths, hosts)


def find_status_report(launched_engine: LaunchedEngine) -> Callable[[], ClusterStatus] | None:
    """The function that reports the status of the processes. None if one worker process does everything."""
    return None if launched_engine.supervisor is None else launched_engine.supervisor.report


def stand_by(
    config: WorkerConfig, cluster: ClusterConfig, server: ServerConfig, record: RecordConfig, as_json: bool
) -> None:
    """Prepares what can be prepared, and returns when it is time to serve.

    The port is not opened, so clients and load balancers see that nobody serves here. Raises ConfigError for
    what would fail later: settings that a standby has not, an address that is used, a checkpoint or a secret
    that is not there.
    """
    assert cluster.standby_for is not None and cluster.cluster_address is not None
    path = check(config, cluster.resolve(), record)
    secret = read_secret(Path(cluster.cluster_secret_file or ""), "--cluster-secret-file")
    with listen(server.host, server.port, server.uds):
        pass
    weights = standby.prepare(cluster.standby_for, cluster.cluster_address, path)
    template = Path(server.chat_template) if server.chat_template else None
    Tokenizer(path, template, special_tokens_in_content=server.allow_special_tokens_in_content).close()
    for name in SLOW_IMPORTS:
        importlib.import_module(name)

    def say(text: str) -> None:
        print(json.dumps({"event": "standby", "what": text}) if as_json else text, flush=True)

    standby.watch(cluster.standby_for, secret, weights, say)
