"""The native products against the reference: projections, products per head, dense MLPs, experts. bf16
weights are compared with the reference on the same numbers in float32, since widening is exact. Rows that an
instruction set rounds are treated alike.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.native_kernels import ROWS, STORED, WIDTHS, close, close_mlp, met, stored

from moesaic.kernels.reference.experts import experts_plain
from moesaic.kernels.table import REFERENCE, Kernels
from moesaic.kernels.weights import ExpertWeights

torch.set_num_threads(1)
MLPS = ((1, 1), (7, 33), (100, 24), (33, 2100), (1030, 65))
"""Hidden size and width."""


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("width", WIDTHS)
def test_linear(native: Kernels, width: int, dtype: torch.dtype) -> None:
    inputs = stored(max(ROWS), width)
    for columns in (1, 3, 65, 150):
        weight, bias = stored(columns, width, dtype=dtype), stored(columns)
        for count in ROWS:
            rows = inputs[:count]
            seen = met(native, rows, weight)
            close(native.linear(rows, weight), REFERENCE.linear(seen, weight.float()))
            close(native.linear(rows, weight, bias), REFERENCE.linear(seen, weight.float(), bias))


@pytest.mark.parametrize("dtype", STORED)
def test_linear_of_more_rows_than_one_task_takes(native: Kernels, dtype: torch.dtype) -> None:
    rows, weight, bias = stored(1000, 24), stored(70, 24, dtype=dtype), stored(70)
    seen = met(native, rows, weight)
    close(native.linear(rows, weight, bias), REFERENCE.linear(seen, weight.float(), bias))


def test_linear_of_rows_that_do_not_lie_together(native: Kernels) -> None:
    wide, weight = stored(13, 70), stored(9, 33)
    for rows in (
        wide[:, 2:35],
        wide[::3, 2:35],
        wide[:, :66:2],
        wide.t()[:33].t(),
        wide[:1, :33].expand(5, -1),
    ):
        close(native.linear(rows, weight), REFERENCE.linear(rows, weight))


@pytest.mark.parametrize("dtypes", [STORED[:1] * 3, STORED[1:] * 3, (*STORED, STORED[0])])
@pytest.mark.parametrize("counts", [(5,), (40, 7), (33, 1, 70), (64, 64, 64), (0, 3, 2), (9, 8, 7, 6)])
def test_linears(native: Kernels, counts: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    for width in WIDTHS:
        weights = [stored(count, width, dtype=dtypes[i % 3]) for i, count in enumerate(counts)]
        biases = [stored(count) if i != 1 else None for i, count in enumerate(counts)]
        for count in (0, 1, 3, 8, 50):
            rows = stored(count, width)
            found = native.linears(rows, weights, biases)
            for one, weight, bias in zip(found, weights, biases, strict=True):
                close(one, REFERENCE.linear(met(native, rows, weight), weight.float(), bias))


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(("heads", "inner", "columns"), [(1, 1, 1), (3, 7, 33), (5, 130, 24), (2, 33, 1030)])
def test_head_linear(native: Kernels, heads: int, inner: int, columns: int, dtype: torch.dtype) -> None:
    by_columns, by_inner = (
        stored(heads, inner, columns, dtype=dtype),
        stored(heads, columns, inner, dtype=dtype),
    )
    inputs = stored(max(ROWS), heads, inner + 9)
    for count in ROWS:
        for rows in (inputs[:count, :, 4 : inner + 4], inputs[:count, :, :inner].contiguous()):
            for weight in (by_columns, by_inner.transpose(1, 2)):
                seen = met(native, rows, weight)
                close(native.head_linear(rows, weight), REFERENCE.head_linear(seen, weight.float()))


@pytest.mark.parametrize("dtype", STORED)
def test_head_linear_with_the_two_halves_of_one_matrix(native: Kernels, dtype: torch.dtype) -> None:
    heads, plain, value, rank = 3, 10, 7, 21
    both = stored(heads * (plain + value), rank, dtype=dtype).view(heads, -1, rank)
    key_up, value_up = both.tensor_split([plain], dim=1)
    for count in (1, 4, 50):
        query, latent = stored(count, heads, plain), stored(count, heads, rank)
        close(native.head_linear(query, key_up), REFERENCE.head_linear(query, key_up.float()))
        value_up = both.tensor_split([plain], dim=1)[1].transpose(1, 2)
        seen = met(native, latent, value_up)
        close(native.head_linear(latent, value_up), REFERENCE.head_linear(seen, value_up.float()))


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(("hidden", "width"), MLPS)
def test_gated_mlp(native: Kernels, hidden: int, width: int, dtype: torch.dtype) -> None:
    gate, up = (stored(width, hidden, dtype=dtype, spread=hidden**-0.5) for _ in range(2))
    down = stored(hidden, width, dtype=dtype)
    inputs = stored(max(ROWS), hidden)
    for count in ROWS:
        found = native.gated_mlp(inputs[:count], gate, up, down)
        close_mlp(native, found, inputs[:count], (gate, up, down))


def test_silu_of_small_and_large_numbers(native: Kernels) -> None:
    one = torch.ones(1, 1)
    huge = [-89.0, -1e15, -1e38, -3.4e38, -float("inf"), float("inf")]
    for value in [*torch.linspace(-150, 150, 1501).tolist(), 0.0, -0.0, 1e15, 1e-30, -1e-40, *huge]:
        found, wanted = (
            kernels.gated_mlp(torch.tensor([[value]]), one, one, one) for kernels in (native, REFERENCE)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-30, equal_nan=True)
    assert native.gated_mlp(torch.tensor([[float("nan")]]), one, one, one).isnan()


def weights(count: int, hidden: int, width: int, dtype: torch.dtype) -> ExpertWeights:
    def make(*shape: int) -> tuple[torch.Tensor, ...]:
        return tuple(stored(*shape, dtype=dtype, spread=shape[1] ** -0.5) for _ in range(count))

    return ExpertWeights(make(width, hidden), make(width, hidden), make(hidden, width))


def routings(rows: int, top_k: int, count: int) -> list[torch.Tensor]:
    """Three routings [rows, top_k]: random, all rows to one expert, and most rows to one."""
    drawn = torch.stack([torch.randperm(count)[:top_k] for _ in range(max(rows, 1))])[:rows]
    skewed = torch.where(torch.rand(rows, top_k) < 0.8, 2, drawn)
    return [drawn, torch.full((rows, top_k), count - 1), skewed]


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize(("hidden", "width"), MLPS)
def test_experts(native: Kernels, hidden: int, width: int, top_k: int, dtype: torch.dtype) -> None:
    table = weights(5, hidden, width, dtype)
    inputs = stored(max(ROWS), hidden)
    for count in ROWS:
        for ids in routings(count, top_k, 5):
            found = native.experts(table, inputs[:count], ids)
            assert found.shape == (count, top_k, hidden)
            for expert in range(5):
                row, rank = (ids == expert).nonzero(as_tuple=True)
                close_mlp(native, found[row, rank], inputs[row], table.matrices_of(expert))


def test_ids_of_experts_may_lie_apart(native: Kernels) -> None:
    table, hidden = weights(4, 8, 6, torch.float32), stored(5, 8)
    ids = torch.stack([torch.randperm(4) for _ in range(5)])
    for view in (ids[:, ::2], ids[:, 1:3], ids.t()[:2].t()):
        close(native.experts(table, hidden, view), experts_plain(table, hidden, view))


def test_the_experts_answer_goes_where_it_is_wanted(native: Kernels) -> None:
    table, hidden = weights(5, 33, 20, torch.bfloat16), stored(7, 33)
    ids = routings(7, 2, 5)[0]
    memory = torch.full((9, 2, 33), torch.nan)
    answer = native.experts(table, hidden, ids, memory[1:8])
    assert answer.data_ptr() == memory[1].data_ptr()
    assert torch.equal(answer, native.experts(table, hidden, ids))
    assert memory[0].isnan().all() and memory[8].isnan().all()


def subset(whole: ExpertWeights, held: tuple[int, ...]) -> ExpertWeights:
    def some(part: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        return tuple(one if index in held else None for index, one in enumerate(part))

    return ExpertWeights(some(whole.gate_proj), some(whole.up_proj), some(whole.down_proj))


def test_a_subset_of_experts_serves_its_own_and_names_the_others(native: Kernels) -> None:
    whole, hidden = weights(4, 8, 6, torch.float32), stored(3, 8)
    part, ids = subset(whole, (1, 3)), torch.tensor([[3], [1], [3]])
    assert torch.equal(native.experts(part, hidden, ids), native.experts(whole, hidden, ids))
    with pytest.raises(KeyError, match="expert 2 is not held here"):
        native.experts(part, hidden, torch.tensor([[1], [2], [3]]))
    assert native.experts(subset(whole, ()), stored(0, 8), torch.zeros(0, 2, dtype=torch.int64)).shape == (
        0,
        2,
        8,
    )
    with pytest.raises(KeyError, match="expert 3 is not held here"):
        native.experts(subset(whole, ()), hidden, ids)


@pytest.mark.parametrize("wrong", [4, 5, -1, -2, 2**40, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("rows", [1, 3])
def test_an_expert_out_of_range_is_named(native: Kernels, rows: int, wrong: int) -> None:
    ids = torch.ones(rows, 2, dtype=torch.int64)
    ids[-1, 1] = wrong
    with pytest.raises(KeyError, match=f"expert {wrong} is not held here"):
        native.experts(weights(4, 8, 6, torch.float32), stored(rows, 8), ids)
