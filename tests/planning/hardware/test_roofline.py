from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from moesaic.commands import cli
from moesaic.core.weight_types import NATIVE_DTYPES
from moesaic.cost.hybrid import DeltaRule, HybridAttention, ShortConvolution
from moesaic.cost.ops import Work
from moesaic.cost.sizes import GroupedQuery, Latent, ModelSizes
from moesaic.kernels.table import BY_NAME, REFERENCE, instruction_sets, pick
from moesaic.planning.hardware import operations, roofline
from moesaic.planning.hardware.operations import Call, Sizes
from moesaic.planning.hardware.roofline import Roofs, Speed
from moesaic.planning.hardware.timing import Stopwatch

QUERIES = GroupedQuery(4, 2, 16)
MODELS = (
    ModelSizes("gqa", 2, 64, 96, QUERIES, 2, 8, 2, 32, dense_width=48),
    ModelSizes("mla", 2, 64, 96, Latent(4, 32, 16, 16, 16), 2, 8, 2, 32, shared_width=48),
    ModelSizes("mixed", 4, 64, 96, HybridAttention(QUERIES, 0.25, DeltaRule(2, 4, 16, 16, 4)), 4, 8, 2, 32),
    ModelSizes("short", 4, 64, 96, HybridAttention(QUERIES, 0.25, ShortConvolution(64, 3)), 4, 8, 2, 32),
)


def sizes_of(model: ModelSizes, **changed: Any) -> Sizes:
    sizes = Sizes(model, ("bfloat16",), "bfloat16", "float32", (1, 5, 70), 33, min_weight_bytes=0)
    return replace(sizes, **changed)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("cache", ["float32", "int8"])
def test_every_operation_runs_and_is_counted(model: ModelSizes, cache: str) -> None:
    sizes = sizes_of(model, cache=cache, types=("int4", "bfloat16"))
    with torch.inference_mode():
        calls = list(operations.list_calls(pick("cpu"), sizes))
        for call in calls:
            call.run()
    names = operations.operation_names(model)
    assert len(calls) == len(sizes.rows) * (len(names) + len(sizes.types))
    assert [one.operation for one in calls[:: len(sizes.rows)]] == [*names, "experts", "experts"]
    assert all(one.work.flops > 0 and one.work.bytes > 0 for one in calls)


def test_what_is_counted() -> None:
    calls = list(operations.list_calls(REFERENCE, sizes_of(MODELS[0])))
    work = {(one.operation, one.rows): (one.work.flops, one.work.bytes, one.context) for one in calls}
    queries = 64 * (4 + 2 + 2) * 16
    assert work["query, key, value", 5] == (2 * 5 * queries, 2 * queries, None)
    assert work["gate", 1] == (2 * 8 * 64, 4 * 8 * 64, None)
    assert work["dense MLP", 70] == (2 * 70 * 3 * 64 * 48, 2 * 3 * 64 * 48, None)
    cached = 2 * 2 * 16
    assert work["attention", 5] == (5 * 33 * 4 * 4 * 16, 5 * 33 * cached * 4, 33)
    assert work["attention", 70] == (70 * 71 / 2 * 4 * 4 * 16, 70 * cached * 4, 70), "a prompt of 70 tokens"
    expert = 3 * 64 * 32
    assert work["experts", 1] == (2 * 2 * expert, 2 * expert * 2, None)
    assert work["experts", 70] == (2 * 70 * 2 * expert, 8 * expert * 2, None), (
        "seventy rows choose all experts"
    )


def test_experts_of_every_type_compute() -> None:
    model = replace(MODELS[0], hidden=256, expert_width=256)  # rows of whole blocks of every type
    rows, ids = torch.randn(3, 256), torch.tensor([[0, 3], [1, 2], [3, 0]])
    for stored in (*NATIVE_DTYPES, "int4_offset+int8_16", "q4_k+q6_k"):
        weights = operations.build_experts(model, stored, 4)
        answer = pick("cpu").experts(weights, rows, ids)
        assert answer.shape == (3, 2, 256) and answer.isfinite().all() and answer.any(), stored
        size = sum(part[0].nbytes for part in weights.parts if part[0] is not None)
        assert size == operations._expert_bytes(model, stored), stored


def test_a_call_takes_other_weights_than_the_one_before() -> None:
    seen: list[int] = []

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(weight.data_ptr())
        return rows

    kernels = replace(REFERENCE, linear=linear)
    call = next(operations.list_calls(kernels, sizes_of(MODELS[0], min_weight_bytes=64 * 128 * 2)))
    for _ in range(3):
        call.run()
    assert len(set(seen)) == 2, "two matrices in turn are more than `min_weight_bytes`"
    assert seen[0] == seen[2]


def test_a_share_is_that_of_the_roof_that_bounds() -> None:
    roofs = Roofs(bandwidth=10, flops=100)
    few, many = Work(flops=50, weights=20), Work(flops=400, weights=20)
    assert (roofs.seconds(few), roofs.bound(few)) == (2, "memory")
    assert (roofs.seconds(many), roofs.bound(many)) == (4, "compute")
    call = Call("", "", 1, None, many, int)
    assert Speed(call, 8.0).share(roofs) == 0.5
    assert roofs.best(Roofs(20, 50)) == Roofs(20, 100)
    both = Roofs(10, 100, own_flops=400).best(Roofs(5, 200, own_flops=300))
    assert both == Roofs(10, 200, own_flops=400)
    assert (
        Speed(call, 8.0).share(both) == 0.25 and Speed(call, 8.0, has_own_products=True).share(both) == 0.25
    )
    assert Speed(call, 8.0, has_own_products=True).bound(Roofs(10, 100, own_flops=400)) == "memory"


def test_some_types_are_multiplied_in_products_of_the_set() -> None:
    def own(name: str, stored: str, operation: str = "experts") -> bool:
        return roofline.has_own_products(name, Call(operation, stored, 1, None, Work(1, 1), int))

    assert own("avx512_int8", "int4_offset") and not own("avx512_int8", "bfloat16")
    assert not own("avx512_int8", "int8", "attention"), "over an int8 cache it computes in float32"
    assert own("avx512_bf16", "bfloat16") and own("avx512_bf16", "bfloat16", "attention")
    assert own("amx_bf16x3", "bfloat16") and not own("amx_bf16x3", "bfloat16", "attention")
    assert not own("avx512", "bfloat16")


@pytest.mark.parametrize("name", instruction_sets())
def test_products_in_registers_are_counted(name: str) -> None:
    kernels = pick("cpu", name)
    kernels.set_threads(2, False)
    assert kernels.peak is not None
    for floats in (True, False):
        one, two = kernels.peak(1, floats), kernels.peak(2, floats)
        assert two == 2 * one > 0 and one % 2 == 0, "each of two threads has as many"
    assert name in BY_NAME or kernels.peak(1, True) == kernels.peak(1, False)
    pick("cpu").set_threads(1, False)


def test_measuring_counts_all_figures_and_none_too_many() -> None:
    shown: list[tuple[int, int]] = []
    clock = partial(next, iter(range(1_000_000)))
    found = roofline.measure(
        pick("cpu"),
        "auto",
        sizes_of(MODELS[2]),
        Stopwatch(0.5, clock),
        lambda _, done, total: shown.append((done, total)),
    )
    assert [done for done, _ in shown] == [*range(len(found) + 1)]
    assert {total for _, total in shown} == {len(found)}
    assert all(math.isfinite(one.seconds) for one in found)


LINE = ["bench", "kernels", "demo", "--rows", "1", "70", "--context", "40", "--seconds", "0.001"]


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "SIZE", 64)
    monkeypatch.setattr("moesaic.planning.hardware.roofline.READ_BYTES", 1 << 20)
    monkeypatch.setattr("moesaic.planning.hardware.memory.choose_matrix_bytes", lambda free: 1 << 16)
    assert cli.main([*LINE, "--json", "--threads", "1", "--types", "mxfp4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["threads"] == 1 and found["roofs"]["gb_per_s"] > 0
    assert {(one["operation"], one["type"]) for one in found["operations"]} >= {("experts", "mxfp4")}
    assert {one["rows"] for one in found["operations"]} == {1, 70}
    assert cli.main(LINE) == 0
    printed = capsys.readouterr().out
    assert "One layer of demo" in printed and "experts" in printed and "int4" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no/such"], "model: got 'no/such'"),
        (["--rows", "0"], "--rows: got 0"),
        (["--types", "int3"], "--types: got 'int3'; allowed: bfloat16, float32"),
        (["--types", "int8", "--kernels", "reference"], "--types: got 'int8'; allowed: bfloat16, float32"),
        (["--context", "0"], "--context: got 0"),
        pytest.param(
            *(["--device", "cuda"], "--device: got 'cuda'; allowed: cpu (torch sees no GPU)"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
    ],
)
def test_bad_settings_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels", *words]) == 2
    assert said in capsys.readouterr().err
