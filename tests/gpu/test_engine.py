"""The engine on the sanitizer's device: nothing is mixed, and answers are those of the CPU, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.support import gpu_cases, model_configs, pairs, prediction, tiny_models
from tests.support.gpu_sanitizer import NAME, sanitized

from moesaic import LLM, RequestOutput, SamplingParams
from moesaic.kernels import batch
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.compressing import compress
from moesaic.models.kvcache import paged_kv
from moesaic.testing import byte_tokenizer

Written = Callable[[str], Path]
QUICK = {"mixtral-window"}
"""The rest of the models is slow."""


def on_cpu(path: Path, **settings: Any) -> LLM:
    """With weights as well aligned as a device's: last digits of a CPU's products depend on that."""
    settings = settings | {"device": "cpu", "kernels": "reference", "threads": 1, "mmap": False}
    return LLM(str(path), **settings)


def on_device(path: Path, new: int = gpu_cases.NEW, **settings: Any) -> tuple[LLM, list[list[RequestOutput]]]:
    with sanitized():
        llm = LLM(str(path), device="cuda", threads=1, **settings)
        return llm, gpu_cases.answers(llm, new)


def same(found: list[list[RequestOutput]], llm: LLM, new: int = gpu_cases.NEW) -> bool:
    """Tokens and every log-probability."""
    return found == gpu_cases.answers(llm, new)


@pytest.mark.parametrize(
    "model",
    [pytest.param(model, marks=() if model in QUICK else pytest.mark.slow) for model in gpu_cases.MODELS],
)
def test_first_tokens_are_those_of_the_cpu(written: Written, model: str) -> None:
    path = written(model)
    llm, found = on_device(path, new=3, max_num_batched_tokens=40, max_num_seqs=8)
    assert (llm.info.device, llm.info.kernels) == (NAME, "reference (torch)")
    assert same(found, on_cpu(path, max_num_batched_tokens=40, max_num_seqs=8), new=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek3-full", "glm4-norm-bias-groups", "gpt-oss"])
def test_first_tokens_of_other_families_are_those_of_the_cpu(tmp_path: Path, name: str) -> None:
    tiny_models.save(tiny_models.build(*model_configs.CASES[name]), tmp_path)
    byte_tokenizer(tmp_path)
    _, found = on_device(tmp_path, new=3, max_num_batched_tokens=40, max_num_seqs=8)
    assert same(found, on_cpu(tmp_path, max_num_batched_tokens=40, max_num_seqs=8), new=3)


@pytest.mark.slow
def test_compressed_experts_are_decompressed(tmp_path: Path) -> None:
    stored, compressed = tmp_path / "stored", tmp_path / "compressed"
    stored.mkdir()
    gpu_cases.write("mixtral-window", stored, torch.bfloat16)
    compress(stored, compressed, 1, lambda done, total: None)
    assert on_device(compressed, new=3)[1] == on_device(stored, new=3)[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", prediction.KINDS)
def test_the_layer_that_drafts_tokens_is_on_the_device(tmp_path: Path, kind: str) -> None:
    path = prediction.save(kind, tmp_path / kind, strength=0.004)
    drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}, "max_num_seqs": 8}
    llm, found = on_device(path, new=6, **drafting)
    assert gpu_cases.tokens(found) == gpu_cases.tokens(gpu_cases.answers(on_cpu(path), 6))
    assert llm.stats().speculation.accepted_tokens > 0


EVERY = list(itertools.product(gpu_cases.MODELS, gpu_cases.SETTINGS))
SETTINGS = list(gpu_cases.SETTINGS)
TURNS = [(model, SETTINGS[number % len(SETTINGS)]) for number, model in enumerate(gpu_cases.MODELS)]
"""The settings take turns."""


@pytest.mark.parametrize(("model", "setting"), pairs.some(EVERY, TURNS))
def test_answers_are_those_of_the_cpu(written: Written, model: str, setting: str) -> None:
    path, settings = written(model), gpu_cases.SETTINGS[setting]
    if setting == "blocks run out":
        settings = settings | {"kv_cache_memory": gpu_cases.one_request(path)}
    llm, found = on_device(path, new=8, **settings)
    assert same(found, on_cpu(path, **settings), new=8)
    stats = llm.stats()
    assert (stats.preemptions > 0) == (setting == "blocks run out")
    assert (stats.blocks.prefix_hits > 0) == settings.get("enable_prefix_caching", True)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["auto", "float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize(
    ("model", "dtype"), [("qwen3-bias-dense-layers", "bfloat16"), ("deepseek-full", "float16")]
)
def test_narrow_weights_and_caches(written: Written, model: str, dtype: str, cache: str) -> None:
    llm, found = on_device(written(model), new=4, dtype=dtype, kv_cache_dtype=cache)
    stored = dtype if cache == "auto" else cache
    assert (llm.info.dtype, llm.info.kv_dtype) == (dtype, stored), "auto: the type of the weights"
    assert same(found, on_cpu(written(model), dtype=dtype, kv_cache_dtype=stored), new=4)


def test_a_gpu_keeps_the_types_of_the_checkpoint(tmp_path: Path) -> None:
    gpu_cases.write("mixtral-window", tmp_path, torch.float16)
    with sanitized():
        info = LLM(str(tmp_path), threads=1).info
    assert (info.device, info.dtype, info.kv_dtype) == (NAME, "float16", "float16"), "device auto takes it"


def test_the_experts_that_rows_choose_are_recorded(written: Written) -> None:
    def recorded(**settings: Any) -> npt.NDArray[Any]:
        rows: list[npt.NDArray[Any]] = []
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        settings |= {"threads": 1, "kernels": "reference", "routing": rows.append}
        LLM(str(written("deepseek-full")), **settings).generate(gpu_cases.prompts()[:3], params)
        return np.concatenate(rows)

    with sanitized():
        found = recorded(device="cuda")
    assert len(found) > 32 and (found == recorded(device="cpu")).all()


def _left_behind(change: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *given, **named: change(*given, **named).cpu()


CPU = torch.device("cpu")
paged_zeros = paged_kv.zeros
FORGOTTEN: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "blocks and slots": (batch, "_move", _left_behind(batch._move)),
    "the cache": (
        paged_kv,
        "zeros",
        lambda shape, dtype, device, at_once: paged_zeros(shape, dtype, CPU, at_once),
    ),
    "the weights": (Checkpoint, "tensor", _left_behind(Checkpoint.tensor)),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_is_left_on_the_cpu_is_found(
    written: Written, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*FORGOTTEN[what])
    with pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
        on_device(written("mixtral-window"))
