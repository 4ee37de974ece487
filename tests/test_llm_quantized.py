"""Quantised models through whole engines: by ranks, with expert servers, with streamed experts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import LLM
from moesaic.core.errors import ConfigError
from moesaic.kernels import table
from moesaic.testing import byte_tokenizer
from tests.models.test_quantized import CASES, FORMATS
from tests.models.test_quantized_refusals import mixed
from tests.support import pairs, quantizers, tiny_models
from tests.support.cluster_driver import Answer, cluster
from tests.support.thread_groups import group_of_threads
from tests.test_llm_families import DISK, LONGEST, answers, params, prompts
from tests.test_llm_offload import POLICIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_workers"),
    pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build"),
]
FORMS = ["fp8 blocks", "packed int4", "awq", "gptq v2, act order", "mxfp4"]


SERVED = [*((form, "lockstep") for form in FORMS), (FORMS[0], "async"), (FORMS[1], "barrier")]
NOW = [(FORMS[-1], "lockstep"), *SERVED[-2:]]
"""A server holds the bytes of every form, says models/test_quantized. The others are served in full tests."""


class Models(dict[str, Path]):
    """By format, and the answers of one process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[str, list[Answer]] = {}

    def __missing__(self, form: str) -> Path:
        model = tiny_models.build(*CASES["gpt-oss" if form == "mxfp4" else "qwen3"])
        source = tiny_models.save(model, self.root / f"source of {form}")
        path, plain = quantizers.quantize(source, self.root / form, FORMATS[form])
        byte_tokenizer(path)
        byte_tokenizer(plain)
        self[form] = path
        return path

    def wanted(self, form: str) -> list[Answer]:
        if form not in self.known:
            self.known[form] = answers(LLM(str(self[form]), threads=1, max_model_len=LONGEST))
        return self.known[form]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("quantised"))


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_the_dequantised_model(models: Models, form: str) -> None:
    plain = models[form].parent / "plain"
    found = answers(LLM(str(plain), threads=1, max_model_len=LONGEST))
    assert [tokens for tokens, _ in models.wanted(form)] == [tokens for tokens, _ in found]


@pytest.mark.parametrize("form", FORMS)
def test_chunks_and_prefixes_change_no_bit(models: Models, form: str) -> None:
    small = LLM(
        str(models[form]), threads=1, max_model_len=LONGEST, max_num_batched_tokens=11, max_num_seqs=5
    )
    assert answers(small) == models.wanted(form)
    assert answers(small) == models.wanted(form)  # from the prefix cache


@pytest.mark.parametrize(("form", "schedule"), pairs.some(SERVED, NOW))
def test_expert_servers_give_the_floats_of_one_process(models: Models, form: str, schedule: str) -> None:
    with cluster(str(models[form]), min_replicas=2, schedule=schedule, max_model_len=LONGEST) as served:
        served.submit(prompts(), params())
        assert served.finish() == models.wanted(form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("more", [{}, {"expert_tensor_parallel_size": 2}], ids=str)
def test_two_ranks_have_the_tokens_of_one(models: Models, form: str, more: dict[str, int]) -> None:
    settings = {"tensor_parallel_size": 2, "max_model_len": LONGEST, **more}
    with group_of_threads(str(models[form]), **settings) as (model, _, _):
        found = answers(model)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in models.wanted(form)]


STREAMED = ("some experts stay", "on demand, likely ones before", "two cores, in place")
"""Policies that are tried here in `make test`. test_llm_quantized_families.py tries others."""


def streamed() -> list[Any]:
    """Each policy, with formats in turn."""
    return [
        pytest.param(FORMS[turn % len(FORMS)], policy, marks=() if policy in STREAMED else pairs.REST)
        for turn, policy in enumerate(POLICIES)
    ]


@pytest.mark.parametrize(("form", "policy"), streamed())
def test_streamed_experts_give_the_floats_of_those_in_memory(models: Models, form: str, policy: str) -> None:
    offload = POLICIES[policy]
    settings = {"max_model_len": LONGEST, "max_num_seqs": offload.batch, "max_num_batched_tokens": 23}
    found = answers(LLM(str(models[form]), threads=1, offload=offload, **settings))
    assert found == models.wanted(form)


def test_streamed_experts_become_float32_where_kernels_cannot_read_them(models: Models) -> None:
    model = LLM(
        str(models["awq"]), max_model_len=LONGEST, kernels="reference", offload=DISK, max_num_seqs=DISK.batch
    )
    for (tokens, logprobs), (wanted, expected) in zip(answers(model), models.wanted("awq"), strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(expected, abs=1e-4)


OTHERS = {
    "a layer": (
        r"layers\.0\.mlp\.experts\.",
        None,
        "layer 1: got int4_g32; allowed: bfloat16, as",
    ),
    "an expert": (r"experts\.2\.", "int8 rows", "experts.2.gate_proj: an expert is stored as int8; allowed"),
    "a plain one": (
        r"1\.mlp\.experts\.2\.",
        None,
        "experts.2.gate_proj.weight: got BF16; allowed: int4_g32",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_streamed_experts_have_one_type(models: Models, tmp_path: Path, what: str) -> None:
    others, other, says = OTHERS[what]
    source = tiny_models.save(tiny_models.build(*CASES["qwen3"]), tmp_path / "source", torch.bfloat16)
    path = mixed(source, tmp_path, others, other)
    byte_tokenizer(path)
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        LLM(str(path), offload=DISK, max_num_seqs=DISK.batch)
    assert "\n" not in str(refused.value)
