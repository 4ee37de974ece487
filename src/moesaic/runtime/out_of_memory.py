"""Messages for memory that is used up. torch's own message is long and names no setting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError


@contextmanager
def explain(config: WorkerConfig) -> Iterator[None]:
    """Code that loads a model and allocates its cache. Raises ConfigError when memory is used up."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        text = (
            f"--kv-cache-memory: got {config.cache.kv_cache_memory!r}; "
            "allowed: less, or a smaller model (run-batch runs larger)"
        )
        if config.offload is not None:
            text = "--fast-memory: less memory is free than was planned for"
        raise ConfigError(f"{text} ({_first_sentence(error)})") from error


def describe_step_error(error: torch.OutOfMemoryError) -> str:
    """The message for a step that ran out of memory."""
    allowed_text = "fewer rows at a time (--max-num-batched-tokens, --max-num-seqs)"
    reason = _first_sentence(error)
    return f"a step: {reason}; allowed: {allowed_text}, or less in --kv-cache-memory or --fast-memory"


def _first_sentence(error: Exception) -> str:
    return str(error).partition(". ")[0]
