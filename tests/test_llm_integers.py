"""Integer products through whole engines: the tokens of the slow products, and the same bits in each mode."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import LLM
from moesaic.core.errors import ConfigError
from moesaic.kernels import table
from moesaic.testing import byte_tokenizer
from tests.models.test_quantized import CASES, FORMATS
from tests.support import integer_products, pairs, quantizers, tiny_models
from tests.support.cluster_driver import Answer, cluster
from tests.support.thread_groups import group_of_threads
from tests.test_llm_families import LONGEST, answers, params, prompts
from tests.test_llm_offload import POLICIES

SETS = [name for name in table.instruction_sets() if name in table.INTEGER]
OTHERS = ("amx_int8", "avx2_vnni_int8")
"""Their bits are those of avx512_int8 and avx2_int8, as tests/kernels/test_integer_sets.py checks."""
pytestmark = [
    pytest.mark.usefixtures("quick_workers"),
    pytest.mark.skipif(not SETS, reason="no integer kernels for this CPU"),
]
FORMS = ["int8 rows", "packed int4", "awq"]
"""The stored types int8, int4 and int4_offset."""
EVERY = [(form, name) for form in FORMS for name in SETS]
OTHERS_HERE = [name for name in SETS if name in OTHERS]
FEW = [(form, name) for form, name in EVERY if name not in OTHERS]


QWEN3 = (CASES["qwen3"][0], {**CASES["qwen3"][1], "num_attention_heads": 8})
"""Two ranks have whole groups of 32 columns of its output projection."""


class Models(dict[str, Path]):
    """By format, and the answers of one process with each kernels."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[tuple[str, str], list[Answer]] = {}

    def __missing__(self, form: str) -> Path:
        source = tiny_models.save(tiny_models.build(*QWEN3), self.root / f"source of {form}")
        self[form], _ = quantizers.quantize(source, self.root / form, FORMATS[form])
        byte_tokenizer(self[form])
        return self[form]

    def wanted(self, form: str, name: str) -> list[Answer]:
        if (form, name) not in self.known:
            self.known[form, name] = answers(
                LLM(str(self[form]), threads=1, kernels=name, max_model_len=LONGEST)
            )
        return self.known[form, name]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("integers"))


@pytest.fixture(autouse=True)
def auto_again() -> Iterator[None]:
    yield
    table.pick("cpu").set_threads(1, False)


@pytest.mark.parametrize(("form", "name"), pairs.some(EVERY, FEW))
def test_tokens_are_those_of_the_slow_products(
    models: Models, form: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, base = models.wanted(form, name), table.INTEGER[name]
    assert wanted != models.wanted(form, base)
    for name in ("experts", "gated_mlp"):
        monkeypatch.setattr(table.ops, name, partial(getattr(integer_products, name), base))
    for name in ("linear", "linears"):
        monkeypatch.setattr(table.ops, name, getattr(integer_products, name))
    slow = LLM(str(models[form]), threads=1, kernels=base, enforce_eager=True, max_model_len=LONGEST)
    assert answers(slow) == wanted


@pytest.mark.parametrize(("form", "name"), pairs.some(EVERY, [*FEW, *zip(FORMS, OTHERS_HERE, strict=False)]))
def test_chunks_and_prefixes_change_no_bit(models: Models, form: str, name: str) -> None:
    settings = {"max_model_len": LONGEST, "max_num_batched_tokens": 11, "max_num_seqs": 5}
    small = LLM(str(models[form]), threads=2, kernels=name, **settings)
    assert answers(small) == models.wanted(form, name)
    assert answers(small) == models.wanted(form, name)  # from the prefix cache


SERVED = [(form, name, way) for form, name in EVERY for way in ("lockstep", "async", "barrier")]
NOW = [(FORMS[0], SETS[0], "async"), (FORMS[2], SETS[-1], "lockstep")] if SETS else []


@pytest.mark.parametrize(("form", "name", "schedule"), pairs.some(SERVED, NOW))
def test_expert_servers_give_the_floats_of_one_process(
    models: Models, form: str, name: str, schedule: str
) -> None:
    with cluster(str(models[form]), kernels=name, schedule=schedule, max_model_len=LONGEST) as served:
        served.submit(prompts(), params())
        assert served.finish() == models.wanted(form, name)
        servers = [one for one in served.supervisor.report().processes if one.role == "expert server"]
        assert {one.kernels for one in servers} == {f"native ({name})"}


@pytest.mark.parametrize(("form", "name"), pairs.some(FEW, FEW[:1] + FEW[-1:]))
def test_two_ranks_begin_as_one_process_and_have_the_same_bits_in_chunks(
    models: Models, form: str, name: str
) -> None:
    """Ranks add in another order. So later numbers may round to another integer."""
    settings = {"tensor_parallel_size": 2, "max_model_len": LONGEST, "kernels": name}
    with group_of_threads(str(models[form]), **settings) as (model, _, _):
        found = answers(model)
    for (tokens, logprobs), (wanted, theirs) in zip(found, models.wanted(form, name), strict=True):
        assert tokens[0] == wanted[0] and logprobs[0] == pytest.approx(theirs[0], abs=0.05)
    small = {"max_num_batched_tokens": 11, "max_num_seqs": 5}
    with group_of_threads(str(models[form]), **settings, **small) as (model, _, _):
        assert answers(model) == found


STREAMED = [(*EVERY[turn % len(EVERY)], policy) for turn, policy in enumerate(POLICIES)] if EVERY else []
STREAMED_NOW = [case for case in STREAMED if case[2] in ("pages", "some experts stay", "on demand")]


@pytest.mark.parametrize(("form", "name", "policy"), pairs.some(STREAMED, STREAMED_NOW))
def test_streamed_experts_give_the_floats_of_those_in_memory(
    models: Models, form: str, name: str, policy: str
) -> None:
    offload = POLICIES[policy]
    settings: dict[str, Any] = {"max_num_seqs": offload.batch, "max_num_batched_tokens": 23}
    model = LLM(
        str(models[form]), threads=1, kernels=name, max_model_len=LONGEST, offload=offload, **settings
    )
    assert answers(model) == models.wanted(form, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checkpoint_without_integers_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tiny_models.save(tiny_models.build(*CASES["qwen3"]), tmp_path / "plain", dtype)
    byte_tokenizer(path)
    kind = str(dtype).removeprefix("torch.")
    message = (
        rf"^--kernels: got '{SETS[0]}'; allowed: kernels that round nothing to int8, as .* has "
        rf"routed experts in {kind}$"
    )
    with pytest.raises(ConfigError, match=message):
        LLM(str(path), kernels=SETS[0])


def test_ranks_that_share_experts_are_refused(models: Models) -> None:
    settings = {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 2, "kernels": SETS[0]}
    message = r"--expert-tensor-parallel-size: got 2; allowed: 1 with native \(\w+\) kernels"
    ranks = group_of_threads(str(models[FORMS[0]]), max_model_len=LONGEST, **settings)
    with pytest.raises((ConfigError, AssertionError), match=message), ranks:
        pass


def test_ranks_that_would_round_other_numbers_together_are_refused(models: Models) -> None:
    """Eight ranks have one head of 16 numbers each."""
    settings = {"tensor_parallel_size": 8, "kernels": SETS[0]}
    message = (
        r"--tensor-parallel-size: got 8; allowed: ranks with whole groups of 32 columns of "
        r"model.layers.0.self_attn.o_proj with native \(\w+\) kernels"
    )
    ranks = group_of_threads(str(models[FORMS[0]]), max_model_len=LONGEST, **settings)
    with pytest.raises((ConfigError, AssertionError), match=message), ranks:
        pass
