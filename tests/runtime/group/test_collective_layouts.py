"""Attention under tensor parallelism: the tokens of one process, in every form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import model_configs, pairs, tiny_models
from tests.support.group_placements import recorded, write
from tests.support.thread_groups import group_of_threads

from moesaic import SamplingParams
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile
from moesaic.llm import Completion
from moesaic.models import registry
from moesaic.models.kvcache.paged_kv import bytes_per_token
from moesaic.models.shard import Shard
from moesaic.testing import byte_tokenizer

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "mixtral",
        model_configs.mixtral(num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=4),
    ),
    "qwen3": (
        "qwen3_moe",
        model_configs.qwen3(
            num_attention_heads=4, num_key_value_heads=4, mlp_only_layers=[1], attention_bias=True
        ),
    ),
    "deepseek": ("deepseek_v2", model_configs.deepseek()),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("olmoe", model_configs.olmoe(num_attention_heads=4, num_key_value_heads=4, clip_qkv=0.9)),
    "qwen2": ("qwen2_moe", model_configs.qwen2(num_key_value_heads=2, mlp_only_layers=[1])),
}
"""Families of which only some combinations are slow tests."""
FORMS: dict[str, dict[str, str]] = {
    "deepspeed": {"moe_collectives": "deepspeed"},
    "all-reduce": {"moe_collectives": "all-reduce"},
    "reduce-scatter": {"moe_collectives": "reduce-scatter"},
    "shuffled, move": {"moe_collectives": "shuffled", "shuffle_align": "move"},
    "shuffled, variable": {"moe_collectives": "shuffled", "shuffle_align": "variable"},
}
NEW, LONGEST = 20, 96
PROMPTS = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 15, 30, 33, 70)]
PARAMS = [
    SamplingParams(max_tokens=NEW, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=0)
    for i in range(len(PROMPTS))
]
Answers = list[tuple[list[int], list[float]]]


@dataclass(frozen=True)
class Alone:
    """A checkpoint, and what one process makes of it."""

    path: Path
    answers: Answers
    profile: Profile
    """Of all requests but the longest: tables made of it know some tokens and do not know others."""


def answers(completions: list[Completion]) -> Answers:
    found = []
    for completion in completions:
        [output] = completion.outputs
        found.append((output.token_ids, [entry.logprob for entry in output.logprobs or [] if entry]))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Alone]:
    found = {}
    for name, (kind, options) in (MODELS | MORE).items():
        path = tiny_models.save(tiny_models.build(kind, options), tmp_path_factory.mktemp(name))
        byte_tokenizer(path)
        completions, profile = recorded(str(path), PROMPTS, PARAMS)
        some = profile.with_routes(profile.routes.select(range(len(PROMPTS) - 1)))
        assert 0 < np.isin(profile.routes.tokens, some.routes.tokens).mean() < 1
        found[name] = Alone(path, answers(completions), some)
    return found


def same(found: Answers, wanted: Answers) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def small_cache(path: Path, size: int) -> str:
    """Memory for one request of the maximum length, on each rank."""
    spec = registry.read_spec(path, Shard(0, size))
    return f"{size * LONGEST * bytes_per_token(spec.kv, spec.num_layers, torch.float32)}B"


RANKS = ((2, 1), (4, 1), (4, 2))
"""And of those how many share each expert."""
EVERY = [
    *pairs.params(MODELS, FORMS, RANKS),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in [
            ("mixtral", "deepspeed", (2, 2)), ("deepseek", "shuffled, variable", (2, 2)),
            ("mixtral", "reduce-scatter", (2, 2)), ("qwen3", "all-reduce", (4, 4)),
            ("olmoe", "all-reduce", (2, 1)), ("qwen2", "reduce-scatter", (2, 1)),
        ]
    ),
    *(pytest.param(name, form, (4, 2), marks=pairs.REST) for name in MORE for form in FORMS),
]  # fmt: skip


@pytest.mark.parametrize(("name", "form", "ranks"), EVERY, ids=str)
def test_the_tokens_of_one_process(
    name: str, form: str, ranks: tuple[int, int], alone: dict[str, Alone], tmp_path: Path
) -> None:
    """Greedy and sampled, with prompts in chunks and a cache that holds two or three of the requests."""
    one, settings, (size, expert_ranks) = alone[name], FORMS[form], ranks
    units = size // expert_ranks
    if "shuffled" in form:
        settings = settings | {"placement": write(tmp_path, one.profile, units, copies=2 * (units > 1))}
    with group_of_threads(
        str(one.path),
        tensor_parallel_size=size,
        expert_tensor_parallel_size=expert_ranks,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        max_model_len=LONGEST,
        kv_cache_memory=small_cache(one.path, size),
        **settings,
    ) as (model, _, _):
        same(answers(model.generate(PROMPTS, PARAMS)), one.answers)
        stats = model.stats()
    assert stats.preemptions > 0
    counted = stats.experts.group
    assert (counted.shuffled_rows > 0) == ("shuffled" in form)
    assert (counted.kept_rows < counted.shuffled_rows) == (form == "shuffled, move" and units > 1)


@pytest.mark.parametrize(
    ("name", "form", "ranks"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("mixtral", "deepspeed", (4, 2)), ("deepseek", "shuffled, variable", (2, 1)),
                ("qwen3", "all-reduce", (4, 1)),
            ]
        ),
        *(pytest.param("qwen3", form, (4, 2), marks=pytest.mark.full) for form in FORMS),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_stay_on_the_device_give_the_tokens_of_one_process(
    name: str, form: str, ranks: tuple[int, int], alone: dict[str, Alone], tmp_path: Path
) -> None:
    """By gloo, whose device is the CPU. The ranks send as many bytes as through the host."""
    one, (size, expert_ranks), sent = alone[name], ranks, []
    settings = FORMS[form]
    if "shuffled" in form:
        settings = settings | {"placement": write(tmp_path, one.profile, size // expert_ranks)}
    sizes = {"tensor_parallel_size": size, "expert_tensor_parallel_size": expert_ranks}
    for backend in ("host", "gloo"):
        with group_of_threads(
            str(one.path), collectives_backend=backend, max_num_batched_tokens=16, max_num_seqs=8,
            max_model_len=LONGEST, kv_cache_memory="64MiB", **sizes, **settings,
        ) as (model, _, _):  # fmt: skip
            same(answers(model.generate(PROMPTS, PARAMS)), one.answers)
            sent.append(model.stats().experts.group)
    assert sent[0] == sent[1]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["deepspeed", "all-reduce", "reduce-scatter"])
def test_random_placements(form: str, alone: dict[str, Alone], tmp_path: Path) -> None:
    """Experts may live on any rank, another number on each."""
    one = alone["qwen3"]
    spec = registry.read_spec(one.path)
    rng = np.random.default_rng(len(form))
    held = {}
    for layer in spec.moe_layers:
        ranks = rng.permutation(np.resize([0, 0, 1], spec.num_experts))
        held[layer] = {rank: np.flatnonzero(ranks == rank).tolist() for rank in range(2)}
    file = tmp_path / "placement.json"
    file.write_text(Placement(0, spec.num_experts, held, registry.routed_model(one.path).model).to_json())
    settings = {"tensor_parallel_size": 2, "moe_collectives": form, "placement": str(file)}
    with group_of_threads(str(one.path), **settings) as (model, _, _):
        same(answers(model.generate(PROMPTS, PARAMS)), one.answers)
