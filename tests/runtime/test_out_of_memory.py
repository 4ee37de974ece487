"""A GPU that is full is told in one line, wherever it shows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tests.device.test_offload import STAYS

from moesaic.config import CacheConfig, GroupConfig, ModelConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.runtime import out_of_memory

FULL = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 9.5 GiB"
ASKED = WorkerConfig(ModelConfig("demo"), CacheConfig("4GiB"))


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (ASKED, "--kv-cache-memory: got '4GiB'; allowed: less, or --fast-memory for a larger model"),
        (replace(ASKED, offload=STAYS), "--fast-memory: less of the GPU is free than was planned for"),
    ],
    ids=["in memory", "offloaded"],
)
def test_while_a_model_is_loaded(config: WorkerConfig, line: str) -> None:
    @out_of_memory.told
    def load(config: WorkerConfig) -> None:
        raise torch.OutOfMemoryError(FULL)

    with pytest.raises(ConfigError) as raised:
        load(config)
    assert str(raised.value) == f"{line} (CUDA out of memory)"


RANK = """
import torch
from moesaic.runtime.tensor import __main__ as rank

class Full:
    def follow(self):
        raise torch.OutOfMemoryError({full!r})

rank.gather = rank.OneShotGroup = lambda *given, **named: None
rank.follower = lambda *given: Full()
raise SystemExit(rank.main())
"""


@pytest.mark.slow
def test_in_a_step_of_another_rank() -> None:
    config = replace(ASKED, group=GroupConfig(2))
    command = [sys.executable, "-c", RANK.format(full=FULL), "--rank", "1", "--socket", "/nowhere"]
    process = subprocess.Popen(
        [*command, "--config", config.to_json()],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stderr is not None
    with process.stdin, process.stderr:
        process.stdin.write("00\n")
        process.stdin.flush()
        said, code = process.stderr.read(), process.wait(60)
    assert code == 2 and said.count("\n") == 1
    assert said.startswith("moesaic: rank 1: a step: CUDA out of memory; allowed: fewer rows at a time")
