"""An engine in this process and its worker in another: what the server and the batch runner start with."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic.cluster.local import WorkerProcess, spawn_worker
from moesaic.config import WorkerConfig
from moesaic.engine import Engine
from moesaic.models import files
from moesaic.tokenizer import Tokenizer


@dataclass(frozen=True)
class Launched:
    """A worker that is loading, and the engine in front of it."""

    engine: Engine
    worker: WorkerProcess
    default_sampling: dict[str, Any]
    """The checkpoint's own, by the names of SamplingParams."""


@contextmanager
def launch(
    config: WorkerConfig,
    *,
    chat_template: Path | None = None,
    max_waiting: int | None = None,
    seed: int | None = None,
) -> Iterator[Launched]:
    """Start `config`'s worker; it ends with the block.

    chat_template, max_waiting: see Tokenizer and Engine. seed: of the seeds that requests get, None for
    another one each time. Raises ConfigError for what shows before the weights are read.
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
            max_waiting=max_waiting,
        )
        yield Launched(engine, worker, defaults.sampling)
    finally:
        worker.stop()
