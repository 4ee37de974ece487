"""The HTTP API in this process, without a socket, in front of a worker process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from moesaic import __version__
from moesaic.cluster.launch import launch
from moesaic.config import ClusterConfig, WorkerConfig
from moesaic.core.errors import ConfigError, EngineDeadError
from moesaic.core.metrics import WorkerStats
from moesaic.core.worker_info import WorkerInfo
from moesaic.server.app import create_app
from moesaic.server.async_engine import AsyncEngine
from moesaic.server.client import Client
from moesaic.server.service import Service
from moesaic.server.unknown_fields import UnknownFields
from moesaic.text.parsers.table import AUTO
from moesaic.trace.options import RecordConfig


@dataclass(frozen=True)
class ModelService:
    """A model that accepts requests."""

    client: Client
    """The client that asks for the answers. It is not open yet."""
    description: str | None = None
    """A line about what serves, for people."""
    stats: Callable[[], WorkerStats] | None = None
    """Returns the statistics of the workers so far. None: the workers are not this process's own."""


@asynccontextmanager
async def serving(
    config: WorkerConfig,
    names: tuple[str, ...],
    cluster: ClusterConfig | None = None,
    *,
    chat_template: Path | None = None,
    special_tokens_in_content: bool = False,
    parsers: tuple[str, str] = (AUTO, AUTO),
    strict_fields: bool = False,
    seed: int | None = None,
    record: RecordConfig = RecordConfig(),
) -> AsyncIterator[ModelService]:
    """Serve `config`'s model under `names` until the end of the block. Answers have the first one.

    cluster: the processes that serve; None: one worker.
    chat_template, special_tokens_in_content: see Tokenizer. parsers: names of the parsers of tool calls and
    of reasoning. strict_fields: fail lines with unknown fields. seed: of the seeds that requests get. Raises
    ConfigError for what only a server does.
    """
    if cluster is not None and cluster.standby_for is not None:
        raise ConfigError.field("--standby-for", cluster.standby_for, "to leave it out: only serve stands by")
    with launch(
        config,
        cluster,
        chat_template=chat_template,
        special_tokens_in_content=special_tokens_in_content,
        seed=seed,
        record=record,
    ) as launched_engine:
        engine = AsyncEngine(
            launched_engine.engine, launched_engine.connection, describe_end=launched_engine.describe_end
        )
        service = Service(
            engine,
            names[0],
            launched_engine.default_sampling,
            __version__,
            tool_call_parser=parsers[0],
            reasoning_parser=parsers[1],
            fields=UnknownFields(strict_fields),
            other_names=names[1:],
        )
        engine.start()
        app, info = (
            create_app(service, max_body_bytes=2**62),
            await _wait_loaded(engine, launched_engine.describe_end),
        )
        yield ModelService(Client(app=app), _describe(info), lambda: launched_engine.engine.stats().worker)


def _describe(info: WorkerInfo) -> str:
    threads = f"{info.threads} thread{'s' if info.threads > 1 else ''}"
    if info.ranks > 1:
        threads += f" on each of {info.ranks} ranks, {info.collectives}"
    settings = f"{info.model_type} on {info.device}, {info.kernels}, {info.dtype}, {threads}"
    return f"{settings}, KV cache of {info.kv_tokens} tokens in {info.kv_dtype}"


async def _wait_loaded(engine: AsyncEngine, describe_end: Callable[[], str]) -> WorkerInfo:
    """Wait until the model is loaded. Raises ConfigError for a wrong setting or checkpoint."""
    try:
        await engine.wait_ready()
    except EngineDeadError as error:
        if engine.failure is not None and engine.failure.user_error:
            raise ConfigError(engine.failure.error) from error
        if engine.failure is not None:
            raise EngineDeadError(engine.failure.error) from error
        raise EngineDeadError(describe_end()) from error
    return engine.require_serving()
