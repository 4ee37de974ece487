"""The top-k gate, and the merge that applies its weights.

Question: Where are the gate's top-k weights applied?
"""

from __future__ import annotations

import torch

from moesaic.kernels.gating import Gating
from moesaic.kernels.reference.dense import linear


def gate(
    rows: torch.Tensor, weight: torch.Tensor, gating: Gating, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores every expert, then chooses the k with the highest score. gating says what the bias is added to.

    Returns ids [n, k] int64, best first, and weights [n, k]. Of equal experts, or groups, the first is taken.
    (transformers uses torch.topk, whose order on ties is undefined, so on exact ties its tokens may differ.)

    rows [n, h], weight [E, h] float32, bias [E] float32. With groups_kept < groups, only experts of the
    groups with the highest scores can be chosen (device-limited routing, DeepSeek-V2, section 2.2.2).
    """
    product_bias, choice_bias = (bias, None) if gating.bias_target == "products" else (None, bias)
    products = linear(rows, weight, product_bias)
    scores = products.sigmoid() if gating.scores == "sigmoid" else products.softmax(-1)
    choice = scores if choice_bias is None else scores + choice_bias
    if gating.groups_kept < gating.groups:
        choice = _limit(choice, gating)
    ids = _best(choice, gating.top_k)
    weights = scores.gather(-1, ids)
    if gating.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + gating.sum_epsilon)
    return ids, weights if gating.scale == 1.0 else weights * gating.scale


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the indices [n, count] of the largest numbers of each row [n, m]; ties in order."""
    # torch.topk leaves the order of equal scores open, and then two engines could choose different experts.
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count].contiguous()


def _limit(scores: torch.Tensor, gating: Gating) -> torch.Tensor:
    """Sets the scores of all experts outside the best groups to minus infinity: others may be negative."""
    group_scores = scores.view(-1, gating.groups, scores.shape[1] // gating.groups)
    num_summed = 2 if gating.group_scores == "two best" else 1
    best = _best(group_scores.topk(num_summed, dim=-1).values.sum(-1), gating.groups_kept)
    left_out = torch.ones_like(group_scores[..., 0], dtype=torch.bool).scatter_(1, best, False)
    return group_scores.masked_fill(left_out[..., None], -torch.inf).flatten(1)


def merge(
    residual: torch.Tensor,
    dense: torch.Tensor | None,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Returns [n, h] residual + dense + sum of weights [n, k] * rows [n, k, h], in top-k order."""
    hidden = residual if dense is None else residual + dense
    if rows is None or weights is None:
        return hidden
    first_pair, *other_pairs = zip(rows.unbind(1), weights[..., None].unbind(1), strict=True)
    # One expert after another: a sum over an axis may be taken in an order that depends on the shape.
    merged = torch.addcmul(hidden, *first_pair)
    for row, weight in other_pairs:
        merged.addcmul_(row, weight)
    return merged
