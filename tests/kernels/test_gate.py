"""Gates of sigmoids, with a bias that only chooses, and groups by their two best experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from tests.support.native_kernels import ROWS, close, stored

from moesaic.kernels.gating import Gating
from moesaic.kernels.table import REFERENCE, Kernels

torch.set_num_threads(1)
SIGMOID = Gating(2, scores="sigmoid")
TWO_BEST = Gating(2, groups=2, groups_kept=1, scores="sigmoid", group_scores="two best")
ONE = torch.ones(1, 1)
"""A row of one number, so that the gate's weight is the products."""


def products(*scores: float) -> torch.Tensor:
    """The weight [E, 1] of a gate whose sigmoids are these numbers."""
    return torch.tensor(scores)[:, None].logit()


def answers(native: Kernels, weight: torch.Tensor, gating: Gating, bias: torch.Tensor | None = None):
    """The ids and weights of ONE, by the native kernels and the reference, which must be alike."""
    ids, weights = native.gate(ONE, weight, gating, bias)
    wanted_ids, wanted = REFERENCE.gate(ONE, weight, gating, bias)
    assert torch.equal(ids, wanted_ids)
    close(weights, wanted)
    return ids[0].tolist(), [round(x, 4) for x in weights[0].tolist()]


def test_each_score_is_the_sigmoid_of_its_own_product(native: Kernels) -> None:
    weight = products(0.1, 0.8, 0.5, 0.6)
    assert answers(native, weight, SIGMOID) == ([1, 3], [0.8, 0.6])
    assert answers(native, weight, Gating(2, True, 7.0, scores="sigmoid")) == ([1, 3], [4.0, 3.0])
    sure = torch.tensor([[200.0], [-200.0], [90.0], [-90.0]])
    assert answers(native, sure, Gating(4, scores="sigmoid"))[1] == [1.0, 1.0, 0.0, 0.0]


def test_a_bias_chooses_and_does_not_weigh(native: Kernels) -> None:
    weight, bias = products(0.1, 0.8, 0.5, 0.6), torch.tensor([0.75, -0.4, 0.0, 0.0])
    assert answers(native, weight, SIGMOID, bias) == ([0, 3], [0.1, 0.6])
    low = answers(native, weight, Gating(4, True, scores="sigmoid"), bias - 5)  # all choices are negative
    assert low == ([0, 3, 2, 1], [0.05, 0.3, 0.25, 0.4])
    softmax, moved = Gating(1), torch.tensor([0.0, 0.0, 0.0, 1.0])
    assert answers(native, weight, softmax, moved)[0] == [3]


def test_a_group_counts_its_best_or_its_two_best(native: Kernels) -> None:
    weight = products(0.8, 0.1, 0.2, 0.6, 0.5, 0.3)
    assert answers(native, weight, TWO_BEST) == ([3, 4], [0.6, 0.5])  # 1.0 against 1.1
    best = Gating(2, groups=2, groups_kept=1, scores="sigmoid")
    assert answers(native, weight, best) == ([0, 2], [0.8, 0.2])


def test_experts_of_kept_groups_are_chosen_though_their_scores_are_negative(native: Kernels) -> None:
    weight, bias = products(0.1, 0.2, 0.3, 0.4), torch.tensor([-3.0, -2.0, -1.0, -4.0])
    # Choices -2.9, -1.8, -0.7, -3.6: the first group has -4.7, the second -4.3.
    assert answers(native, weight, TWO_BEST, bias) == ([2, 3], [0.3, 0.4])


def test_the_sum_that_divides_may_be_zero(native: Kernels) -> None:
    weight = torch.full((4, 1), -200.0)
    gating = Gating(2, True, scores="sigmoid", sum_epsilon=1e-20)
    assert answers(native, weight, gating) == ([0, 1], [0.0, 0.0])
    weight = torch.full((4, 1), -46.0)  # sigmoids of 1.05e-20: the addend counts
    assert answers(native, weight, gating)[1] == [0.339, 0.339]


def test_of_equal_experts_and_groups_the_first_are_chosen(native: Kernels) -> None:
    for weight in (products(*[0.5] * 6), torch.zeros(6, 1)):
        assert answers(native, weight, Gating(3, scores="sigmoid"))[0] == [0, 1, 2]
        gating = Gating(4, groups=3, groups_kept=2, scores="sigmoid", group_scores="two best")
        assert answers(native, weight, gating)[0] == [0, 1, 2, 3]
        bias = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, 0.5])
        assert answers(native, weight, gating, bias)[0] == [2, 5, 3, 4]


VARIANTS = list(itertools.product(("softmax", "sigmoid"), ("best", "two best"), (False, True), (0.0, 0.3)))


@pytest.mark.parametrize(("scores", "group_scores", "normalise", "spread"), VARIANTS)
@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "kept"),
    [(1, 1, 1, 1), (5, 2, 1, 1), (12, 6, 4, 2), (160, 8, 8, 3), (256, 8, 8, 4), (384, 8, 1, 1)],
)
def test_every_rule_is_that_of_the_reference(
    native: Kernels, experts: int, top_k: int, groups: int, kept: int, scores, group_scores, normalise, spread
) -> None:
    gating = Gating(top_k, normalise, 2.5, groups, kept, scores, group_scores, 1e-20)
    weight, inputs = stored(experts, 33, spread=0.2), stored(max(ROWS), 33)
    bias = stored(experts, spread=spread) if spread else None
    for count in ROWS:
        ids, weights = native.gate(inputs[:count], weight, gating, bias)
        wanted_ids, wanted = REFERENCE.gate(inputs[:count], weight, gating, bias)
        assert torch.equal(ids, wanted_ids)
        close(weights, wanted)


def test_a_row_that_is_not_a_number_has_no_weights(native: Kernels) -> None:
    rows, weight = stored(3, 8), stored(6, 8)
    rows[1, 2] = float("nan")
    gating = Gating(3, True, 1.0, 3, 2, "sigmoid", "two best")
    for kernels in (native, REFERENCE):
        ids, weights = kernels.gate(rows, weight, gating, stored(6))
        assert weights.isnan().any(1).tolist() == [False, True, False]
        assert (ids >= 0).all() and (ids < 6).all()


REFUSED: dict[str, Callable[[Kernels], object]] = {
    "a bias of another length": lambda k: k.gate(ONE, products(0.1, 0.2), SIGMOID, torch.zeros(3)),
    "a bias in bf16": lambda k: k.gate(
        ONE, products(0.1, 0.2), SIGMOID, torch.zeros(2, dtype=torch.bfloat16)
    ),
    "a bias with gaps": lambda k: k.gate(ONE, products(0.1, 0.2), SIGMOID, torch.zeros(4)[::2]),
    "groups of one expert": lambda k: k.gate(
        ONE, products(0.1, 0.2), Gating(1, groups=2, groups_kept=1, group_scores="two best")
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(native: Kernels, case: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        REFUSED[case](native)


def test_a_bias_of_the_products_chooses_and_weighs(native: Kernels) -> None:
    """As in gpt-oss: the softmax over the products of the chosen experts, with their biases."""
    weight, bias = torch.tensor([[0.5], [2.0], [1.0], [-1.0]]), torch.tensor([2.5, -1.5, 0.0, 0.5])
    gating = Gating(2, normalise=True, bias_target="products")
    ids, weights = answers(native, weight, gating, bias)
    likely = torch.tensor([3.0, 1.0]).softmax(0).tolist()
    assert (ids, weights) == ([0, 2], [round(x, 4) for x in likely])
    assert answers(native, weight, gating)[0] == [1, 2]
    rows, weight, bias = stored(max(ROWS), 33), stored(12, 33, spread=0.3), stored(12)
    for count in ROWS:
        ids, found = native.gate(rows[:count], weight, Gating(4, True, bias_target="products"), bias)
        best, wanted_ids = (rows[:count] @ weight.t() + bias).topk(4)
        assert torch.equal(ids, wanted_ids)
        close(found, best.softmax(-1))
