"""Experts that the files do not have as the kernels read them, of a model larger than a GPU's memory.

They are quantised, compressed or in columns. Each is converted in RAM, then copied to its place there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.gpu.test_offload import CPU, EVEN, STAYS
from tests.models import test_quantized
from tests.support import gguf_files, model_configs, pairs, quantizers, tiny_models
from tests.support.gpu_graphs import graphs
from tests.support.gpu_sanitizer import sanitized
from tests.support.triton_kernels import IS_INTERPRETED, operations

from moesaic import LLM, SamplingParams
from moesaic.core.offload import Offload
from moesaic.models.compressing import compress
from moesaic.testing import byte_tokenizer

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles what it runs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
PROMPTS = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 3, 5)]
SOURCES = {
    "mxfp4": test_quantized.CASES["gpt-oss"],
    "columns": model_configs.CASES["gpt-oss"],
    "down in columns": model_configs.CASES["dbrx"],
    "halves in columns": model_configs.CASES["qwen3-vl"],
}
FORMS = (*test_quantized.FORMATS, "gguf", "compressed", "columns", "down in columns")
GGUF = {"blk.2.ffn_down": "Q8_0", "blk.2.": "Q4_1"}
"""Part of a tensor's name -> its type. All others are Q4_0."""
POLICIES = {
    "pages": replace(STAYS, static_experts=1),
    "pages, the CPU attends": replace(CPU, static_experts=1),
    "on demand": replace(STAYS, schedule="on-demand", static_experts=2, likely_experts=1, hot=True),
    "split": replace(STAYS, schedule="split", static_experts=2, prices=EVEN, hot=True),
    "in place": replace(CPU, schedule="in-place", static_experts=1),
}
Written = Callable[[str], Path]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The folder of a checkpoint by how its experts are stored."""
    known: dict[str, Path] = {}

    def path(form: str) -> Path:
        if form not in known:
            known[form] = written(form, tmp_path_factory.mktemp("model"))
        return known[form]

    return path


def written(form: str, folder: Path) -> Path:
    model = tiny_models.build(*SOURCES.get(form, test_quantized.CASES["qwen3"]))
    dtype = torch.bfloat16 if form == "compressed" else torch.float32
    source = tiny_models.save(model, folder / "source", dtype)
    byte_tokenizer(source)
    if form == "gguf":
        kinds = {**GGUF, "": "Q4_0"}
        of = lambda name: next(kind for part, kind in kinds.items() if part in name)  # noqa: E731
        return gguf_files.write(source, folder / form, of)[0]
    if form == "compressed":
        compress(source, folder / form, 1, lambda done, total: None)
        return folder / form
    if form in test_quantized.FORMATS:
        return quantizers.quantize(source, folder, test_quantized.FORMATS[form])[0]
    return source


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with np.errstate(all="ignore"), sanitized(), graphs():
        yield


def answers(folder: Path, kernels: str, offload: Offload | None = None) -> list[list[int]]:
    """Triton's interpreter takes seconds a step, so it gets one prompt and two new tokens."""
    prompts, new = (PROMPTS[1:2], 2) if kernels == "triton" else (PROMPTS, 5)
    settings: dict[str, Any] = {"kernels": kernels, "device": "cuda"}
    model = LLM(str(folder), threads=1, max_model_len=64, max_num_seqs=8, offload=offload, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    found = [one.outputs[0].token_ids for one in model.generate(prompts, params)]
    if offload is not None:
        assert sum(one.loaded_bytes for one in model.stats().experts.passes) > 0
    return found


KERNELS = ("triton", "reference")
TURNS = list(POLICIES)
CASES = [
    (form, TURNS[(number + 2 * turn) % len(TURNS)], kernels)
    for number, form in enumerate(FORMS)
    for turn, kernels in enumerate(KERNELS)
]
"""Each form with the kernels of both kinds. The policies take turns."""
NOW = [CASES[FORMS.index("packed int4") * 2], CASES[FORMS.index("columns") * 2 + 1]]


@pytest.mark.parametrize(("form", "policy", "kernels"), pairs.some(CASES, NOW))
def test_tokens_are_those_of_the_model_in_memory(
    stored: Written, form: str, policy: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Triton's kernels, quantised experts stay so on the device, and each product reads a page table.

    Those of GPTQ in another order of columns become float32 everywhere.
    """
    path, seen = stored(form), set[tuple[bool, torch.dtype]]()
    real = operations.OPERATIONS["experts"]

    def watched(weights: Any, *rest: Any) -> torch.Tensor:
        gate = weights.of(weights.held[0])[0]
        seen.add((weights.pages is not None, gate.dtype))
        computed: torch.Tensor = real(weights, *rest)
        return computed

    monkeypatch.setitem(operations.OPERATIONS, "experts", watched)
    found = answers(path, kernels, POLICIES[policy])
    packed = form == "gguf" or test_quantized.STORED.get(form, "float32") != "float32"
    if kernels == "triton":
        assert {paged for paged, _ in seen} == {True}
        assert {dtype is torch.uint8 for _, dtype in seen} == {packed}
    assert found == answers(path, kernels)
