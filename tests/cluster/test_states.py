"""A model with states in a cluster: after the death of a worker its requests go on with the same bits."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import get_args

import pytest

from moesaic import LLM, SamplingParams
from moesaic.config import Schedule
from moesaic.testing import byte_tokenizer
from tests.support import model_configs, pairs, tiny_models
from tests.support.cluster_driver import Answer, cluster

FAMILIES = ("qwen3-next", "lfm2")
LENGTHS = (200, 129, 128, 65, 200, 10)
NEW = 40


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in FAMILIES:
        found[name] = tmp_path_factory.mktemp(name)
        tiny_models.save(tiny_models.build(*model_configs.CASES[name]), found[name])
        byte_tokenizer(found[name])
    return found


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [tiny_models.prompt(n, model_configs.VOCAB, seed=i % 4) for i, n in enumerate(LENGTHS)]
    params = [
        SamplingParams(max_tokens=NEW, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=0)
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.fixture(scope="module")
def alone(checkpoints: dict[str, Path]) -> dict[str, list[Answer]]:
    return {name: answers(path) for name, path in checkpoints.items()}


def answers(path: Path) -> list[Answer]:
    """What one process computes."""
    model = LLM(str(path), threads=1, enable_prefix_caching=False, enforce_eager=True)
    found = []
    for completion in model.generate(*workload()):
        [output] = completion.outputs
        found.append((output.token_ids, [entry.logprob for entry in output.logprobs or [] if entry]))
    return found


CASES = list(itertools.product(get_args(Schedule), (0, 80), FAMILIES))
NOW = [
    ("lockstep", 80, "qwen3-next"),
    ("barrier", 0, "lfm2"),
    ("async", 0, "qwen3-next"),
    ("auto", 80, "lfm2"),
]
"""They have each schedule, and each family at both moments."""


@pytest.mark.parametrize(("schedule", "after", "family"), pairs.some(CASES, NOW))
def test_a_killed_workers_requests_go_on(
    schedule: str, after: int, family: str, checkpoints: dict[str, Path], alone: dict[str, list[Answer]]
) -> None:
    """It dies in the middle of its prompts, whose chunks have 16 rows, or while it decodes."""
    killed: list[int] = []
    settings = {"schedule": schedule, "max_num_batched_tokens": 16}
    with cluster(str(checkpoints[family]), attention_workers=2, expert_servers=2, **settings) as served:

        def kill(tokens: int) -> None:
            if tokens >= after and not killed:
                killed.append(served.pid("attention worker 0"))
                os.kill(killed[0], signal.SIGKILL)

        served.submit(*workload())
        assert served.finish(kill) == alone[family]
    assert killed
