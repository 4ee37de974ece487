"""Steps over scattered blocks of a paged cache."""

from __future__ import annotations

import numpy as np
import torch

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.cache import width_of
from moesaic.kernels.reference.cache import encode

NUM_BLOCKS = 400


def tokens(
    counts: list[int], contexts: list[int], block_size: int, seed: int = 0, num_blocks: int = NUM_BLOCKS
) -> TokenBatch:
    """Sequences with this many rows and cached tokens, over scattered blocks."""
    free = iter(np.random.default_rng(seed).permutation(num_blocks).tolist())
    tables = np.zeros((len(counts), max(-(-length // block_size) for length in contexts)), np.int64)
    for line, length in enumerate(contexts):
        width = -(-length // block_size)
        tables[line, :width] = [next(free) for _ in range(width)]
    pairs = list(zip(counts, contexts, strict=True))
    return TokenBatch(
        token_ids=np.zeros(sum(counts), np.int64),
        positions=np.concatenate([np.arange(length - count, length) for count, length in pairs]),
        query_starts=np.concatenate([[0], np.cumsum(counts)]),
        context_lens=np.array(contexts),
        block_tables=tables,
        logit_rows=np.arange(1),
    )


def no_tokens() -> TokenBatch:
    """A step without sequences."""
    none = np.zeros(0, np.int64)
    return TokenBatch(none, none, np.zeros(1, np.int64), none, np.zeros((0, 1), np.int64), none)


def cache(
    block_size: int, heads: int, width: int, dtype: torch.dtype = torch.float32, num_blocks: int = NUM_BLOCKS
) -> torch.Tensor:
    return encode(torch.randn(num_blocks, block_size, heads, width), dtype)


def fill(cache: torch.Tensor, slots: torch.Tensor, number: float) -> None:
    """Fills the rows at these slots with `number`."""
    rows = torch.full((1, width_of(cache)), number)
    cache.flatten(0, 1)[slots] = encode(rows, cache.dtype)


def unused(batch: AttentionBatch, slots: int) -> torch.Tensor:
    """For each slot, whether no token of a sequence is there."""
    used = torch.zeros(slots, dtype=torch.bool)
    rows = batch.batch
    for blocks, length in zip(rows.block_tables, rows.context_lens, strict=True):
        offsets = np.arange(batch.block_size)
        used[torch.from_numpy((blocks[:, None] * batch.block_size + offsets).flatten()[:length])] = True
    return ~used
