"""The gate in Triton against the reference: every rule, ties, and numbers of experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.triton_kernels import DEVICE, TRITON, close

from moesaic.kernels.gating import Gating
from moesaic.kernels.table import REFERENCE

pytestmark = pytest.mark.slow
RULES = [
    Gating(1),
    Gating(3, normalise=True),
    Gating(3, normalise=True, scale=2.5, scores="sigmoid", sum_epsilon=1e-20),
    Gating(2, normalise=True, groups=4, groups_kept=2, scores="sigmoid", group_scores="two best"),
    Gating(3, groups=3, groups_kept=1),
    Gating(4, bias_target="products"),
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gating", RULES)
def test_rules(gating: Gating, biased: bool) -> None:
    rows, weight = torch.randn(7, 20), torch.randn(12, 20)
    bias = torch.randn(12) if biased else None
    same(rows, weight, gating, bias)


@given(st.integers(0, 3), st.integers(1, 70), st.data())
@settings(max_examples=15)
def test_numbers_of_experts(rows: int, experts: int, data: st.DataObject) -> None:
    gating = Gating(data.draw(st.integers(1, min(9, experts))), normalise=True)
    same(torch.randn(rows, 8), torch.randn(experts, 8), gating, None)


def test_of_equal_experts_and_groups_the_first_is_taken() -> None:
    rows, weight = torch.zeros(2, 4), torch.randn(12, 4)
    same(rows, weight, Gating(5), None)
    same(rows, weight, Gating(4, groups=3, groups_kept=2, scores="sigmoid", group_scores="two best"), None)


def test_nan_chooses_experts_that_exist() -> None:
    rows = torch.full((2, 4), torch.nan, device=DEVICE)
    ids, weights = TRITON.gate(rows, torch.randn(6, 4, device=DEVICE), Gating(3), None)
    assert ((ids >= 0) & (ids < 6)).all() and weights.isnan().all()


def same(rows: torch.Tensor, weight: torch.Tensor, gating: Gating, bias: torch.Tensor | None) -> None:
    there = None if bias is None else bias.to(DEVICE)
    ids, weights = TRITON.gate(rows.to(DEVICE), weight.to(DEVICE), gating, there)
    wanted, theirs = REFERENCE.gate(rows, weight, gating, bias)
    assert torch.equal(ids.cpu(), wanted)
    close(weights, theirs)
