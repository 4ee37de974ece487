from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from moesaic.core.weight_types import BLOCK_TYPES, QUANTIZATIONS
from moesaic.kernels.table import REFERENCE, Kernels, pick
from moesaic.kernels.weights import ExpertWeights
from moesaic.planning.hardware import products
from moesaic.planning.hardware.products import Rate, Sizes
from moesaic.planning.hardware.timing import Stopwatch

TINY = Sizes(hidden=64, width=32, matrices=4, rows=(1, 3, 8), most_rows=16, top_k=1)


def spied(kernels: Kernels, seen: list[tuple[Any, ...]]) -> Kernels:
    """Records what is computed."""

    def experts(
        weights: ExpertWeights,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = expert_ids.flatten().bincount().tolist()
        seen.append(("experts", tuple(hidden.shape), rows, weights.matrices_of(0)[0].dtype))
        return kernels.experts(weights, hidden, expert_ids, output)

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(("dense", tuple(rows.shape), weight.data_ptr(), weight.dtype))
        return kernels.linear(rows, weight)

    return replace(kernels, experts=experts, linear=linear)


def measured(kernels: Kernels, dtypes: list[torch.dtype], sizes: Sizes, beyond: int = 0) -> tuple[Rate, ...]:
    clock = iter(range(100_000))
    watch = Stopwatch(0.5, partial(next, clock))
    return products.measure_rates(kernels, dtypes, sizes, watch, lambda *_: None, min_bytes=beyond)


def test_every_expert_has_as_many_rows_and_every_matrix_is_used() -> None:
    seen: list[tuple[Any, ...]] = []
    measured(spied(pick("cpu", "auto"), seen), [torch.bfloat16], TINY)
    experts = [one[1:] for one in seen if one[0] == "experts"]
    assert experts == [
        ((4, 64), [1, 1, 1, 1], torch.bfloat16),
        ((12, 64), [3, 3, 3, 3], torch.bfloat16),
        ((16, 64), [8, 8], torch.bfloat16),
    ]
    dense = [one[1:] for one in seen if one[0] == "dense"]
    assert [shape for shape, _, _ in dense] == [(1, 64)] * 4 + [(3, 64)] * 4 + [(8, 64)] * 2
    assert len({address for _, address, _ in dense}) == 4


def test_a_row_goes_to_several_experts() -> None:
    seen: list[tuple[Any, ...]] = []
    measured(spied(pick("cpu", "auto"), seen), [torch.bfloat16], replace(TINY, top_k=3, matrices=5))
    experts = [one[1:3] for one in seen if one[0] == "experts"]
    assert experts == [
        ((2, 64), [2, 1, 1, 1, 1]),
        ((5, 64), [3, 3, 3, 3, 3]),
        ((14, 64), [9, 9, 8, 8, 8]),
    ], "of 5, 15 and 40 pairs, filled up to whole rows"
    seen.clear()
    measured(spied(pick("cpu", "auto"), seen), [torch.bfloat16], replace(TINY, top_k=8, rows=(4,)))
    assert seen[0][1:3] == ((4, 64), [4, 4, 4, 4]), "no row has an expert twice"


def test_overlap_is_read_off_few_rows() -> None:
    """Weights of 2 bytes are read at 1 byte/s, and the peak is 2 flops/s. So 2 rows compute for 2 s for each
    weight, which takes 2 s to read."""

    def found(seconds: float) -> float:
        rates = [Rate("dense", "bfloat16", 2, 4 / seconds), Rate("dense", "bfloat16", 1000, 2.0)]
        return products.compute_overlap([*rates, Rate("dense", "float32", 2, 9.0)], "bfloat16", 1.0)

    assert found(4.0) == pytest.approx(0.0, abs=1e-3)
    assert found(3.0) == pytest.approx(0.5, abs=1e-3)
    assert found(2.0) == pytest.approx(1.0, abs=1e-3)
    assert (found(9.0), found(1.0)) == (0.0, 1.0), "measured beyond both roofs"


def test_flops_over_seconds() -> None:
    found = measured(REFERENCE, [torch.float32, torch.bfloat16], TINY)
    assert len(found) == 2 * 2 * 3 and {one.dtype for one in found} == {"float32", "bfloat16"}
    rates = {(one.shape, one.rows): one.flops for one in found}
    assert rates["experts", 3] == 4 * 3 * 6 * 64 * 32, "gate, up and down, multiply and add, in one second"
    assert rates["dense", 3] == 4 * 3 * 2 * 64 * 64
    assert rates["experts", 8] == 2 * 8 * 6 * 64 * 32


def test_fewer_matrices_with_more_rows() -> None:
    sizes = Sizes()
    assert [sizes.count_matrices("dense", rows) for rows in sizes.rows] == [16, 16, 16, 16, 16, 16, 4, 1]
    assert [sizes.count_matrices("experts", rows) for rows in sizes.rows] == [16, 16, 16, 16, 16, 16, 16, 8]


def test_experts_are_compressed_where_the_kernels_compute_from_that() -> None:
    for kernels in (pick("cpu", "auto"), REFERENCE):
        seen: list[tuple[Any, ...]] = []
        measured(
            spied(kernels, seen), [torch.bfloat16, torch.float32], replace(TINY, packed_type="compressed")
        )
        stored = [one[3] for one in seen if one[0] == "experts"]
        narrow = torch.uint8 if kernels.can_use_quantized else torch.bfloat16
        assert stored == [narrow] * (len(stored) // 2) + [torch.float32] * (len(stored) // 2)
        assert {one[3] for one in seen if one[0] == "dense"} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("kind", [*QUANTIZATIONS, *BLOCK_TYPES, "q4_k+q6_k"])
def test_quantised_experts_are_measured_beside_the_others(kind: str) -> None:
    native = pick("cpu", "auto")
    seen: list[tuple[Any, ...]] = []
    sizes = replace(TINY, hidden=256, width=256, packed_type=kind)
    found = measured(spied(native, seen), [torch.float32], sizes)
    extra = [one for one in found if one.dtype == kind]
    assert [(one.shape, one.rows) for one in extra] == [
        ("experts", rows) for rows in TINY.rows
    ] * native.can_use_quantized
    assert len(found) - len(extra) == 6 and extra == list(found[6:])
    assert [one[3] for one in seen if one[0] == "experts"][3:] == [torch.uint8] * len(extra)
    assert len(measured(REFERENCE, [torch.float32], sizes)) == 6


def test_more_matrices_than_caches_hold() -> None:
    sizes = Sizes()  # 2048 x 2048, and 3 x 2048 x 768
    assert sizes.with_matrix_bytes(0, 2) == sizes.with_matrix_bytes(128 << 20, 2) == sizes
    assert (
        sizes.with_matrix_bytes(512 << 20, 2).matrices == 64
        and sizes.with_matrix_bytes(512 << 20, 4).matrices == 32
    )
    narrow = Sizes(hidden=1024, width=128)
    assert narrow.with_matrix_bytes(512 << 20, 2).matrices == math.ceil((512 << 20) / (2 * 3 * 1024 * 128))
    found = measured(REFERENCE, [torch.float32], TINY)
    more = measured(REFERENCE, [torch.float32], TINY, beyond=8 * 4 * 64 * 64)
    assert [new.flops / old.flops for new, old in zip(more, found, strict=True)] == [2, 1.25, 1, 2, 1.25, 1]


def test_progress_ends_at_all_of_it() -> None:
    shown: list[tuple[str, int, int]] = []
    watch = Stopwatch(1e-9)
    products.measure_rates(REFERENCE, [torch.float32], TINY, watch, lambda *step: shown.append(step))
    assert [done for _, done, _ in shown] == list(range(7)) and {total for _, _, total in shown} == {6}


def test_the_peak_and_the_share_of_long_products() -> None:
    found = [
        Rate("experts", "bfloat16", 64, 100.0),
        Rate("experts", "bfloat16", 2048, 75.0),
        Rate("dense", "bfloat16", 2048, 100.0),
        Rate("dense", "float32", 2048, 400.0),
    ]
    assert products.find_peak(found, "bfloat16") == 100
    assert products.prefill_efficiency(found, "bfloat16") == pytest.approx(0.857, abs=1e-3)
    assert products.prefill_efficiency(found, "float32") == 1
