"""One rank's part of a model, and of a machine whose processors, memory and link all ranks share.

What a rank reads and computes in a layer is what a model of its own heads and experts would, on its part of
the machine; each row then chooses so many of these experts in the mean. What every rank has whole (gates,
shared experts, dense layers, embeddings, rows) is counted whole. Ranks that share a host instead of bringing
a GPU each: for those see Hardware.parallel.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.cost.hardware import Hardware
from moesaic.cost.sizes import Attention, GroupedQuery, Latent, ModelSizes


def model_of_rank(model: ModelSizes, ranks: int, experts: int) -> ModelSizes:
    """experts: that the rank has of each layer.

    Example: 8 heads over 2 key-value heads, 2 of 8 experts a token, 4 ranks: 2 heads over 1, 0.5 of 2.
    """
    return replace(
        model, attention=_heads(model.attention, ranks), experts=experts, top_k=model.top_k / ranks
    )


def _heads(attention: Attention, ranks: int) -> Attention:
    """Key-value heads are held by several ranks where there are fewer of them; a latent is whole on each."""
    if isinstance(attention, GroupedQuery):
        kept = max(1, attention.kv_heads // ranks)
        return replace(attention, heads=attention.heads // ranks, kv_heads=kept)
    assert isinstance(attention, Latent)
    return replace(attention, heads=attention.heads // ranks)


def share_of_rank(hardware: Hardware, ranks: int) -> Hardware:
    """An equal part of the fast processor, its memory's bandwidth and the link. Memory stays as it is."""
    fast, link = hardware.fast, hardware.link
    processor = fast.processor and fast.processor.times(1 / ranks)
    return replace(
        hardware,
        fast=replace(fast, bandwidth=fast.bandwidth / ranks, processor=processor),
        link=replace(link, down=link.down / ranks, up=link.up / ranks),
    )
