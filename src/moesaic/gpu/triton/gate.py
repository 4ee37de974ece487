"""The top-k gate after its product: scores, groups, choice and weights in one launch, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.gpu.triton.launching import block, launch
from moesaic.kernels.gating import Gating
from moesaic.kernels.reference.dense import linear


@triton.jit
def _first_best(scores, index, nowhere):
    """The smallest index of the largest score. NaN is nobody's equal: then `nowhere`."""
    return tl.min(tl.where(scores == tl.max(scores, 0), index, nowhere), 0)


@triton.jit
def _best_groups(choice, index, member, GROUPS: tl.constexpr, SIZE: tl.constexpr, TWO: tl.constexpr):
    """[BLOCK] The score of each number's group: its best score, or the sum of its two best."""
    of_group = tl.full(choice.shape, float("-inf"), tl.float32)
    for group in range(GROUPS):
        inside = member & (index // SIZE == group)
        scores = tl.where(inside, choice, float("-inf"))
        score = tl.max(scores, 0)
        if TWO:
            best = _first_best(scores, index, GROUPS * SIZE)
            score += tl.max(tl.where(index == best, float("-inf"), scores), 0)
        of_group = tl.where(inside, score, of_group)
    return of_group


@triton.jit
def _gate(
    products,
    bias,
    ids,
    weights,
    scale,
    added,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    SIGMOID: tl.constexpr,
    TWO: tl.constexpr,
    BIASED: tl.constexpr,
    NORMALISED: tl.constexpr,
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
    if BIASED:
        choice += tl.load(bias + index, mask=member, other=0.0)
    choice = tl.where(member, choice, float("-inf"))
    if KEPT < GROUPS:
        SIZE: tl.constexpr = E // GROUPS
        of_group = _best_groups(choice, index, member, GROUPS, SIZE, TWO)
        kept = index < 0
        for _ in range(KEPT):
            first = _first_best(tl.where(kept, float("-inf"), of_group), index, E - 1)
            kept = kept | (member & (index // SIZE == first // SIZE))
        choice = tl.where(kept, choice, float("-inf"))
    slots = tl.arange(0, SLOTS)
    chosen, weight = tl.zeros([SLOTS], tl.int64), tl.zeros([SLOTS], tl.float32)
    taken = index < 0
    for slot in range(K):
        best = _first_best(tl.where(taken, float("-inf"), choice), index, E - 1)
        taken = taken | (index == best)
        score = tl.sum(tl.where(index == best, scores, 0.0), 0)
        chosen = tl.where(slots == slot, best.to(tl.int64), chosen)
        weight = tl.where(slots == slot, score, weight)
    if NORMALISED:
        weight = weight / (tl.sum(weight, 0) + added)
    tl.store(ids + row * K + slots, chosen, mask=slots < K)
    tl.store(weights + row * K + slots, weight * scale, mask=slots < K)


def gate(
    rows: torch.Tensor, weight: torch.Tensor, gating: Gating, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.gate.gate`. The product is torch's, in float32."""
    before, after = (bias, None) if gating.bias_target == "products" else (None, bias)
    products = linear(rows, weight, before)
    count, experts = products.shape
    ids = torch.empty(count, gating.top_k, dtype=torch.int64, device=rows.device)
    weights = torch.empty(count, gating.top_k, dtype=torch.float32, device=rows.device)
    launch(
        _gate,
        (count,),
        products,
        products if after is None else after,
        ids,
        weights,
        gating.scale,
        gating.sum_epsilon,
        E=experts,
        K=gating.top_k,
        GROUPS=gating.groups,
        KEPT=gating.groups_kept,
        SIGMOID=gating.scores == "sigmoid",
        TWO=gating.group_scores == "two best",
        BIASED=after is not None,
        NORMALISED=gating.normalise,
        SLOTS=block(gating.top_k),
        BLOCK=block(experts),
    )
    return ids, weights
