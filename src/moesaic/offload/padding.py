"""Pads requests to the longest prompt, to measure what that costs: MoE-Lightning(p), section 5.

Padding comes after a request's tokens, and no token attends to it. So each row has the same bits as without.

 * Cache: a request allocates blocks for the longest prompt plus its own output so far (`PaddedBlocks`).
 * Prefill: rows of padding follow the end of each prompt, up to the longest prompt's length. They pass
   through all operations of every layer. Their keys and values are written to the cache, and they attend to
   the tokens before them (`Padding`).
 * Decode: a token is one row. Attention also runs over the blocks of padding after its request's tokens, in a
   separate call whose result is dropped (`PaddedAttention`). These blocks are copied with the others.

Not padded: logits, sampling, and answers that end early. A sliding window limits tokens and padding
separately.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.models.block import Block
from moesaic.offload.caches import BoolArray, CacheAttention, MovingCache, ResidentCache
from moesaic.offload.parts import MicroBatch
from moesaic.policy.scheduling.kvblocks import KVBlocks

TOKEN = 0
"""Token id of padding rows."""


class PaddedBlocks(KVBlocks):
    """A block pool that also allocates blocks for each request's padding up to the longest prompt.

    If there are no blocks for padding, the request gets none; padding never causes a preemption. After a
    preemption, a request's prompt consists of all tokens that it had.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_reuse: bool, longest: int) -> None:
        """longest: tokens of the longest prompt. The pool must have enough blocks for it."""
        super().__init__(num_blocks, block_size, prefix_reuse)
        self._longest = longest
        self._padding_tokens: dict[int, int] = {}
        """Request -> number of padding tokens."""

    def capacity(self, request_id: int) -> int:
        return super().capacity(request_id) - self._padding_tokens[request_id]

    def allocate(
        self, request_id: int, token_ids: IntArray, reusable: int, spare: int = 0, salt: bytes = b""
    ) -> int | None:
        tokens = len(token_ids)
        lacking = max(self._longest - tokens, 0)
        padding_blocks = self.blocks_for(tokens + lacking) - self.blocks_for(tokens)
        cached_tokens = super().allocate(request_id, token_ids, reusable, spare + padding_blocks, salt)
        if cached_tokens is not None:
            self._padding_tokens[request_id] = lacking
            self.extend(request_id, tokens)
        return cached_tokens

    def extend(self, request_id: int, num_tokens: int) -> bool:
        lacking = self._padding_tokens[request_id]
        # The second try is for a full pool: a request goes on without padding rather than be preempted.
        return super().extend(request_id, num_tokens + lacking) or super().extend(request_id, num_tokens)

    def free(self, request_id: int, valid: bool = True) -> None:
        del self._padding_tokens[request_id]
        super().free(request_id, valid)


def decoding(batch: TokenBatch) -> npt.NDArray[np.bool_]:
    """Returns a mask [s] of the sequences that decode: one row, which is not the sequence's first.

    A chunk of one row cannot be part of a prompt, since padded prompts are not cut into so small chunks.
    """
    decodes: npt.NDArray[np.bool_] = (np.diff(batch.query_starts) == 1) & (batch.context_lens > 1)
    return decodes


def count_padding_blocks(batch: TokenBatch, block_size: int) -> IntArray:
    """Returns [s] whole blocks of padding after the tokens of each decoding sequence; 0 for the others.

    Sequences in prefill have rows for their padding. A block table ends with its last nonzero entry, so
    padding in block 0 does not count there.
    """
    width = batch.block_tables.shape[1]
    allocated_blocks = ((batch.block_tables != 0) * np.arange(1, width + 1)).max(axis=1, initial=0)
    own_blocks = -(-batch.context_lens // block_size)
    padding_blocks: IntArray = np.where(decoding(batch), np.maximum(allocated_blocks - own_blocks, 0), 0)
    return padding_blocks


@dataclass(frozen=True)
class Padding:
    """Adds padding rows to passes over requests of a `PaddedBlocks`; implements `offload.parts.Rows`."""

    longest: int
    """Tokens that each prompt is padded to."""
    block_size: int

    @property
    def has_whole_sequences(self) -> bool:
        """True: micro-batches contain whole requests, as in the paper."""
        return True

    def add_padding(self, batch: TokenBatch) -> TokenBatch:
        """Adds padding rows after each prompt that ends in this pass.

        Example: longest 4; a prompt of 2 tokens and one row at position 5 become rows at 0, 1, 2, 3 and 5.
        """
        counts, ends = np.diff(batch.query_starts), batch.query_starts[1:] - 1
        ends_here = ~decoding(batch) & np.isin(ends, batch.logit_rows)
        padding_rows = np.where(ends_here, np.maximum(self.longest - batch.context_lens, 0), 0)
        starts = np.concatenate([[0], np.cumsum(counts + padding_rows)])
        shift = np.repeat(starts[:-1] - batch.query_starts[:-1], counts)
        real = np.arange(batch.num_rows) + shift
        token_ids = np.full(starts[-1], TOKEN)
        token_ids[real] = batch.token_ids
        first = batch.context_lens - counts
        return replace(
            batch,
            token_ids=token_ids,
            positions=np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts + padding_rows),
            query_starts=starts,
            context_lens=batch.context_lens + padding_rows,
            logit_rows=real[batch.logit_rows],
        )

    def contexts(self, batch: TokenBatch) -> IntArray:
        """Returns [s] tokens that attention reads, for a batch that `add_padding` returned."""
        return batch.context_lens + count_padding_blocks(batch, self.block_size) * self.block_size


@dataclass(frozen=True)
class PaddedAttention(AttentionBatch):
    """A micro-batch, together with the padding that its decoding rows attend to."""

    rows: torch.Tensor
    """[d] row numbers of the decoding rows that have padding."""
    padding: AttentionBatch
    """[d] sequences of one row each over that padding."""


class PaddedCacheAttention(CacheAttention):
    """Attention over a cache that contains padding."""

    def _compute_attention(
        self, block: Block, keys: torch.Tensor, values: torch.Tensor | None, part: MicroBatch
    ) -> torch.Tensor:
        attention_output, attention = super()._compute_attention(block, keys, values, part), part.attention
        assert isinstance(attention, PaddedAttention) and part.projections is not None
        if len(attention.rows):
            # Only the time that it takes matters: these rows have their result already.
            block.attention(part.projections.query[attention.rows], keys, values, attention.padding)
        return attention_output


class PaddedResidentCache(PaddedCacheAttention, ResidentCache):
    """A padded cache that is not copied."""

    def attention(self, batch: TokenBatch) -> AttentionBatch:
        size = self._block_size
        return _with_padding(
            super().attention(batch), _build_padding_batch(batch, count_padding_blocks(batch, size), size)
        )


class PaddedMovingCache(PaddedCacheAttention, MovingCache):
    """A padded cache whose blocks are copied for attention, padding included."""

    def attention(self, batch: TokenBatch) -> AttentionBatch:
        size = self._block_size
        return _with_padding(
            super().attention(batch),
            _build_padding_batch(self._renumber_blocks(batch), count_padding_blocks(batch, size), size),
        )

    def _blocks(self, batch: TokenBatch) -> tuple[BoolArray, BoolArray]:
        loaded_mask, used_mask = super()._blocks(batch)
        place, own_blocks = np.arange(used_mask.shape[1]), used_mask.sum(axis=1)[:, None]
        padding = (place >= own_blocks) & (
            place < own_blocks + count_padding_blocks(batch, self._block_size)[:, None]
        )
        return loaded_mask | padding, used_mask | padding


def _with_padding(real: AttentionBatch, padding: TokenBatch) -> PaddedAttention:
    """padding: one row for each decoding row of `real`; its token id is that row's number."""
    lines = torch.from_numpy(padding.token_ids).to(real.device)
    padding_attention = AttentionBatch.build(padding, real.block_size, real.device)
    return PaddedAttention(real.batch, real.block_size, real.device, real.slots, lines, padding_attention)


def _build_padding_batch(batch: TokenBatch, counts: IntArray, block_size: int) -> TokenBatch:
    """Returns one row for each sequence with padding, over its padding blocks alone.

    counts: [s] number of padding blocks. The token ids are the row numbers of the decoding rows.
    """
    sequence_ids = np.flatnonzero(counts)
    tables = np.zeros((len(sequence_ids), counts.max(initial=0)), np.int64)
    for table, index in zip(tables, sequence_ids.tolist(), strict=True):
        own_blocks = -(-int(batch.context_lens[index]) // block_size)
        table[: counts[index]] = batch.block_tables[index, own_blocks : own_blocks + counts[index]]
    tokens = counts[sequence_ids] * block_size
    lines = np.arange(len(sequence_ids) + 1)
    return TokenBatch(batch.query_starts[sequence_ids], tokens - 1, lines, tokens, tables, lines[:0])
