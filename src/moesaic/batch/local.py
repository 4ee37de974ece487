"""The HTTP API in this process, without a socket, in front of a worker process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic import __version__
from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError, EngineDeadError
from moesaic.core.messages import WorkerInfo
from moesaic.core.metrics import WorkerStats
from moesaic.launch import launch
from moesaic.server.app import create_app
from moesaic.server.async_engine import AsyncEngine
from moesaic.server.service import Service
from moesaic.server.unknown_fields import UnknownFields


@dataclass(frozen=True)
class Served:
    """A model that accepts requests."""

    app: Callable[..., Any]
    """The ASGI application."""
    info: WorkerInfo | None = None
    """What the worker loaded; None if the worker is not one of moesaic's."""
    stats: Callable[[], WorkerStats] = WorkerStats
    """Statistics of that worker so far."""


@asynccontextmanager
async def serving(
    config: WorkerConfig,
    names: tuple[str, ...],
    *,
    chat_template: Path | None = None,
    special_tokens_in_content: bool = False,
    strict_fields: bool = False,
    seed: int | None = None,
) -> AsyncIterator[Served]:
    """Serve `config`'s model under `names` until the end of the block. Answers have the first one.

    chat_template, special_tokens_in_content: see Tokenizer. strict_fields: fail lines with unknown fields.
    seed: of the seeds that requests get.
    """
    with launch(
        config, chat_template=chat_template, special_tokens_in_content=special_tokens_in_content, seed=seed
    ) as launched:
        engine = AsyncEngine(launched.engine, launched.connection)
        unknown = UnknownFields(strict_fields)
        sampling, others = launched.default_sampling, names[1:]
        service = Service(engine, names[0], sampling, __version__, fields=unknown, other_names=others)
        engine.start()
        app, info = create_app(service, max_body_bytes=2**62), await _loaded(engine, launched.how_it_ended)
        yield Served(app, info, lambda: launched.engine.stats().worker)


async def _loaded(engine: AsyncEngine, how_it_ended: Callable[[], str]) -> WorkerInfo:
    """Wait until the model is loaded. Raises ConfigError for a wrong setting or checkpoint."""
    try:
        await engine.wait_ready()
    except EngineDeadError as error:
        if engine.failure is not None and engine.failure.user_error:
            raise ConfigError(engine.failure.error) from error
        if engine.failure is not None:
            raise EngineDeadError(engine.failure.error) from error
        raise EngineDeadError(how_it_ended()) from error
    return engine.require_serving()
