"""Prices of a layer whose attention is split by heads and whose experts stand on 8 ranks, with collectives.

Volumes for each rank, of B rows of S bytes on G ranks (Speculative MoE, section 3.2): reduce-scatter or
all-gather (G - 1) B S / G, all-reduce twice that, all-to-all k (1 - local) B S / G. The collectives of
`moesaic.experts.collectives` send these bytes, which tests/experts/collectives checks.

    ds-moe     all-reduce, two all-to-alls, all-gather
    shuffled   shuffled reduce-scatter, two all-to-alls, shuffled all-gather
    tp         experts are split like heads: an all-reduce after attention and one after the experts

The printed formula of the shuffled form leaves out the all-gather, although the text has it. Here it counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moesaic.cost import ops, roofline
from moesaic.cost.hardware import Level
from moesaic.cost.ops import Work
from moesaic.cost.ranks import model_of_rank
from moesaic.cost.sizes import ModelSizes

RANKS = 8
Form = Literal["ds-moe", "shuffled", "tp"]


@dataclass(frozen=True)
class Links:
    """What carries rows between 8 GPUs."""

    sends: float
    """Bytes/s that a GPU sends."""
    across: float | None = None
    """Bytes/s of one direction of the link between the two halves of the GPUs. None: no such link."""
    latency: float = 5e-6
    """Seconds of a collective beside its bytes. Assumed."""

    def gather(self, rows: float, row: float) -> float:
        """Seconds of a ring's reduce-scatter or all-gather. row: bytes of a row."""
        size = (RANKS - 1) / RANKS * rows * row
        return self.latency + size / min(self.sends, self.across or self.sends)

    def exchange(self, rows: float, row: float, top_k: float, local: float) -> float:
        """Seconds of one all-to-all, with this share of the (row, expert) pairs on the row's own rank.

        Example: 8 rows of 8 bytes, top-1, none local: a rank sends its row, and of the 8 rows 4 x 4 / 7
        cross the link between the halves in each direction.
        """
        size = top_k * (1 - local) * rows * row / RANKS
        crossing = RANKS / 2 * (RANKS / 2) / (RANKS - 1) * size
        slowest = size / self.sends
        return self.latency + max(slowest, crossing / self.across if self.across else 0.0)


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer."""

    work: float
    """Of a rank's part by roofline."""
    reductions: float
    """All-reduce, reduce-scatter and all-gather."""
    exchanges: float
    """The two all-to-alls."""

    @property
    def links(self) -> float:
        return self.reductions + self.exchanges

    @property
    def whole(self) -> float:
        return self.work + self.links


def layer(
    model: ModelSizes, rows: float, attended: Work, level: Level, links: Links, form: Form, local: float
) -> Layer:
    """A layer for these rows of all ranks together. attended: a rank's attention. local: see `Links`."""
    rank = part(model)
    work = ops.query_key_value(rank, rows) + ops.output_projection(rank, rows) + attended
    work += ops.gate(rank, rows / RANKS) + ops.shared_experts(rank, rows / RANKS)
    row = model.hidden * 2.0
    once = links.gather(rows, row)
    if form == "tp":
        sliced = replace(model, expert_width=model.expert_width // RANKS)
        return Layer(roofline.seconds(work + ops.routed_experts(sliced, rows), level), 4 * once, 0.0)
    exchanges = 2 * links.exchange(rows, row, model.top_k, local)
    reductions = {"ds-moe": 3, "shuffled": 2}[form] * once
    return Layer(roofline.seconds(work + ops.routed_experts(rank, rows), level), reductions, exchanges)


def part(model: ModelSizes) -> ModelSizes:
    """One rank's part of the model."""
    return model_of_rank(model, RANKS, model.experts // RANKS)


def prompts(model: ModelSizes, count: float, tokens: int) -> Work:
    """A rank's attention for `count` whole prompts."""
    return ops.causal_attention(part(model), count, tokens, 2.0)


def answers(model: ModelSizes, count: float, context: int) -> Work:
    """A rank's attention for one token of `count` requests."""
    return ops.attention(part(model), count, context, 2.0)
