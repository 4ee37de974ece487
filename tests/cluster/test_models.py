"""Every model type under every schedule, in a cover of all pairs of settings: the bits of one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from moesaic import LLM, SamplingParams
from moesaic.testing import byte_tokenizer
from tests.cluster.driven import Answer, cluster
from tests.models import cases, tiny

pytestmark = pytest.mark.slow

NEW, LONGEST = 20, 128
FACTORS: dict[str, dict[str, Any]] = {
    "model": {
        "mixtral, k 2, window": cases.CASES["mixtral-window"],
        "mixtral, k 1": ("mixtral", cases.mixtral(num_experts_per_tok=1)),
        "qwen3, k 8": ("qwen3_moe", cases.qwen3(num_experts_per_tok=8)),
        "qwen3, dense layers": cases.CASES["qwen3-bias-dense-layers"],
        "deepseek lite": cases.CASES["deepseek-lite-yarn"],
        "deepseek, k 6": ("deepseek_v2", cases.deepseek(num_experts_per_tok=6)),
    },
    "schedule": {
        "lockstep": {},
        "two in flight": {"inflight_batches": 2},
        "barrier": {"schedule": "barrier"},
        "defrag": {"schedule": "async"},
        "mtfs": {"schedule": "async", "queue_policy": "mtfs"},
        "flfs": {"schedule": "async", "queue_policy": "flfs"},
    },
    "processes": {
        "1 and 1": {"attention_workers": 1, "expert_servers": 1},
        "1 and 3": {"attention_workers": 1, "expert_servers": 3},
        "2 and 2, twice": {"attention_workers": 2, "expert_servers": 2, "min_replicas": 2},
        "3 and 2, one more": {"attention_workers": 3, "expert_servers": 2, "redundant_experts": 1},
    },
    "chunks": {"of 16": {"max_num_batched_tokens": 16}, "whole": {"max_num_batched_tokens": 512}},
    "cache": {"large": False, "of one request": True},
    "kernels": {"native": "auto", "torch": "reference"},
}


def cover() -> list[tuple[str, ...]]:
    """Choices, one of each factor, in which every pair of choices of two factors occurs."""
    names = [list(choices) for choices in FACTORS.values()]
    every = list(itertools.product(*names))
    open_pairs = {
        (i, a, j, b)
        for (i, one), (j, other) in itertools.combinations(enumerate(names), 2)
        for a, b in itertools.product(one, other)
    }
    chosen = []
    while open_pairs:
        best = max(every, key=lambda case: len(_pairs(case) & open_pairs))
        open_pairs -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(case: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(case), 2)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for name, (kind, options) in FACTORS["model"].items():
        paths[name] = tiny.save(tiny.build(kind, options), tmp_path_factory.mktemp("model"))
        byte_tokenizer(paths[name])
    return paths


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [tiny.prompt(length, cases.VOCAB, seed=length) for length in (1, 15, 16, 33, 70)]
    params = [
        SamplingParams(max_tokens=NEW, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=0)
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.mark.parametrize("case", cover(), ids=", ".join)
def test_the_bits_of_one_process(case: tuple[str, ...], checkpoints: dict[str, Path]) -> None:
    name, schedule, processes, chunks, cache, kernels = case
    path, picked = str(checkpoints[name]), FACTORS["kernels"][kernels]
    model = LLM(path, threads=1, max_model_len=LONGEST, kernels=picked, kv_cache_memory="8MiB")
    expected: list[Answer] = []
    for completion in model.generate(*workload()):
        [output] = completion.outputs
        expected.append((output.token_ids, [entry.logprob for entry in output.logprobs or [] if entry]))
    blocks = LONGEST // model.info.block_size if FACTORS["cache"][cache] else model.info.num_blocks
    settings = FACTORS["schedule"][schedule] | FACTORS["processes"][processes] | FACTORS["chunks"][chunks]
    memory = f"{blocks * model.info.kv_bytes // model.info.num_blocks}B"
    with cluster(path, kernels=picked, kv_cache_memory=memory, max_model_len=LONGEST, **settings) as served:
        served.submit(*workload())
        found = served.finish()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    if kernels == "native":  # torch's sums depend on the rows beside
        assert found == expected
