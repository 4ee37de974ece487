"""One step through the model: the stages of every block, in order, layer after layer."""

from __future__ import annotations

import torch

from moesaic.core.tokens import TokenBatch
from moesaic.experts.client import RoutedExperts
from moesaic.kernels.batch import AttentionBatch
from moesaic.kvcache.paged import PagedKV
from moesaic.models.model import Model


def forward(
    model: Model,
    experts: RoutedExperts,
    kv: PagedKV,
    batch: TokenBatch,
    block_size: int,
    device: torch.device,
) -> torch.Tensor:
    """Hidden states [m, h] of the batch's logit_rows after the last block, before the final norm.

    Writes the keys and values of all rows into `kv`.
    """
    attention = AttentionBatch.build(batch, block_size, device)
    positions = torch.from_numpy(batch.positions).to(device)
    hidden = model.embed(torch.from_numpy(batch.token_ids).to(device))
    for layer, block in enumerate(model.blocks):
        rows = block.pre_attention(hidden, positions)
        kv.write(layer, rows.key, rows.value, attention.slots)
        attended = block.attention(rows.query, kv.keys(layer), kv.values(layer), attention)
        gated = block.gate(hidden, block.output_projection(attended))
        if gated.expert_ids is None:
            hidden = block.merge(gated, block.dense(gated.normed), None)
            continue
        ticket = experts.submit(layer, gated.normed, gated.expert_ids)
        dense = block.dense(gated.normed)
        answer = experts.poll(ticket)
        while answer is None:
            answer = experts.poll(ticket)
        hidden = block.merge(gated, dense, answer)
    return hidden[torch.from_numpy(batch.logit_rows).to(device)]
