"""Attention under tensor parallelism: the tokens of one process, in every form."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models import cases, tiny
from tests.runtime.tensor.threads import group_of_threads

from moesaic import LLM, SamplingParams
from moesaic.core.placement import Placement
from moesaic.models import registry
from moesaic.testing import byte_tokenizer

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", cases.mixtral(num_attention_heads=8, num_key_value_heads=2)),
    "qwen3": (
        "qwen3_moe",
        cases.qwen3(num_attention_heads=4, num_key_value_heads=4, mlp_only_layers=[1], attention_bias=True),
    ),
    "deepseek": ("deepseek_v2", cases.deepseek()),
}
FORMS = ("deepspeed", "all-reduce", "reduce-scatter")
NEW, LONGEST = 12, 128
Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for name, (kind, options) in MODELS.items():
        paths[name] = tiny.save(tiny.build(kind, options), tmp_path_factory.mktemp(name))
        byte_tokenizer(paths[name])
    return paths


def answers(model: LLM) -> Answers:
    """Prompts of 1 to 70 tokens, every other one sampled."""
    prompts = [tiny.prompt(length, cases.VOCAB, seed=length) for length in (1, 15, 33, 70)]
    params = [
        SamplingParams(max_tokens=NEW, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=0)
        for i in range(len(prompts))
    ]
    found = []
    for completion in model.generate(prompts, params):
        [output] = completion.outputs
        found.append((output.token_ids, [entry.logprob for entry in output.logprobs or [] if entry]))
    return found


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[str, Answers]:
    return {name: answers(LLM(str(path), threads=1)) for name, path in checkpoints.items()}


def same(found: Answers, wanted: Answers) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


EVERY = [
    pytest.param(*each, marks=() if each in (("qwen3", "reduce-scatter", 2, 1),) else pytest.mark.slow)
    for each in itertools.chain(
        itertools.product(MODELS, FORMS, (2, 4), (1,)),
        itertools.product(("mixtral", "deepseek"), FORMS, (2,), (2,)),
        [("mixtral", "reduce-scatter", 4, 2), ("qwen3", "all-reduce", 4, 4)],
    )
]


@pytest.mark.parametrize(("name", "form", "size", "expert_ranks"), EVERY)
def test_the_tokens_of_one_process(
    name: str,
    form: str,
    size: int,
    expert_ranks: int,
    checkpoints: dict[str, Path],
    expected: dict[str, Answers],
) -> None:
    """With prompts in chunks, and a cache that holds two of the requests."""
    with group_of_threads(
        str(checkpoints[name]),
        tensor_parallel_size=size,
        expert_tensor_parallel_size=expert_ranks,
        moe_collectives=form,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        max_model_len=LONGEST,
    ) as (model, _, _):
        same(answers(model), expected[name])


def test_random_placements(
    checkpoints: dict[str, Path], expected: dict[str, Answers], tmp_path: Path
) -> None:
    """Experts may live on any rank, another number on each."""
    spec = registry.read_spec(checkpoints["qwen3"])
    rng = np.random.default_rng(0)
    for turn in range(3):
        held = {}
        for layer in spec.moe_layers:
            ranks = rng.permutation(np.resize([0, 0, 1], spec.num_experts))
            held[layer] = {rank: np.flatnonzero(ranks == rank).tolist() for rank in range(2)}
        file = tmp_path / f"{turn}.json"
        file.write_text(Placement(0, spec.num_experts, held, spec.routed.model).to_json())
        with group_of_threads(
            str(checkpoints["qwen3"]),
            tensor_parallel_size=2,
            moe_collectives="reduce-scatter",
            placement=str(file),
        ) as (model, _, _):
            same(answers(model), expected["qwen3"])
