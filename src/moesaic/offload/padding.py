"""Requests padded to the longest prompt, to measure what that costs: MoE-Lightning(p), section 5.

Padding stands behind a request's tokens, where no token sees it: each row has the bits that it has without.

 * Cache: a request holds blocks for the longest prompt and its own answer so far (`PaddedBlocks`).
 * Prompts: where one ends, rows of padding follow it up to the longest one's length. They go through all
   operations of every layer, are written to those blocks and attend to what is before them (`Padding`).
 * Decoding: a token stays one row. Its attention also goes over the blocks of padding behind its request's
   tokens, in a call of its own whose result is dropped (`Padded`), and they move with the others.

Not padded: logits, sampling, answers that end early. A sliding window bounds tokens and padding apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.models.block import Block
from moesaic.offload.caches import Attending, BoolArray, Moving, Resident
from moesaic.offload.parts import Part
from moesaic.policy.scheduling.kvblocks import KVBlocks

TOKEN = 0
"""What rows of padding embed."""


class PaddedBlocks(KVBlocks):
    """Each request also holds blocks for the tokens that its prompt lacks to the longest one.

    Padding that finds no block is left out before a request has to leave for it. A request that comes back
    after it left has all tokens that it had as its prompt.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_reuse: bool, longest: int) -> None:
        """longest: tokens of the longest prompt, for which the pool has to have blocks."""
        super().__init__(num_blocks, block_size, prefix_reuse)
        self._longest = longest
        self._lacking: dict[int, int] = {}
        """Request -> tokens of padding."""

    def capacity(self, request_id: int) -> int:
        return super().capacity(request_id) - self._lacking[request_id]

    def allocate(self, request_id: int, token_ids: IntArray, reusable: int, spare: int = 0) -> int | None:
        tokens = len(token_ids)
        lacking = max(self._longest - tokens, 0)
        more = self.blocks_for(tokens + lacking) - self.blocks_for(tokens)
        cached = super().allocate(request_id, token_ids, reusable, spare + more)
        if cached is not None:
            self._lacking[request_id] = lacking
            self.extend(request_id, tokens)
        return cached

    def extend(self, request_id: int, num_tokens: int) -> bool:
        lacking = self._lacking[request_id]
        return super().extend(request_id, num_tokens + lacking) or super().extend(request_id, num_tokens)

    def free(self, request_id: int) -> None:
        del self._lacking[request_id]
        super().free(request_id)


def block_pool(num_blocks: int, block_size: int, prefix_reuse: bool, padded: int | None) -> KVBlocks:
    """The pool of a worker. padded: tokens that each prompt is padded to; None: nothing is."""
    if padded is None:
        return KVBlocks(num_blocks, block_size, prefix_reuse)
    return PaddedBlocks(num_blocks, block_size, prefix_reuse, padded)


def decoding(batch: TokenBatch) -> npt.NDArray[np.bool_]:
    """[s] whose one row is not a sequence's first: prompts are not cut so small where they are padded."""
    alone: npt.NDArray[np.bool_] = (np.diff(batch.query_starts) == 1) & (batch.context_lens > 1)
    return alone


def behind(batch: TokenBatch, block_size: int) -> IntArray:
    """[s] whole blocks of padding behind the tokens of sequences that decode; others have rows for theirs.

    A table ends with the last block that is not 0: padding in block 0 does not count there.
    """
    width = batch.block_tables.shape[1]
    held = ((batch.block_tables != 0) * np.arange(1, width + 1)).max(axis=1, initial=0)
    own = -(-batch.context_lens // block_size)
    found: IntArray = np.where(decoding(batch), np.maximum(held - own, 0), 0)
    return found


@dataclass(frozen=True)
class Padding:
    """The rows of a pass over requests of a `PaddedBlocks`; see `offload.parts.Rows`."""

    longest: int
    """Tokens that each prompt is padded to."""
    block_size: int

    @property
    def whole(self) -> bool:
        """Its micro-batches are of requests, as in the paper."""
        return True

    def of(self, batch: TokenBatch) -> TokenBatch:
        """Behind each prompt that ends in this pass the rows that it lacks.

        Example: longest 4; a prompt of 2 tokens and one row at position 5 become rows at 0, 1, 2, 3 and 5.
        """
        counts, ends = np.diff(batch.query_starts), batch.query_starts[1:] - 1
        ended = ~decoding(batch) & np.isin(ends, batch.logit_rows)
        added = np.where(ended, np.maximum(self.longest - batch.context_lens, 0), 0)
        starts = np.concatenate([[0], np.cumsum(counts + added)])
        shift = np.repeat(starts[:-1] - batch.query_starts[:-1], counts)
        real = np.arange(batch.num_rows) + shift
        token_ids = np.full(starts[-1], TOKEN)
        token_ids[real] = batch.token_ids
        first = batch.context_lens - counts
        return replace(
            batch,
            token_ids=token_ids,
            positions=np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts + added),
            query_starts=starts,
            context_lens=batch.context_lens + added,
            logit_rows=real[batch.logit_rows],
        )

    def contexts(self, batch: TokenBatch) -> IntArray:
        """[s] tokens that attention goes over, of a batch that `of` returned."""
        return batch.context_lens + behind(batch, self.block_size) * self.block_size


@dataclass(frozen=True)
class PaddedAttention(AttentionBatch):
    """A micro-batch, and beside it what its rows that decode also attend to."""

    rows: torch.Tensor
    """[d] of the micro-batch: those that decode with padding behind."""
    padding: AttentionBatch
    """[d] sequences of one row over that padding."""


class Padded(Attending):
    """A cache with padding in it."""

    def _over(
        self, block: Block, keys: torch.Tensor, values: torch.Tensor | None, part: Part
    ) -> torch.Tensor:
        attended, seen = super()._over(block, keys, values, part), part.attention
        assert isinstance(seen, PaddedAttention) and part.projected is not None
        if len(seen.rows):
            block.attention(part.projected.query[seen.rows], keys, values, seen.padding)
        return attended


class PaddedResident(Padded, Resident):
    """It stays."""

    def attention(self, batch: TokenBatch) -> AttentionBatch:
        size = self._block_size
        return _beside(super().attention(batch), _behind(batch, behind(batch, size), size))


class PaddedMoving(Padded, Moving):
    """It comes down for attention, and so does the padding that is attended to."""

    def attention(self, batch: TokenBatch) -> AttentionBatch:
        size = self._block_size
        return _beside(super().attention(batch), _behind(self._here(batch), behind(batch, size), size))

    def _blocks(self, batch: TokenBatch) -> tuple[BoolArray, BoolArray]:
        known, held = super()._blocks(batch)
        place, own = np.arange(held.shape[1]), held.sum(axis=1)[:, None]
        padding = (place >= own) & (place < own + behind(batch, self._block_size)[:, None])
        return known | padding, held | padding


def _beside(real: AttentionBatch, padding: TokenBatch) -> PaddedAttention:
    """padding: one row for each of `real`'s that decode, whose place it has as its token."""
    lines = torch.from_numpy(padding.token_ids).to(real.device)
    beside = AttentionBatch.build(padding, real.block_size, real.device)
    return PaddedAttention(real.batch, real.block_size, real.device, real.slots, lines, beside)


def _behind(batch: TokenBatch, counts: IntArray, block_size: int) -> TokenBatch:
    """One row for each sequence with padding, over its blocks of padding alone. counts: [s] how many. Tokens
    are the places of the rows that decode."""
    chosen = np.flatnonzero(counts)
    tables = np.zeros((len(chosen), counts.max(initial=0)), np.int64)
    for table, index in zip(tables, chosen.tolist(), strict=True):
        own = -(-int(batch.context_lens[index]) // block_size)
        table[: counts[index]] = batch.block_tables[index, own : own + counts[index]]
    tokens = counts[chosen] * block_size
    lines = np.arange(len(chosen) + 1)
    return TokenBatch(batch.query_starts[chosen], tokens - 1, lines, tokens, tables, lines[:0])
