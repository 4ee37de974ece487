"""The HTTP API in this process, without a socket, in front of a worker process."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic import __version__
from moesaic.cluster.local import WorkerProcess, spawn_worker
from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError, EngineDeadError
from moesaic.core.messages import WorkerInfo
from moesaic.engine import Engine
from moesaic.models import files
from moesaic.server.app import create_app
from moesaic.server.async_engine import AsyncEngine
from moesaic.server.service import Service
from moesaic.tokenizer import Tokenizer


@dataclass(frozen=True)
class Served:
    """A model that takes requests."""

    app: Callable[..., Any]
    """An ASGI application."""
    info: WorkerInfo | None = None
    """What its worker loaded, where it has one of ours."""


@asynccontextmanager
async def serving(
    config: WorkerConfig,
    model_name: str,
    *,
    chat_template: Path | None = None,
    seed: int | None = None,
) -> AsyncIterator[Served]:
    """`config`'s model under the name `model_name`, until the end of the block.

    seed: of the seeds that requests get.
    """
    path = files.resolve(config.model.model, config.model.revision)
    defaults = files.generation_defaults(path)
    tokenizer = Tokenizer(path, chat_template)
    here = replace(config.model, model=str(path), revision=None)
    worker = spawn_worker(replace(config, model=here))
    try:
        engine = Engine(
            worker.connection,
            tokenizer,
            clock=time.monotonic,
            rng=random.Random(seed),
            eos_token_ids=defaults.eos_token_ids,
        )
        loop_engine = AsyncEngine(engine, worker.connection)
        service = Service(loop_engine, model_name, defaults.sampling, __version__)
        loop_engine.start()
        yield Served(create_app(service, max_body_bytes=2**62), await _loaded(loop_engine, worker))
    finally:
        worker.stop()


async def _loaded(engine: AsyncEngine, worker: WorkerProcess) -> WorkerInfo:
    """What was loaded; ConfigError when a setting or the checkpoint is to blame."""
    try:
        await engine.wait_ready()
    except EngineDeadError as error:
        if engine.failure is not None and engine.failure.user_error:
            raise ConfigError(engine.failure.error) from error
        if engine.failure is not None:
            raise EngineDeadError(engine.failure.error) from error
        raise EngineDeadError(worker.how_it_ended()) from error
    return engine.require_serving()
