"""A model larger than the memory of a GPU with Triton's kernels, on the sanitizer's device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.gpu.test_offload import BESIDE, CPU, EVEN, STAYS
from tests.support import gpu_cases, model_configs, pairs, tiny_models
from tests.support.gpu_graphs import graphs
from tests.support.gpu_sanitizer import sanitized
from tests.support.triton_kernels import IS_INTERPRETED, operations

from moesaic import LLM, SamplingParams
from moesaic.core.offload import Offload

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles what it runs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
PROMPTS = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 3, 5)]
POLICIES = {
    "split": replace(STAYS, schedule="split", static_experts=2, prices=EVEN, hot=True),
    "hot experts": replace(STAYS, schedule="on-demand", static_experts=3, likely_experts=1, hot=True),
    "in place": replace(CPU, schedule="in-place", static_experts=1),
    "pages": replace(STAYS, static_experts=1),
    "pages, the cache moves": replace(BESIDE, fast_residual=False),
}
"""The first is in `make test`, the others are left to `make full`."""


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with np.errstate(all="ignore"), sanitized(), graphs():
        yield


def answers(folder: Path, offload: Offload | None = None, **settings: Any) -> tuple[LLM, list[list[int]]]:
    model = LLM(str(folder), threads=1, max_model_len=64, max_num_seqs=8, offload=offload, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return model, [one.outputs[0].token_ids for one in model.generate(PROMPTS, params)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [pytest.param(one, marks=() if one == "split" else pairs.REST) for one in POLICIES]
)
def test_tokens_are_those_of_the_model_in_memory(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_cases.write("mixtral-window", tmp_path)
    tables: list[bool] = []
    real = operations.OPERATIONS["experts"]

    def seen(weights: Any, *rest: Any) -> torch.Tensor:
        tables.append(weights.pages is not None)
        answers: torch.Tensor = real(weights, *rest)
        return answers

    monkeypatch.setitem(operations.OPERATIONS, "experts", seen)
    model, found = answers(tmp_path, POLICIES[policy], kernels="triton", device="cuda")
    assert found == answers(tmp_path, kernels="reference", device="cpu")[1]
    paged = POLICIES[policy].schedule != "cgopipe"
    assert tables and set(tables) == {paged}, "each product reads the page table, where there is one"
    if policy == "split":
        steps = [one for one in model.stats().experts.passes if not one.prefill]
        assert steps and all(one.busy["slow"] > 0 and one.loaded_bytes > 0 for one in steps)
    if POLICIES[policy].hot:
        residency = model.stats().experts.residency
        assert residency.exchanges > 0 and residency.hits > 0
