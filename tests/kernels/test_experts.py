"""The grouped experts against the loop over pairs."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels.reference.dense import LARGE_WEIGHT
from moesaic.kernels.reference.experts import experts, experts_plain
from moesaic.kernels.weights import ExpertWeights

torch.set_num_threads(1)


def weights(count: int, hidden: int, width: int, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    def make(*shape: int) -> tuple[torch.Tensor, ...]:
        return tuple((torch.randn(shape) * 0.2).to(dtype) for _ in range(count))

    return ExpertWeights(make(width, hidden), make(width, hidden), make(hidden, width))


def ids(rows: int, top_k: int, count: int) -> torch.Tensor:
    return torch.stack([torch.randperm(count)[:top_k] for _ in range(rows)])


@pytest.mark.parametrize("top_k", [1, 2, 6, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17, 64])
def test_fast_is_plain(rows: int, top_k: int) -> None:
    torch.manual_seed(rows)
    table = weights(10, 24, 20)
    hidden, chosen = torch.randn(rows, 24), ids(rows, top_k, 10)
    found = experts(table, hidden, chosen)
    assert found.shape == (rows, top_k, 24)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, experts_plain(table, hidden, chosen), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [2, 3, 5, 6])
def test_large_weights_take_the_other_form(rows: int) -> None:
    table = weights(1, 256, 256 + LARGE_WEIGHT // 256)
    hidden, chosen = torch.randn(rows, 256), torch.zeros(rows, 1, dtype=torch.int64)
    found, wanted = experts(table, hidden, chosen), experts_plain(table, hidden, chosen)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_one_expert_may_get_everything() -> None:
    table, hidden = weights(4, 8, 6), torch.randn(9, 8)
    chosen = torch.full((9, 1), 2)
    torch.testing.assert_close(experts(table, hidden, chosen), experts_plain(table, hidden, chosen))


def test_no_rows_is_no_error() -> None:
    found = experts(weights(4, 8, 6), torch.zeros(0, 8), torch.zeros(0, 2, dtype=torch.int64))
    assert found.shape == (0, 2, 8)


def test_a_subset_serves_its_own_and_names_the_others() -> None:
    whole, hidden = weights(4, 8, 6), torch.randn(3, 8)

    def some(table: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        return (None, table[1], None, table[3])

    part = ExpertWeights(some(whole.gate_proj), some(whole.up_proj), some(whole.down_proj))
    assert part.resident_ids == (1, 3)
    chosen = torch.tensor([[3], [1], [3]])
    assert torch.equal(experts(part, hidden, chosen), experts(whole, hidden, chosen))
    with pytest.raises(KeyError, match="expert 2 is not held here"):
        experts(part, hidden, torch.tensor([[1], [2], [3]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_answer_in_float32(dtype: torch.dtype) -> None:
    table, hidden, chosen = weights(4, 16, 12, dtype), torch.randn(6, 16), ids(6, 2, 4)
    found = experts(table, hidden, chosen)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, experts_plain(table, hidden, chosen), rtol=0.1, atol=0.1)


def test_the_answer_goes_where_it_is_wanted() -> None:
    table, hidden, chosen = weights(5, 8, 6), torch.randn(7, 8), ids(7, 2, 5)
    memory = torch.full((20, 2, 8), torch.nan)
    answer = experts(table, hidden, chosen, memory[:7])
    assert answer.data_ptr() == memory.data_ptr()
    torch.testing.assert_close(answer, experts_plain(table, hidden, chosen), rtol=1e-4, atol=1e-5)
    assert memory[7:].isnan().all()


def test_experts_keep_their_type_when_they_come_and_go() -> None:
    """A server begins with none, and may drop all that it has."""
    rows = [torch.zeros(2, 8, dtype=torch.uint8)] * 3
    none = ExpertWeights.from_resident(4, {})
    some = ExpertWeights.from_resident(4, {1: rows}, packed_dtype="int8")
    held = none.with_replacements(some)
    assert (held.resident_ids, held.packed_dtype) == ((1,), "int8")
    assert (
        held.select(()).with_replacements(some).packed_dtype
        == held.with_replacements(none).packed_dtype
        == "int8"
    )
