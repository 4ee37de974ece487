"""avx512_bf16 rounds rows that meet bf16 weights; all else has the bits of avx512. Only its name picks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cluster.driven import cluster
from tests.kernels import test_bitwise as operations
from tests.kernels.native import CACHED, same_bits, stored
from tests.kernels.paged import cache, tokens
from tests.models.written import Written

from moesaic import LLM, SamplingParams
from moesaic.core.errors import ConfigError
from moesaic.core.offload import Offload
from moesaic.kernels import table
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Kernels

torch.set_num_threads(1)
ROUNDING = "avx512_bf16"
needs_it = pytest.mark.skipif(ROUNDING not in table.instruction_sets(), reason=f"no {ROUNDING} on this CPU")


@pytest.fixture(autouse=True)
def auto_again() -> Iterator[None]:
    yield
    table.pick("cpu").set_threads(1, False)


def attention(native: Kernels, dtype: torch.dtype) -> torch.Tensor:
    batch = AttentionBatch.build(tokens([1, 3], [300, 20], 16), 16)
    keys, values = cache(16, 2, 40, dtype), cache(16, 2, 40, dtype)
    return native.paged_attention(torch.randn(4, 4, 40), keys, values, batch, 0.3)


def everything_else(name: str) -> list[torch.Tensor]:
    """Products with float32 weights, and what is no product with weights."""
    torch.manual_seed(0)
    native, rows = table.pick("cpu", name), torch.arange(operations.INPUTS)
    found = [
        compute(rows) for operation in operations.OPERATIONS for compute in operation(native, torch.float32)
    ]
    found += [compute(rows) for dtype in CACHED for compute in operations.store(native, dtype)]
    return found + [attention(native, dtype) for dtype in CACHED]


@needs_it
def test_all_but_products_with_bf16_weights_has_the_bits_of_avx512() -> None:
    for found, wanted in zip(everything_else(ROUNDING), everything_else("avx512"), strict=True):
        assert same_bits(found, wanted)


@needs_it
def test_rows_are_rounded_to_the_nearest_even() -> None:
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    rows = torch.cat([1 + torch.arange(-9.0, 9.0)[:, None] / 512, stored(200, 1) * 1e9])
    assert torch.equal(table.pick("cpu", ROUNDING).linear(rows, one), rows.bfloat16().float())
    assert torch.equal(table.pick("cpu", "avx512").linear(rows, one), rows)


@needs_it
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_strange_numbers_stay_in_their_row(strange: float) -> None:
    rows, weight = stored(7, 70), stored(5, 70, dtype=torch.bfloat16)
    native = table.pick("cpu", ROUNDING)
    wanted = native.linear(rows, weight)
    rows[3, 68] = strange
    found = native.linear(rows, weight)
    assert not found[3].isfinite().any()
    others = [0, 1, 2, 4, 5, 6]
    assert same_bits(found[others], wanted[others])


def test_only_its_name_picks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert table.pick("cpu").name not in {f"native ({name})" for name in table.ROUNDING}
    if ROUNDING in table.instruction_sets():
        assert table.pick("cpu", ROUNDING).name == f"native ({ROUNDING})"
    monkeypatch.setattr(table, "instruction_sets", lambda: ("avx512", "avx2", "portable"))
    with pytest.raises(ConfigError, match="got 'avx512_bf16'; allowed: auto, avx512, avx2, portable, ref"):
        table.pick("cpu", ROUNDING)


PROMPTS = [[1, 2, 3], [9, 8, 7, 6] * 9, [5] * 40, [4, 3] * 17]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)


def answers(path: Path, kernels: str, **settings: Any) -> list[tuple[list[int], list[float]]]:
    llm = LLM(str(path), threads=1, kernels=kernels, max_model_len=128, **settings)
    outputs = [result.outputs[0] for result in llm.generate(PROMPTS, GREEDY)]
    return [(one.token_ids, [entry.logprob for entry in one.logprobs or ()]) for one in outputs]


@needs_it
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-bias-dense-layers", "deepseek-full"])
def test_clusters_and_models_in_pages_have_the_bits_of_one_process(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = Written(tmp_path_factory.mktemp)[name]
    wanted = answers(path, ROUNDING)
    assert wanted != answers(path, "avx512")
    paged = Offload(1 << 30, "cgopipe", micro_batch=2, micro_batches=2, prefill_rows=19)
    assert answers(path, ROUNDING, offload=paged, max_num_seqs=4) == wanted
    for settings in ({"attention_workers": 2}, {"schedule": "async", "max_num_batched_tokens": 16}):
        with cluster(str(path), kernels=ROUNDING, max_model_len=128, **settings) as served:
            served.submit(PROMPTS, [GREEDY] * len(PROMPTS))
            assert served.finish() == wanted
            servers = [one for one in served.supervisor.report().processes if one.role == "expert server"]
            assert {one.kernels for one in servers} == {f"native ({ROUNDING})"}
