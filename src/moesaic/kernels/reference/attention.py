"""Causal attention over a paged KV cache, for rows of many sequences at once.

The cache has the layout of PagedAttention (Kwon et al. 2023): a sequence's tokens are stored in the blocks of
its block table. Query heads that share a key head (grouped-query attention, Ainslie et al. 2023) become rows
of one product, so keys are never repeated.

Question: Where is paged attention computed?
"""

from __future__ import annotations

import torch
from torch.nn import functional

from moesaic.kernels.batch import AttentionBatch, Chunk, DecodeGroup
from moesaic.kernels.cache import width_of
from moesaic.kernels.reference.cache import decode

SCORE_NUMBERS = 1 << 22
"""Maximum number of scores (or mask entries) that a chunk holds at once: 16 MiB in float32."""
STEP_ROWS = 128
"""Rows of a chunk that are computed at once. Each step attends up to its last row."""


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    value_width: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of each row over its own sequence, up to its own position.

    query [n, Hq, dk] float32. keys [blocks, block_size, Hkv, dk] and values [blocks, block_size, Hkv, dv] in
    any float type, or in int8 with a scale after each row (`kernels.cache`). They already contain this step's
    rows. values None: the value is the first `value_width` numbers of the key (latent attention). A row
    attends to the last `sliding_window` tokens, including itself; None means all. sinks: [Hq] float32, a
    score of each head beside those of the tokens. It takes its part of the softmax and has no value
    (gpt-oss). Returns float32 [n, Hq, dv].
    """
    width = value_width if value_width is not None else width_of(keys if values is None else values)
    output = query.new_empty(query.shape[0], query.shape[1], width)
    for group in batch.decode:
        blocks, begin = _window(group, batch.block_size, sliding_window)
        key, value = _gather(keys, values, blocks, width)
        position = begin[:, None] + torch.arange(key.shape[1], device=key.device)
        attention_mask = position < group.lengths[:, None]
        if sliding_window is not None:
            attention_mask &= position >= group.lengths[:, None] - sliding_window
        for cache_rows in (key, value):  # other requests' rows, which may be NaN: 0 * NaN is NaN
            cache_rows.masked_fill_(~attention_mask[:, :, None, None], 0.0)
        rows = query[group.rows].view(len(key), key.shape[2], -1, query.shape[2])
        output[group.rows] = _attend(rows, key, value, attention_mask[:, None], scale, sinks).flatten(1, 2)
    for chunk in batch.chunks:
        _chunk(query, keys, values, chunk, scale, sliding_window, sinks, output)
    return output


def _gather(
    keys: torch.Tensor, values: torch.Tensor | None, blocks: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens of blocks [g, w]: keys [g, t, Hkv, dk] and values [g, t, Hkv, dv], float32."""
    flat = blocks.reshape(-1)
    key = decode(keys.index_select(0, flat)).view(len(blocks), -1, keys.shape[2], width_of(keys))
    if values is None:
        return key, key[..., :width]
    return key, decode(values.index_select(0, flat)).view(len(blocks), -1, values.shape[2], width)


def _window(group: DecodeGroup, block_size: int, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the blocks that a window can reach, and [g] the position of the first token in them."""
    first = torch.zeros_like(group.lengths)
    if window is None:
        return group.blocks, first
    width = min(group.blocks.shape[1], (window + block_size - 2) // block_size + 1)
    first = (group.lengths - window).clamp_(min=0) // block_size
    columns = first[:, None] + torch.arange(width, device=first.device)
    columns.clamp_(max=group.blocks.shape[1] - 1)
    return group.blocks.gather(1, columns), first * block_size


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [g, Hkv, m, dk], key [g, t, Hkv, dk], value [g, t, Hkv, dv] -> [g, Hkv, m, dv].

    The m lines of a key head are its query heads, each with the same number of rows. attention_mask: [g, m or
    1, t] mask, the same for every head. None means that each row attends to all tokens.
    """
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if attention_mask is not None and key.shape[1] > 1 and sinks is None:
        mask = attention_mask[:, None].expand(-1, -1, query.shape[2], -1)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = torch.matmul(query, key.transpose(2, 3)).mul_(scale)
    if attention_mask is not None:
        scores.masked_fill_(~attention_mask[:, None], float("-inf"))
    if sinks is None:
        return torch.matmul(scores.softmax(-1), value)
    # A sink is one more score in the softmax whose value is zero, so its column is dropped afterwards.
    of_heads = sinks.view(key.shape[1], -1)
    sink_scores = of_heads.repeat_interleave(scores.shape[2] // of_heads.shape[1], 1)[None, :, :, None]
    probs = torch.cat((scores, sink_scores.expand(len(scores), -1, -1, -1)), -1).softmax(-1)
    return torch.matmul(probs[..., :-1], value)


def _chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    chunk: Chunk,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    """Computes one chunk's rows into `output`, some rows at a time so that memory stays bounded."""
    block_size = keys.shape[1]
    begin = 0 if window is None else max(0, chunk.first - window + 1)
    skipped_blocks = begin // block_size
    key, value = _gather(keys, values, chunk.blocks[None, skipped_blocks:], output.shape[2])
    seen_by_first = slice(begin - skipped_blocks * block_size, chunk.length - skipped_blocks * block_size)
    key, value = key[:, seen_by_first], value[:, seen_by_first]
    groups = query.shape[1] // keys.shape[2]
    if chunk.stop - chunk.start == 1:
        rows = query[chunk.start].view(1, keys.shape[2], groups, -1)
        output[chunk.start] = _attend(rows, key, value, None, scale, sinks).flatten(0, 2)
        return
    # Rows up to `stop` never attend beyond it, so short steps also skip most of the masked half.
    step = max(1, min(STEP_ROWS, SCORE_NUMBERS // (key.shape[1] * groups)))
    for start in range(chunk.start, chunk.stop, step):
        stop = min(start + step, chunk.stop)
        last = chunk.first + stop - chunk.start - begin
        rows = query[start:stop].view(stop - start, keys.shape[2], groups, -1)
        rows = rows.permute(1, 2, 0, 3).reshape(1, keys.shape[2], -1, query.shape[2])
        position = torch.arange(last - (stop - start), last, device=query.device)[:, None]
        token = torch.arange(last, device=query.device)
        attention_mask = token <= position
        if window is not None:
            attention_mask &= token > position - window
        part = _attend(
            rows, key[:, :last], value[:, :last], attention_mask.repeat(groups, 1)[None], scale, sinks
        )
        part = part.view(keys.shape[2] * groups, stop - start, -1)
        output[start:stop] = part.transpose(0, 1)


def attention_plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    value_width: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes what paged_attention computes, row by row and head by head. It is slow, and tests the fast
    form."""
    width = value_width if value_width is not None else width_of(keys if values is None else values)
    output = torch.empty(query.shape[0], query.shape[1], width)
    flat = [
        (int(row), blocks, int(length))
        for group in batch.decode
        for row, blocks, length in zip(group.rows, group.blocks, group.lengths, strict=True)
    ]
    for chunk in batch.chunks:
        flat += [
            (row, chunk.blocks, chunk.first + row - chunk.start + 1) for row in range(chunk.start, chunk.stop)
        ]
    for row, blocks, length in flat:
        first = 0 if sliding_window is None else max(0, length - sliding_window)
        key = decode(keys[blocks].flatten(0, 1)[first:length])
        value = key[..., :width] if values is None else decode(values[blocks].flatten(0, 1)[first:length])
        for head in range(query.shape[1]):
            kv_head = head * keys.shape[2] // query.shape[1]
            scores = (key[:, kv_head] @ query[row, head]) * scale
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1]))
            output[row, head] = scores.softmax(0)[: len(key)] @ value[:, kv_head]
    return output
