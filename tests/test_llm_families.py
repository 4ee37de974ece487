"""Families through whole engines: recorded, offloaded, by ranks, with expert servers.

The first family meets each way once, and the others take turns. The families that are not here are
in the matrices of test_llm_*.py and tests/cluster.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import LLM, SamplingParams
from moesaic.core.offload import Offload
from moesaic.kernels import table
from moesaic.testing import byte_tokenizer
from tests.support import model_configs, pairs, tiny_models
from tests.support.cluster_driver import Answer, cluster
from tests.support.thread_groups import group_of_threads

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build"),
]

FAMILIES = {
    "deepseek3-full": torch.bfloat16,
    "glm4-norm-bias-groups": torch.float32,
    "glm4-lite-layers-groups-yarn": torch.bfloat16,
    "minimax": torch.bfloat16,
    "mellum": torch.float32,
    "exaone": torch.bfloat16,
    "dots-windows-bias-shared-groups": torch.float32,
    "solar": torch.bfloat16,
    "internvl-qwen3": torch.bfloat16,
    "glm4v": torch.float32,
    "qwen3-vl": torch.bfloat16,
    "ernie": torch.bfloat16,
    "granite": torch.bfloat16,
    "granite-shared": torch.bfloat16,
    "hy3-layers-bias-shared-yarn": torch.bfloat16,
    "gpt-oss": torch.bfloat16,
    "dbrx": torch.bfloat16,
    "qwen3-next": torch.bfloat16,
    "qwen3.5": torch.float32,
    "lfm2": torch.bfloat16,
}
"""A case, and the type of its weights."""
LATER = {"solar", "glm4v"}
"""These are left to `make full`: another family here has the same parts."""
FIRST = ("deepseek3-full",)
"""Families that meet each way in `make test`. The others take turns there."""
NEW, LONGEST = 20, 128
DISK = Offload(1 << 30, "cgopipe", micro_batch=2, micro_batches=4, prefill_rows=19)
WAYS: dict[str, dict[str, Any]] = {
    "not recorded": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 11, "max_num_seqs": 5, "block_size": 3},
    "experts on disk": {"offload": DISK, "max_num_seqs": DISK.batch, "max_num_batched_tokens": 23},
    "experts on demand": {
        "offload": Offload(
            1 << 30, "on-demand", micro_batch=3, micro_batches=2, prefill_rows=40, static_experts=1
        ),
        "max_num_seqs": 6,
    },
}
GROUPS: dict[str, dict[str, Any]] = {
    "all-reduce": {"moe_collectives": "all-reduce"},
    "reduce-scatter": {"moe_collectives": "reduce-scatter"},
    "deepspeed": {"moe_collectives": "deepspeed"},
    "half of each expert": {"expert_tensor_parallel_size": 2},
    "all-reduce, offloaded": {"moe_collectives": "all-reduce"} | WAYS["experts on disk"],
}


def prompts() -> list[list[int]]:
    """Around block boundaries and past original contexts; two share 60 tokens."""
    drawn = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 16, 17, 40, 84)]
    return [*drawn, drawn[-1][:60] + drawn[1]]


def params() -> list[SamplingParams]:
    """Every second one is sampled, the others are greedy."""
    return [
        SamplingParams(max_tokens=NEW, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=0)
        for i in range(len(prompts()))
    ]


def answers(model: LLM) -> list[Answer]:
    found = []
    for completion in model.generate(prompts(), params()):
        [output] = completion.outputs
        found.append((output.token_ids, [entry.logprob for entry in output.logprobs or [] if entry]))
    return found


class Checkpoints(dict[str, Path]):
    """And the answers of one process that has all in memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[str, list[Answer]] = {}

    def __missing__(self, name: str) -> Path:
        model = tiny_models.build(*model_configs.CASES[name])
        self[name] = tiny_models.save(model, self.root / name, FAMILIES[name])
        byte_tokenizer(self[name])
        return self[name]

    def wanted(self, name: str) -> list[Answer]:
        if name not in self.known:
            self.known[name] = answers(LLM(str(self[name]), threads=1, max_model_len=LONGEST))
        return self.known[name]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("families"))


def each(step: int = 1) -> list[Any]:
    """Each family. step: so many of them have one that is not left to the full tests."""
    now = [name for name in FAMILIES if name not in LATER][::step]
    return [pytest.param(name, marks=() if name in now else pairs.REST) for name in FAMILIES]


def with_ways(ways: Collection[str]) -> list[Any]:
    """Each family with each of `ways`."""

    def now(name: str, number: int, turn: int) -> bool:
        return name in FIRST or (name not in LATER and turn == number % len(ways))

    return [
        pytest.param(name, way, marks=() if now(name, number, turn) else pairs.REST)
        for number, name in enumerate(FAMILIES)
        for turn, way in enumerate(ways)
    ]


@pytest.mark.parametrize("name", each())
def test_greedy_tokens_are_those_of_transformers(checkpoints: Checkpoints, name: str) -> None:
    found = checkpoints.wanted(name)
    kind = tiny_models.KINDS[model_configs.CASES[name][0]][1]
    theirs = kind.from_pretrained(checkpoints[name], dtype=torch.float32)
    for index, prompt in enumerate(prompts()):
        if params()[index].temperature == 0:
            assert found[index][0] == tiny_models.reference_greedy(theirs, prompt, NEW)


@pytest.mark.parametrize(("name", "way"), with_ways(WAYS))
def test_the_floats_of_one_process_in_memory(checkpoints: Checkpoints, name: str, way: str) -> None:
    model = LLM(str(checkpoints[name]), threads=1, max_model_len=LONGEST, **WAYS[way])
    assert answers(model) == checkpoints.wanted(name)


@pytest.mark.parametrize(("name", "form"), with_ways(GROUPS))
def test_two_ranks_have_the_tokens_of_one(checkpoints: Checkpoints, name: str, form: str) -> None:
    settings = {"tensor_parallel_size": 2, "max_model_len": LONGEST} | GROUPS[form]
    with group_of_threads(str(checkpoints[name]), **settings) as (model, _, _):
        found = answers(model)
    for (tokens, logprobs), (wanted, expected) in zip(found, checkpoints.wanted(name), strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", each(2))
def test_expert_servers_give_the_floats_of_one_process(
    checkpoints: Checkpoints, name: str, quick_workers: None
) -> None:
    with cluster(
        str(checkpoints[name]), max_model_len=LONGEST, expert_servers=2, attention_workers=1
    ) as served:
        served.submit(prompts(), params())
        assert served.finish() == checkpoints.wanted(name)
