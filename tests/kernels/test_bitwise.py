"""A row has the same bits alone and together with others, at any position, with any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.support.native_kernels import CACHED, STORED, same_bits, stored

from moesaic.kernels.cache import stored_width
from moesaic.kernels.gating import Gating
from moesaic.kernels.table import Kernels
from moesaic.kernels.weights import ExpertWeights

torch.set_num_threads(1)
THREADS = (1, 2, 3, 5)
COUNTS = (2, 3, 4, 5, 7, 8, 13, 25, 49, 70, 400)
"""Numbers of rows that are computed together: around every tile size, and more than one task takes."""
INPUTS = 70

Compute = Callable[[torch.Tensor], torch.Tensor]
"""A function from indices [n] of inputs to their answers [n, ...]."""


def linear(native: Kernels, dtype: torch.dtype) -> Iterator[Compute]:
    for columns, width in ((150, 33), (70, 1030), (3, 2100), (200, 64)):
        rows, weight, bias = stored(INPUTS, width), stored(columns, width, dtype=dtype), stored(columns)
        yield lambda some, rows=rows, weight=weight, bias=bias: native.linear(rows[some], weight, bias)


def linears(native: Kernels, dtype: torch.dtype) -> Iterator[Compute]:
    rows, weights = stored(INPUTS, 100), [stored(columns, 100, dtype=dtype) for columns in (130, 9, 40)]
    yield lambda some: torch.cat(native.linears(rows[some], weights, [None] * 3), dim=1)


def head_linear(native: Kernels, dtype: torch.dtype) -> Iterator[Compute]:
    rows = stored(INPUTS, 3, 70)
    by_columns, by_inner = stored(3, 70, 90, dtype=dtype), stored(3, 90, 70, dtype=dtype)
    yield lambda some: native.head_linear(rows[some], by_columns)
    yield lambda some: native.head_linear(rows[some], by_inner.transpose(1, 2))


def gated_mlp(native: Kernels, dtype: torch.dtype) -> Iterator[Compute]:
    rows, down = stored(INPUTS, 200), stored(200, 150, dtype=dtype)
    gate, up = (stored(150, 200, dtype=dtype, spread=0.1) for _ in range(2))
    yield lambda some: native.gated_mlp(rows[some], gate, up, down)


def experts(native: Kernels, dtype: torch.dtype) -> Iterator[Compute]:
    # Of many experts the inner rows of later ones take the room of earlier ones.
    for number, hidden, width in ((6, 140, 80), (40, 33, 24)):
        gate, up, down = (
            tuple(stored(*shape, dtype=dtype, spread=0.1) for _ in range(number))
            for shape in ((width, hidden), (width, hidden), (hidden, width))
        )
        table, rows = ExpertWeights(gate, up, down), stored(INPUTS, hidden)
        drawn = torch.stack([torch.randperm(number)[:3] for _ in range(INPUTS)])
        skewed = torch.where(torch.rand(INPUTS, 3) < 0.8, 4, drawn)
        for ids in (drawn, skewed):
            yield lambda some, t=table, r=rows, ids=ids: native.experts(t, r[some], ids[some])


def norms(native: Kernels, dtype: torch.dtype) -> Iterator[Compute]:
    for width in (24, 33, 2100):
        rows, added, weight = stored(INPUTS, width), stored(INPUTS, width), stored(width)
        yield lambda some, rows=rows, weight=weight: native.rms_norm(rows[some], weight, 1e-6)
        yield lambda some, rows=rows, added=added, weight=weight: torch.cat(
            native.add_norm(rows[some], added[some], weight, 1e-6)
        ).view(2, len(some), -1).transpose(0, 1)  # fmt: skip


def rope(native: Kernels, dtype: torch.dtype) -> Iterator[Compute]:
    angles, places = torch.randn(500, 33), torch.randint(500, (INPUTS,))
    rows, norm = stored(INPUTS, 30, 66), stored(66)
    for interleaved in (False, True):
        for weight in (None, norm):
            yield lambda some, i=interleaved, w=weight: native.rope(
                rows[some], angles.cos(), angles.sin(), places[some], i, w, 1e-6
            )


def gate(native: Kernels, dtype: torch.dtype) -> Iterator[Compute]:
    for count, groups, kept in ((64, 1, 1), (60, 6, 3)):
        rows, weight = stored(INPUTS, 1100), stored(count, 1100, spread=0.03)

        def choose(some: torch.Tensor, rows=rows, weight=weight, groups=groups, kept=kept) -> torch.Tensor:
            ids, likely = native.gate(rows[some], weight, Gating(6, True, 2.5, groups, kept))
            return torch.cat([ids.float(), likely], dim=1)

        yield choose
        bias, rule = stored(count), Gating(6, True, 2.5, groups, kept, "sigmoid", "two best", 1e-20)

        def correct(some: torch.Tensor, rows=rows, weight=weight, bias=bias, rule=rule) -> torch.Tensor:
            ids, likely = native.gate(rows[some], weight, rule, bias)
            return torch.cat([ids.float(), likely], dim=1)

        yield correct


def merge(native: Kernels, dtype: torch.dtype) -> Iterator[Compute]:
    residual, dense = stored(INPUTS, 1030), stored(INPUTS, 1030)
    rows, weights = stored(INPUTS, 6, 1030), stored(INPUTS, 6)
    yield lambda some: native.merge(residual[some], None, rows[some], weights[some])
    yield lambda some: native.merge(residual[some], dense[some], rows[some], weights[some])
    yield lambda some: native.merge(residual[some], dense[some], None, None)


def sigmoid_gate(native: Kernels, dtype: torch.dtype) -> Iterator[Compute]:
    for hidden, width in ((1030, 70), (33, 1100)):
        rows, weight, values = stored(INPUTS, hidden), stored(1, hidden, spread=0.03), stored(INPUTS, width)
        yield lambda some, r=rows, w=weight, v=values: native.sigmoid_gate(r[some], w, v[some])


def clip(native: Kernels, dtype: torch.dtype) -> Iterator[Compute]:
    rows = stored(INPUTS, 1030)
    yield lambda some: native.clip(rows[some], 0.9)


def store(native: Kernels, dtype: torch.dtype) -> Iterator[Compute]:
    rows = stored(INPUTS, 3, 400)

    def stored_again(some: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros(500, 1, 3, stored_width(400, dtype), dtype=dtype)
        slots = torch.randperm(500)[: len(some)]
        native.store(cache, rows[some], slots)
        return cache[slots, 0]

    yield stored_again


OPERATIONS = (
    linear,
    linears,
    head_linear,
    gated_mlp,
    experts,
    norms,
    rope,
    gate,
    merge,
    sigmoid_gate,
    clip,
    store,
)
WITHOUT_WEIGHTS = (norms, rope, gate, merge, sigmoid_gate, clip)


@pytest.mark.parametrize("dtype", CACHED)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_row_has_the_same_bits_alone_and_in_company(
    native: Kernels, operation: Callable[[Kernels, torch.dtype], Iterator[Compute]], dtype: torch.dtype
) -> None:
    if dtype not in (
        STORED[:1] if operation in WITHOUT_WEIGHTS else CACHED if operation is store else STORED
    ):
        return
    for compute in operation(native, dtype):
        native.set_threads(1, False)
        alone = torch.cat([compute(torch.tensor([index])) for index in range(INPUTS)])
        for threads in THREADS:
            native.set_threads(threads, False)
            for count in COUNTS:
                some = torch.randint(INPUTS, (count,))
                assert same_bits(compute(some), alone[some]), (threads, count)
            assert same_bits(compute(torch.tensor([1])), alone[1:2])


@pytest.mark.parametrize("dtype", STORED)
def test_projections_have_the_same_bits_one_by_one(native: Kernels, dtype: torch.dtype) -> None:
    for width in (33, 100, 1030):
        rows, weights = stored(49, width), [stored(columns, width, dtype=dtype) for columns in (64, 5, 33)]
        biases = [stored(64), None, stored(33)]
        together = native.linears(rows, weights, biases)
        for one, weight, bias in zip(together, weights, biases, strict=True):
            assert same_bits(native.linear(rows, weight, bias), one)
        whole = native.linear(rows, torch.cat(weights))
        assert same_bits(torch.cat([native.linear(rows, weight) for weight in weights], dim=1), whole)


@pytest.mark.parametrize("dtype", STORED)
def test_an_expert_has_the_bits_of_a_dense_mlp(native: Kernels, dtype: torch.dtype) -> None:
    gate, up, down = (stored(*shape, dtype=dtype, spread=0.1) for shape in ((70, 33), (70, 33), (33, 70)))
    rows, ids = stored(49, 33), torch.zeros(49, 1, dtype=torch.int64)
    found = native.experts(ExpertWeights((gate,), (up,), (down,)), rows, ids)
    assert same_bits(found[:, 0], native.gated_mlp(rows, gate, up, down))


def test_where_rows_and_weights_lie_changes_no_bit(native: Kernels) -> None:
    rows, weight = torch.randn(9, 100), torch.randn(70, 100)
    wanted = native.linear(rows, weight)
    for shift in range(1, 17):
        moved = torch.empty(7000 + shift)[shift:].view(70, 100).copy_(weight)
        also = torch.empty(900 + shift)[shift:].view(9, 100).copy_(rows)
        assert same_bits(native.linear(also, moved), wanted)
