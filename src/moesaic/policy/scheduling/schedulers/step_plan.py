"""Turns a schedule into actions: chunks into the arrays of a StepPlan, admitted sequences into an Admit."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np

from moesaic.core.tokens import STATE_FIELDS, IntArray, TokenBatch
from moesaic.policy.scheduling.batching import Chunk
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Admit,
    KeepPrefixes,
    ReadPrefix,
    Restore,
    StepPlan,
    sample_rows,
)
from moesaic.policy.scheduling.sequence import Sequence


def plan_step(step: int, chunks: list[Chunk], blocks: KVBlocks) -> StepPlan:
    """The plan of a step with these chunks. Chunk i becomes sequence i of the batch.

    Example: block_size 4. A has 6 tokens, of which 5 are computed. B is a new prompt of 7 tokens, of which 3
    rows fit. The chunks [(A, 1), (B, 3)] give positions [5, 0, 1, 2], query_starts [0, 1, 4], context_lens
    [6, 3], sampled [0] (only A's newest token is in the step), logit_rows [0] and following [NO_TOKEN, B's
    fourth token].
    """
    if not chunks:
        return _empty_plan(step)
    sequences = [sequence for sequence, _ in chunks]
    starts = _ints([sequence.num_computed for sequence in sequences])
    ends = starts + _ints([rows for _, rows in chunks])
    draft_lengths = _ints([len(sequence.draft_tokens) for sequence in sequences])
    # Only a sequence whose newest token is in the step gets a next token. Drafted tokens come after it.
    newest_ends = ends - draft_lengths
    sampled = np.flatnonzero(newest_ends == _ints([sequence.num_tokens for sequence in sequences]))
    scored = np.flatnonzero([sequence.next_rows_need_scores for sequence in sequences])
    num_draft_tokens = draft_lengths[sampled]
    following = [
        sequence.token_at(end) for sequence, end in zip(sequences, newest_ends.tolist(), strict=True)
    ]
    return StepPlan(
        step,
        _token_batch(chunks, starts, ends, blocks, sampled, scored, num_draft_tokens),
        _ints([sequence.request_id for sequence in sequences]),
        _ints([sequence.epoch for sequence in sequences]),
        sampled,
        scored,
        num_draft_tokens if num_draft_tokens.any() else num_draft_tokens[:0],
        _ints(following),
    )


def _token_batch(
    chunks: list[Chunk],
    starts: IntArray,
    ends: IntArray,
    blocks: KVBlocks,
    sampled_sequences: IntArray,
    scored_sequences: IntArray,
    num_draft_tokens: IntArray,
) -> TokenBatch:
    """The rows of these chunks. starts, ends: [s] positions of each chunk's first row, and after its last."""
    request_ids = [sequence.request_id for sequence, _ in chunks]
    query_starts = np.concatenate([[0], np.cumsum(ends - starts)])
    return TokenBatch(
        token_ids=np.concatenate([sequence.next_rows(rows) for sequence, rows in chunks]),
        positions=np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], ends - starts),
        query_starts=query_starts,
        context_lens=ends,
        block_tables=_block_tables([blocks.table(request_id) for request_id in request_ids]),
        logit_rows=_logit_rows(query_starts, sampled_sequences, scored_sequences, num_draft_tokens),
        states=_states([blocks.states(request_id) for request_id in request_ids]),
    )


def _empty_plan(step: int) -> StepPlan:
    """A plan without rows, for a worker that only takes part in the steps of others."""
    empty, starts = _ints([]), _ints([0])
    batch = TokenBatch(empty, empty, starts, empty, np.zeros((0, 0), dtype=np.int64), empty)
    return StepPlan(step, batch, empty, empty, empty, empty, empty, empty)


def _ints(values: Ordered[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _block_tables(tables: list[IntArray]) -> IntArray:
    """[s, longest] one block table per row, padded with 0."""
    block_tables = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    return block_tables


def _states(lines: list[tuple[int, ...]]) -> IntArray:
    """[s, 4] the states of each sequence; no lines if the sequences have none."""
    return np.array([line for line in lines if line], dtype=np.int64).reshape(-1, STATE_FIELDS)


def _logit_rows(
    query_starts: IntArray,
    sampled_sequences: IntArray,
    scored_sequences: IntArray,
    num_draft_tokens: IntArray,
) -> IntArray:
    """The rows that tokens may be sampled from and all rows of each scored sequence, ascending,
    without duplicates.
    """
    sampled_rows = sample_rows(query_starts, sampled_sequences, num_draft_tokens)
    if not len(scored_sequences):
        return sampled_rows
    is_logit_row = np.zeros(query_starts[-1], dtype=bool)
    is_logit_row[sampled_rows] = True
    for sequence in scored_sequences:
        is_logit_row[query_starts[sequence] : query_starts[sequence + 1]] = True
    return np.flatnonzero(is_logit_row)


def admit(sequences: list[Sequence], now: float, blocks: KVBlocks) -> list[Action]:
    """The actions for sequences that were just admitted."""
    restore_actions = [
        Restore(
            sequence.request_id,
            sequence.restored_positions,
            blocks.table(sequence.request_id).copy(),
            blocks.states(sequence.request_id),
        )
        for sequence in sequences
        if sequence.restored_positions
    ]
    return [_admit(sequences, now), *restore_actions]


def plan_reads(reading_sequences: list[tuple[Sequence, range]], blocks: KVBlocks) -> list[Action]:
    """The actions for sequences whose KV is on the disk, and their blocks to read."""
    return [
        ReadPrefix(
            sequence.request_id,
            stored_blocks.start,
            blocks.table(sequence.request_id)[stored_blocks.start : stored_blocks.stop].copy(),
            blocks.states(sequence.request_id),
        )
        for sequence, stored_blocks in reading_sequences
    ]


def keep_prefixes(blocks: KVBlocks) -> list[Action]:
    """The action for known blocks that are stored. It is carried out before all others of an event."""
    changes = blocks.take_changes()
    return [KeepPrefixes(changes)] if changes else []


def _admit(sequences: list[Sequence], now: float) -> Admit:
    return Admit(
        requests=[sequence.request for sequence in sequences],
        generated_ids=[sequence.generated_ids for sequence in sequences],
        queue_seconds=[now - sequence.waiting_since for sequence in sequences],
        cached_tokens=[sequence.num_computed - len(sequence.restored_positions) for sequence in sequences],
        epochs=[sequence.epoch for sequence in sequences],
    )
