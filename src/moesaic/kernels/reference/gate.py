"""The top-k gate, and the merge that applies its weights."""

from __future__ import annotations

import torch

from moesaic.kernels.reference.dense import linear


def gate(
    rows: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    normalise: bool,
    scale: float = 1.0,
    groups: int = 1,
    groups_kept: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the k with the highest probability.

    Returns ids [n, k] int64, best first, and weights [n, k]. Of equal experts, or groups, the first is taken.
    (transformers uses torch.topk, whose order on ties is undefined, so on exact ties its tokens may differ.)

    rows [n, h], weight [E, h] float32. normalise: divide the k weights by their sum. Then all are multiplied
    by `scale`. With groups_kept < groups, only experts of the groups whose best expert has the highest
    probability can be chosen (device-limited routing, DeepSeek-V2, section 2.2.2).
    """
    scores = linear(rows, weight).softmax(-1)
    if groups_kept < groups:
        scores = _limit(scores, groups, groups_kept)
    weights, ids = _best(scores, top_k)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights if scale == 1.0 else weights * scale


def _best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the largest numbers of each row [n, m] and their indices, both [n, count]; ties in order."""
    places = scores.argsort(dim=-1, descending=True, stable=True)[:, :count].contiguous()
    return scores.gather(-1, places), places


def _limit(scores: torch.Tensor, groups: int, groups_kept: int) -> torch.Tensor:
    """Sets the scores of all experts outside the best groups to zero."""
    grouped = scores.view(-1, groups, scores.shape[1] // groups)
    best = _best(grouped.amax(-1), groups_kept)[1]
    kept = torch.zeros_like(grouped[..., 0]).scatter_(1, best, 1.0)
    return (grouped * kept[..., None]).flatten(1)


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
    first, *others = zip(rows.unbind(1), weights[..., None].unbind(1), strict=True)
    merged = torch.addcmul(hidden, *first)
    for row, weight in others:
        merged.addcmul_(row, weight)
    return merged
