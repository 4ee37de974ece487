"""A GPU that is full is told in one line, wherever it shows."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.gpu.test_offload import STAYS
from tests.support import pairs

from moesaic import LLM
from moesaic.config import CacheConfig, ModelConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.runtime import out_of_memory
from moesaic.runtime.group import launcher

FULL = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 9.5 GiB"
ASKED = WorkerConfig(ModelConfig("demo"), CacheConfig("4GiB"))


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            ASKED,
            "--kv-cache-memory: got '4GiB'; allowed: less, or a smaller model (run-batch runs larger)",
        ),
        (replace(ASKED, offload=STAYS), "--fast-memory: less memory is free than was planned for"),
    ],
    ids=["in memory", "offloaded"],
)
def test_while_a_model_is_loaded(config: WorkerConfig, line: str) -> None:
    with pytest.raises(ConfigError) as raised, out_of_memory.explain(config):
        raise torch.OutOfMemoryError(FULL)
    assert str(raised.value) == f"{line} (CUDA out of memory)"


RANK = """
import torch
from moesaic.runtime.group import __main__ as rank
from moesaic.runtime.group import build_rank, sharded_model

def full(*given, **named):
    raise torch.OutOfMemoryError({full!r})

{place} = full
raise SystemExit(rank.main())
"""
PLACES = {
    "weights": ("build_rank.load_model", "--kv-cache-memory: got '4MiB'; allowed: less"),
    "what is free": ("build_rank.free_memory", "--kv-cache-memory: got 'auto'; allowed: less"),
    "cache": ("build_rank.layer_memory", "--kv-cache-memory: got '4MiB'; allowed: less"),
    "step": ("sharded_model.ShardedModel.run", "a step: CUDA out of memory; allowed: fewer rows at a time"),
}


@pytest.mark.parametrize("case", pairs.some(PLACES, ("weights", "step")))
def test_on_another_rank_of_a_group(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank's user is told; its processes end."""
    place, line = PLACES[case]
    start, started = subprocess.Popen, []

    def rank(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if "moesaic.runtime.group" not in command:
            return start(command, **options)
        script = RANK.format(full=FULL, place=place)
        started.append(start([command[0], "-c", script, *command[3:]], **options))
        return started[-1]

    monkeypatch.setattr(launcher.subprocess, "Popen", rank)
    cache = "auto" if case == "what is free" else "4MiB"
    with pytest.raises(ConfigError) as raised:
        LLM("demo", threads=1, tensor_parallel_size=2, kv_cache_memory=cache, max_model_len=64).generate("a")
    said = str(raised.value)
    assert said.startswith(f"rank 1 of the group is gone: {line}") and "\n" not in said
    [process] = started
    assert process.wait(20) == 2
