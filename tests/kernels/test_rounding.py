"""Kernels that round or split rows that meet bf16 weights. All other results have the bits of avx512. Only a
name picks these kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels import test_bitwise as operations
from tests.support.cluster_driver import cluster
from tests.support.native_kernels import CACHED, same_bits, stored
from tests.support.paged_steps import cache, tokens
from tests.support.tiny_checkpoints import Written
from torch.nn import functional

from moesaic import LLM, SamplingParams
from moesaic.core.errors import ConfigError
from moesaic.core.offload import Offload
from moesaic.kernels import table
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Kernels

torch.set_num_threads(1)
BY_NAME = table.ROUNDING | table.SPLITTING
HERE = [name for name in table.instruction_sets() if name in BY_NAME]
NONE = pytest.param("", marks=pytest.mark.skip("no instructions for bf16 on this CPU"))
each = pytest.mark.parametrize("name", HERE or [NONE])
each_rounding = pytest.mark.parametrize("name", [name for name in HERE if name in table.ROUNDING] or [NONE])


@pytest.fixture(autouse=True)
def auto_again() -> Iterator[None]:
    yield
    table.pick("cpu").set_threads(1, False)


def attention(native: Kernels, dtype: torch.dtype) -> torch.Tensor:
    batch = AttentionBatch.build(tokens([1, 3], [300, 20], 16), 16)
    keys, values = cache(16, 2, 40, dtype), cache(16, 2, 40, dtype)
    return native.paged_attention(torch.randn(4, 4, 40), keys, values, batch, 0.3)


def everything_else(name: str, caches: Collection[torch.dtype] = CACHED) -> list[torch.Tensor]:
    """Products with float32 weights, operations that are no product with weights, attention over `caches`."""
    torch.manual_seed(0)
    native, rows = table.pick("cpu", name), torch.arange(operations.INPUTS)
    found = [
        compute(rows) for operation in operations.OPERATIONS for compute in operation(native, torch.float32)
    ]
    found += [compute(rows) for dtype in CACHED for compute in operations.store(native, dtype)]
    return found + [attention(native, dtype) for dtype in caches]


@each
def test_all_but_products_with_bf16_numbers_has_the_bits_of_avx512(name: str) -> None:
    """Attention over a bf16 cache is such a product where rows are rounded, but not where they are split."""
    caches = [dtype for dtype in CACHED if name not in table.ROUNDING or dtype is not torch.bfloat16]
    for found, wanted in zip(everything_else(name, caches), everything_else("avx512", caches), strict=True):
        assert same_bits(found, wanted)


@each_rounding
def test_rows_are_rounded_to_the_nearest_even(name: str) -> None:
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    rows = torch.cat([1 + torch.arange(-9.0, 9.0)[:, None] / 512, stored(200, 1) * 1e9])
    assert torch.equal(table.pick("cpu", name).linear(rows, one), rows.bfloat16().float())
    assert torch.equal(table.pick("cpu", "avx512").linear(rows, one), rows)


@each
def test_numbers_below_the_smallest_normal_one_count_as_zero(name: str) -> None:
    one, tiny = torch.ones(1, 1, dtype=torch.bfloat16), 2.0**-126
    linear = table.pick("cpu", name).linear
    rows = torch.tensor([[tiny], [0.999 * tiny], [-tiny / 2]])
    assert linear(rows, one).flatten().tolist() == [tiny, 0.0, 0.0]
    assert linear(torch.ones(1, 1), one * tiny / 2).item() == 0.0


@each
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_strange_numbers_stay_in_their_row(name: str, strange: float) -> None:
    rows, weight = stored(7, 70), stored(5, 70, dtype=torch.bfloat16)
    native = table.pick("cpu", name)
    wanted = native.linear(rows, weight)
    rows[3, 68] = strange
    found = native.linear(rows, weight)
    assert not found[3].isfinite().any()
    others = [0, 1, 2, 4, 5, 6]
    assert same_bits(found[others], wanted[others])


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_only_its_name_picks_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert table.pick("cpu").name != f"native ({name})"
    if name in HERE:
        assert table.pick("cpu", name).name == f"native ({name})"
    monkeypatch.setattr(table, "instruction_sets", lambda: ("avx512", "avx2", "portable"))
    with pytest.raises(ConfigError, match=f"got '{name}'; allowed: auto, avx512, avx2, portable, ref"):
        table.pick("cpu", name)


def test_what_linux_refuses_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ValueError(f"Linux refuses this process the registers of {name}")

    monkeypatch.setattr(table, "instruction_sets", lambda: ("avx512", "amx_bf16"))
    monkeypatch.setattr(table, "_native", SimpleNamespace(use=refuse))
    with pytest.raises(
        ConfigError, match="^--kernels: Linux refuses this process the registers of amx_bf16$"
    ):
        table.pick("cpu", "amx_bf16")


def in_tiles(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows [n, k] times weight [o, k] transposed, added up in the order of TDPBF16PS: [n, o], all float32."""
    short = -rows.shape[1] % 32
    rows, weight = (functional.pad(one.bfloat16().float(), (0, short)) for one in (rows, weight))
    sums = torch.zeros(len(rows), len(weight))
    for begin in range(0, rows.shape[1], 32):
        halves = []
        for parity in range(2):
            half = torch.zeros_like(sums)
            for i in range(begin + parity, begin + 32, 2):
                # The product of two bf16 numbers and its sum with a float32 one are exact here: one rounding.
                half = (half.double() + rows[:, None, i].double() * weight[None, :, i].double()).float()
            halves.append(half)
        sums = sums + (halves[0] + halves[1])
    return sums


@pytest.mark.skipif("amx_bf16" not in HERE, reason="no amx_bf16 on this CPU")
@pytest.mark.parametrize("width", [31, 33, 100])
def test_tiles_add_in_the_order_of_their_instruction(width: int) -> None:
    torch.manual_seed(0)
    whole = torch.randint(-64, 64, (2, 70, width)).float()  # few bits each: double adds them without rounding
    rows, weight = whole[0] * 2.0 ** torch.randint(0, 20, (70, 1)), whole[1].bfloat16()
    rows[:, ::3] /= 2**17
    found = table.pick("cpu", "amx_bf16").linear(rows, weight)
    assert same_bits(found, in_tiles(rows, weight.float()))
    assert not same_bits(found, (rows.double() @ weight.double().t()).float())


PROMPTS = [[1, 2, 3], [9, 8, 7, 6] * 9, [5] * 40, [4, 3] * 17]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)


def answers(path: Path, kernels: str, **settings: Any) -> list[tuple[list[int], list[float]]]:
    llm = LLM(str(path), threads=1, kernels=kernels, max_model_len=128, **settings)
    outputs = [result.outputs[0] for result in llm.generate(PROMPTS, GREEDY)]
    return [(one.token_ids, [entry.logprob for entry in one.logprobs or ()]) for one in outputs]


@pytest.mark.parametrize("name", [name for name in HERE if name != "amx_bf16x2"] or [NONE])
@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize(
    ("model", "cache"), [("qwen3-bias-dense-layers", "bfloat16"), ("deepseek-full", "float32")]
)
def test_clusters_and_models_in_pages_have_the_bits_of_one_process(
    name: str, model: str, cache: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = Written(tmp_path_factory.mktemp)[model]
    wanted = answers(path, name, kv_cache_dtype=cache)
    assert wanted != answers(path, "avx512", kv_cache_dtype=cache)
    paged = Offload(1 << 30, "cgopipe", micro_batch=2, micro_batches=2, prefill_rows=19)
    assert answers(path, name, kv_cache_dtype=cache, offload=paged, max_num_seqs=4) == wanted
    for settings in ({"attention_workers": 2}, {"schedule": "async", "max_num_batched_tokens": 16}):
        with cluster(str(path), kernels=name, kv_cache_dtype=cache, max_model_len=128, **settings) as served:
            served.submit(PROMPTS, [GREEDY] * len(PROMPTS))
            assert served.finish() == wanted
            servers = [one for one in served.supervisor.report().processes if one.role == "expert server"]
            assert {one.kernels for one in servers} == {f"native ({name})"}
