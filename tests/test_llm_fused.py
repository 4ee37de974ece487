"""Fused experts answer with the floats of experts one by one, however the checkpoint is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import LLM
from moesaic.core.offload import Offload
from moesaic.kernels import table
from moesaic.testing import byte_tokenizer
from tests.support import model_configs, tiny_models
from tests.support.cluster_driver import Answer, cluster
from tests.support.thread_groups import group_of_threads
from tests.test_llm_offload import floats, params, prompts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_workers"),
    pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build"),
]
COMMON: dict[str, Any] = {"threads": 1, "max_model_len": 128}
OFFLOAD = Offload(1 << 30, "cgopipe", micro_batch=2, micro_batches=4, prefill_rows=19, static_experts=2)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One by one, and fused."""
    options = model_configs.qwen2(num_key_value_heads=2, mlp_only_layers=[1])
    model = tiny_models.build("qwen2_moe", options)
    one = tiny_models.save(model, tmp_path_factory.mktemp("one"), torch.bfloat16)
    two = tiny_models.save_fused(model, tmp_path_factory.mktemp("two"), torch.bfloat16)
    for path in (one, two):
        byte_tokenizer(path)
    return one, two


def answers(made: LLM) -> list[Any]:
    results = made.generate(prompts(), [params(i) for i in range(len(prompts()))])
    return [floats(result.outputs[0]) for result in results]


@pytest.fixture(scope="module")
def wanted(paths: tuple[Path, Path]) -> list[Any]:
    return answers(LLM(str(paths[0]), **COMMON))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mmap": False},
        {"offload": OFFLOAD, "max_num_seqs": OFFLOAD.batch, "max_num_batched_tokens": 70},
    ],
    ids=["in memory", "copied", "offloaded"],
)
def test_one_process(paths: tuple[Path, Path], wanted: list[Any], settings: dict[str, Any]) -> None:
    assert answers(LLM(str(paths[1]), **COMMON, **settings)) == wanted


@pytest.mark.parametrize("offloaded", [False, True])
def test_two_ranks(paths: tuple[Path, Path], offloaded: bool) -> None:
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "max_model_len": 128}
    if offloaded:
        settings |= {"offload": OFFLOAD, "max_num_seqs": OFFLOAD.batch, "max_num_batched_tokens": 70}
    found = []
    for path in paths:
        with group_of_threads(str(path), moe_collectives="all-reduce", **settings) as (made, _, _):
            found.append(answers(made))
    assert found[0] == found[1]


def test_ranks_that_share_experts(paths: tuple[Path, Path]) -> None:
    """Each has a part of every expert's width."""
    found = []
    for path in paths:
        with group_of_threads(str(path), tensor_parallel_size=2, expert_tensor_parallel_size=2) as (
            made,
            _,
            _,
        ):
            found.append(answers(made))
    assert found[0] == found[1]


def test_expert_servers(paths: tuple[Path, Path], wanted: list[Any]) -> None:
    with cluster(str(paths[1]), expert_servers=2, attention_workers=1, max_model_len=128) as served:
        served.submit(prompts(), [params(i) for i in range(len(prompts()))])
        found: list[Answer] = served.finish()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert [scores for _, scores in found] == [[one[1] for one in entries] for _, entries in wanted]
