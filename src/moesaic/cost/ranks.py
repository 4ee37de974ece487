"""Computes one rank's part of a model, and of a machine that all ranks share.

In a layer, a rank reads and computes what a model with just its heads and experts would. It does so on its
part of the processors, memory and link. Each row then chooses a mean number of the rank's experts. What
every rank has whole is counted whole: gates, shared experts, dense layers, embeddings and rows. For GPUs
that are priced as one, see Hardware.parallel.
"""

from __future__ import annotations

import math
from dataclasses import replace

from moesaic.cost.hardware import Hardware, Level
from moesaic.cost.hybrid import HybridAttention
from moesaic.cost.sizes import Attention, GroupedQuery, Latent, ModelSizes


def model_of_rank(model: ModelSizes, ranks: int, experts: int) -> ModelSizes:
    """The model sizes of one rank. experts: number of the rank's experts in each layer.

    Example: 4 ranks, 8 heads over 2 key-value heads, and 2 of 8 experts a token. With 2 experts, a rank has
    2 heads over 1, and a token chooses 0.5 of its 2 experts.
    """
    attention = _heads(model.attention, ranks)
    page, seat = model.page / ranks, model.seat / ranks
    part = replace(model, attention=attention, page=page, seat=seat, ranks=ranks)
    return replace(part, experts=experts, top_k=model.top_k / ranks)


def _heads(attention: Attention, ranks: int) -> Attention:
    """The attention of one rank.

    If there are fewer key-value heads than ranks, several ranks have the same one. Each rank has a whole
    latent.
    """
    if isinstance(attention, GroupedQuery):
        return _split_grouped(attention, ranks)
    if isinstance(attention, HybridAttention):
        full, recurrent = _split_grouped(attention.full, ranks), attention.recurrent.part(ranks)
        return replace(attention, full=full, recurrent=recurrent)
    assert isinstance(attention, Latent)
    return replace(attention, heads=attention.heads // ranks)


def _split_grouped(attention: GroupedQuery, ranks: int) -> GroupedQuery:
    kv_heads = max(1, attention.kv_heads // ranks)
    return replace(attention, heads=attention.heads // ranks, kv_heads=kv_heads)


def share_of_rank(hardware: Hardware, ranks: int, gpus: int = 0) -> Hardware:
    """An equal part of what the ranks of a host share.

    gpus: number of fast levels, each used by one rank or several. The ranks then share the link, and the
    RAM with its processor. With 0, the ranks share cores, the bandwidth of RAM, and the disk; memory stays
    as it is.
    """
    fast, slow, link = hardware.fast, hardware.slow, hardware.link
    staging = None if link.staging is None else link.staging / ranks
    link = replace(
        link,
        down_bandwidth=link.down_bandwidth / ranks,
        up_bandwidth=link.up_bandwidth / ranks,
        staging=staging,
    )
    if not gpus:
        return replace(hardware, fast=_part(fast, ranks), link=link)
    ranks_per_gpu = math.ceil(ranks / gpus)
    fast = replace(_part(fast, ranks_per_gpu), memory=fast.memory / ranks_per_gpu)
    slow = replace(_part(slow, ranks), memory=slow.memory / ranks)
    return replace(hardware, fast=fast, slow=slow, link=link)


def _part(level: Level, parts: int) -> Level:
    """The part of one among `parts` equal parts of a level's processor and bandwidth."""
    processor = level.processor and level.processor.times(1 / parts)
    return replace(level, bandwidth=level.bandwidth / parts, processor=processor)
