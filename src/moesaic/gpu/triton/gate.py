"""The top-k gate after its product: scores, groups, choice and weights in one launch, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.gpu.triton.launching import block, launch
from moesaic.kernels.gating import Gating
from moesaic.kernels.reference.dense import linear


@triton.jit
def _first_best(scores, index, default):
    """The smallest index of the largest score. NaN is nobody's equal: then `default`."""
    return tl.min(tl.where(scores == tl.max(scores, 0), index, default), 0)


@triton.jit
def _best_groups(
    choice, index, member, GROUPS: tl.constexpr, SIZE: tl.constexpr, SUMS_TWO_BEST: tl.constexpr
):
    """[BLOCK] The score of each number's group: its best score, or the sum of its two best."""
    of_group = tl.full(choice.shape, float("-inf"), tl.float32)
    for group in range(GROUPS):
        in_group = member & (index // SIZE == group)
        scores = tl.where(in_group, choice, float("-inf"))
        score = tl.max(scores, 0)
        if SUMS_TWO_BEST:
            best = _first_best(scores, index, GROUPS * SIZE)
            score += tl.max(tl.where(index == best, float("-inf"), scores), 0)
        of_group = tl.where(in_group, score, of_group)
    return of_group


@triton.jit
def _gate(
    products,
    bias,
    ids,
    weights,
    scale,
    epsilon,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    SUMS_TWO_BEST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALISE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    member = index < E
    numbers = tl.load(products + row * E + index, mask=member, other=float("-inf"))
    if SIGMOID:
        scores = tl.where(member, tl.sigmoid(numbers), 0.0)
    else:
        exponents = tl.exp(numbers - tl.max(numbers, 0))
        scores = exponents / tl.sum(exponents, 0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + index, mask=member, other=0.0)
    choice = tl.where(member, choice, float("-inf"))
    if TOPK_GROUPS < GROUPS:
        SIZE: tl.constexpr = E // GROUPS
        of_group = _best_groups(choice, index, member, GROUPS, SIZE, SUMS_TWO_BEST)
        is_eligible = index < 0
        for _ in range(TOPK_GROUPS):
            first = _first_best(tl.where(is_eligible, float("-inf"), of_group), index, E - 1)
            is_eligible = is_eligible | (member & (index // SIZE == first // SIZE))
        choice = tl.where(is_eligible, choice, float("-inf"))
    slots = tl.arange(0, SLOTS)
    topk_ids, weight = tl.zeros([SLOTS], tl.int64), tl.zeros([SLOTS], tl.float32)
    is_chosen = index < 0
    for slot in range(K):
        best = _first_best(tl.where(is_chosen, float("-inf"), choice), index, E - 1)
        is_chosen = is_chosen | (index == best)
        score = tl.sum(tl.where(index == best, scores, 0.0), 0)
        topk_ids = tl.where(slots == slot, best.to(tl.int64), topk_ids)
        weight = tl.where(slots == slot, score, weight)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + epsilon)
    tl.store(ids + row * K + slots, topk_ids, mask=slots < K)
    tl.store(weights + row * K + slots, weight * scale, mask=slots < K)


def gate(
    rows: torch.Tensor, weight: torch.Tensor, gating: Gating, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes what `reference.gate.gate` computes. The product is torch's, in float32."""
    product_bias, choice_bias = (bias, None) if gating.bias_target == "products" else (None, bias)
    products = linear(rows, weight, product_bias)
    count, experts = products.shape
    ids = torch.empty(count, gating.top_k, dtype=torch.int64, device=rows.device)
    weights = torch.empty(count, gating.top_k, dtype=torch.float32, device=rows.device)
    launch(
        _gate,
        (count,),
        products,
        products if choice_bias is None else choice_bias,
        ids,
        weights,
        gating.scale,
        gating.sum_epsilon,
        E=experts,
        K=gating.top_k,
        GROUPS=gating.groups,
        TOPK_GROUPS=gating.groups_kept,
        SIGMOID=gating.scores == "sigmoid",
        SUMS_TWO_BEST=gating.group_scores == "two best",
        HAS_BIAS=choice_bias is not None,
        NORMALISE=gating.normalise,
        SLOTS=block(gating.top_k),
        BLOCK=block(experts),
    )
    return ids, weights
