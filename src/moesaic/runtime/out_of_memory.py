"""What a person is told of a GPU that has no memory for what it was asked. Python's own ends otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError

Given = ParamSpec("Given")
Made = TypeVar("Made")


def told(
    load: Callable[Concatenate[WorkerConfig, Given], Made],
) -> Callable[Concatenate[WorkerConfig, Given], Made]:
    """What loads a model and takes its cache raises a ConfigError then."""

    @wraps(load)
    def loading(config: WorkerConfig, /, *given: Given.args, **named: Given.kwargs) -> Made:
        try:
            return load(config, *given, **named)
        except torch.OutOfMemoryError as error:
            asked = config.cache.kv_cache_memory
            allowed = "less, or a smaller model (run-batch runs larger)"
            text = f"--kv-cache-memory: got {asked!r}; allowed: {allowed}"
            if config.offload is not None:
                text = "--fast-memory: less of the GPU is free than was planned for"
            raise ConfigError(f"{text} ({_said(error)})") from error

    return loading


def of_step(error: torch.OutOfMemoryError) -> str:
    """In a step, later."""
    allowed = "fewer rows at a time (--max-num-batched-tokens, --max-num-seqs)"
    return f"a step: {_said(error)}; allowed: {allowed}, or less in --kv-cache-memory or --fast-memory"


def _said(error: torch.OutOfMemoryError) -> str:
    return str(error).partition(". ")[0]
