"""The micro-batches of one pass over the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kvcache.paged import PagedKV
from moesaic.models.block import Gated, Projected
from moesaic.policy.offloading.microbatch import divide


@dataclass
class Part:
    """One micro-batch: its rows, and what the last of its operations left for the next."""

    batch: TokenBatch
    origin: IntArray
    """[n] where its rows stand in the pass."""
    attention: AttentionBatch
    """Over the cache that its attention reads."""
    positions: torch.Tensor
    """[n]"""
    hidden: torch.Tensor
    """[n, h] after the last layer that is done; nothing before the first one is begun."""
    projected: Projected | None = None
    attended: torch.Tensor | None = None
    """[n, Hq * dv]"""
    gated: Gated | None = None
    dense: torch.Tensor | None = None
    """[n, h] of the shared experts."""
    answers: torch.Tensor | None = None
    """[n, k, h] of the routed experts, until they are merged."""
    chosen: torch.Tensor | None = None
    """[n, k] ids of the experts, on the slow level, where its processor has some of them."""
    away: IntArray | None = None
    """[p] pairs (row * k + rank) whose experts the slow processor computes."""
    sent: torch.Tensor | None = None
    """[n, h] rows for it, on its level; then [p, h] what it answered."""
    local: dict[int, PagedKV] = field(default_factory=dict)
    """Layer -> the blocks that came down for its attention."""
    written: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    """Layer -> the rows' keys and values that have to go up."""


class Rows(Protocol):
    """Which rows a pass over a step's batch computes; offload.padding has others."""

    @property
    def whole(self) -> bool:
        """No sequence is cut where a pass with prompts is divided."""
        ...

    def of(self, batch: TokenBatch) -> TokenBatch:
        """The step's rows, in their order, and what else there may be; the same logits are wanted."""
        ...

    def contexts(self, batch: TokenBatch) -> IntArray:
        """[s] tokens that attention goes over, of a batch that `of` returned."""
        ...


@dataclass(frozen=True)
class Unpadded:
    """The step's own."""

    @property
    def whole(self) -> bool:
        return False

    def of(self, batch: TokenBatch) -> TokenBatch:
        return batch

    def contexts(self, batch: TokenBatch) -> IntArray:
        return batch.context_lens


UNPADDED = Unpadded()


def by_sequences(batch: TokenBatch, largest: int) -> list[tuple[TokenBatch, IntArray]]:
    """Micro-batches of at most so many sequences with about as many cached tokens each, and their rows.

    MoE-Lightning, Algorithm 2 as in policy/offloading/microbatch.py: nothing is padded.
    """
    lengths = batch.context_lens.tolist()
    count = -(-len(lengths) // largest)
    divided = divide(lengths, [0] * len(lengths), count, largest, cache=sum(lengths))
    return [_whole(batch, sorted(chosen)) for chosen in divided.micro_batches]


def by_rows(batch: TokenBatch, largest: int, whole: bool) -> list[tuple[TokenBatch, IntArray]]:
    """Micro-batches of at most so many consecutive rows, about equal, and their rows.

    whole: no sequence is cut, and one that is longer is alone. Where a sequence may be cut, its rows must be
    computed in order, layer by layer: the later ones see the earlier ones' keys.
    """
    if whole:
        return [_whole(batch, group) for group in _groups(np.diff(batch.query_starts).tolist(), largest)]
    count = -(-batch.num_rows // largest)
    cuts = [index * batch.num_rows // count for index in range(count + 1)]
    return [(batch.rows(start, stop), np.arange(start, stop)) for start, stop in pairwise(cuts)]


def by_context(
    batch: TokenBatch, contexts: IntArray, largest: int, whole: bool
) -> list[tuple[TokenBatch, IntArray]]:
    """Micro-batches of consecutive rows whose sequences have at most so many tokens together, and their rows.

    contexts: [s] tokens of each, with the step's own. For a cache that comes with its micro-batch. A sequence
    with more new rows is cut, unless `whole`; a piece with more tokens before it is alone.
    """
    cuts, held = [0], 0
    starts = batch.query_starts.tolist()
    for (start, stop), context in zip(pairwise(starts), contexts.tolist(), strict=True):
        count = 1 if whole else -(-(stop - start) // largest)
        ends = [start + (piece + 1) * (stop - start) // count for piece in range(count)]
        for begin, end in pairwise([start, *ends]):
            tokens = context - (stop - end)
            if cuts[-1] < begin and held + tokens > largest:
                cuts.append(begin)
                held = 0
            held += tokens
    return [(batch.rows(*rows), np.arange(*rows)) for rows in pairwise([*cuts, batch.num_rows])]


def is_cut(batch: TokenBatch, divided: Sequence[tuple[TokenBatch, IntArray]]) -> bool:
    """Whether a sequence has rows in two of the micro-batches."""
    return not np.isin([origin[0] for _, origin in divided], batch.query_starts).all()


def _whole(batch: TokenBatch, chosen: Sequence[int]) -> tuple[TokenBatch, IntArray]:
    starts = batch.query_starts
    rows = [np.arange(starts[index], starts[index + 1]) for index in chosen]
    return batch.sequences(chosen), np.concatenate(rows)


def _groups(rows: Sequence[int], largest: int) -> list[list[int]]:
    """Neighbours with at most so many rows together."""
    groups: list[list[int]] = []
    held = largest + 1
    for index, count in enumerate(rows):
        if held + count > largest:
            groups.append([])
            held = 0
        groups[-1].append(index)
        held += count
    return groups
