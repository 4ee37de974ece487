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
from moesaic.models.block import GateOutput, Projections
from moesaic.models.kvcache.paged_kv import PagedKV
from moesaic.policy.offloading.microbatch import divide


@dataclass
class MicroBatch:
    """A micro-batch: its rows, and the intermediate results that one task leaves for the next."""

    batch: TokenBatch
    origin: IntArray
    """[n] positions of its rows in the pass's batch."""
    attention: AttentionBatch
    """Attention metadata over the cache that its attention reads."""
    positions: torch.Tensor
    """[n] positions of the rows in their sequences."""
    hidden: torch.Tensor
    """[n, h] hidden states after the last layer that was computed; empty before the first layer."""
    projections: Projections | None = None
    attention_output: torch.Tensor | None = None
    """[n, Hq * dv] attention output."""
    gate_output: GateOutput | None = None
    dense: torch.Tensor | None = None
    """[n, h] output of the shared experts."""
    answers: torch.Tensor | None = None
    """[n, k, h] outputs of the routed experts, until they are merged."""
    slow_expert_ids: torch.Tensor | None = None
    """[n, k] expert ids on the slow level. Only set if the slow processor computes some experts."""
    slow_pairs: IntArray | None = None
    """[p] pairs (row * k + rank among the row's experts) whose experts the slow processor computes."""
    slow_rows: torch.Tensor | None = None
    """[n, h] rows sent to the slow level, then [p, h] the experts' outputs there."""
    local: dict[int, PagedKV] = field(default_factory=dict)
    """Layer -> the cache blocks that were loaded for its attention."""
    unsaved_rows: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    """Layer -> the rows' keys and values that must be saved to the slow level."""


class Rows(Protocol):
    """Determines which rows a pass over a step's batch computes. offload.padding adds rows."""

    @property
    def has_whole_sequences(self) -> bool:
        """True: a pass with prompts is not divided inside a sequence."""
        ...

    def add_padding(self, batch: TokenBatch) -> TokenBatch:
        """Returns the step's rows in their order, possibly with others between. The logits stay the same."""
        ...

    def contexts(self, batch: TokenBatch) -> IntArray:
        """Returns [s] tokens that attention reads, for a batch that `add_padding` returned."""
        ...


@dataclass(frozen=True)
class UnpaddedRows:
    """The step's own rows, without padding."""

    @property
    def has_whole_sequences(self) -> bool:
        return False

    def add_padding(self, batch: TokenBatch) -> TokenBatch:
        return batch

    def contexts(self, batch: TokenBatch) -> IntArray:
        return batch.context_lens


UNPADDED = UnpaddedRows()


def divide_by_sequences(batch: TokenBatch, largest: int) -> list[tuple[TokenBatch, IntArray]]:
    """Divides a batch into micro-batches of at most `largest` sequences with balanced cached tokens.

    Returns each micro-batch with the positions of its rows in `batch`. This is Algorithm 2 of MoE-Lightning
    as implemented in policy/offloading/microbatch.py; nothing is padded.
    """
    lengths = batch.context_lens.tolist()
    count = -(-len(lengths) // largest)
    division = divide(lengths, [0] * len(lengths), count, largest, cache=sum(lengths))
    return [_select_sequences(batch, sorted(sequence_ids)) for sequence_ids in division.micro_batches]


def divide_by_rows(
    batch: TokenBatch, largest: int, whole_sequences: bool
) -> list[tuple[TokenBatch, IntArray]]:
    """Divides a batch into micro-batches of consecutive rows, at most `largest` each and similar in size.

    Returns each micro-batch with the positions of its rows in `batch`. whole_sequences: no sequence is cut,
    and a sequence with more than `largest` rows is a micro-batch of its own. Otherwise sequences may be cut.
    Then the micro-batches must be computed in order in each layer, because later rows attend to earlier ones.
    """
    if whole_sequences:
        return [
            _select_sequences(batch, group)
            for group in _group_sequences(np.diff(batch.query_starts).tolist(), largest)
        ]
    count = -(-batch.num_rows // largest)
    cuts = [index * batch.num_rows // count for index in range(count + 1)]
    return [(batch.rows(start, stop), np.arange(start, stop)) for start, stop in pairwise(cuts)]


def divide_by_context(
    batch: TokenBatch, contexts: IntArray, largest: int, whole_sequences: bool
) -> list[tuple[TokenBatch, IntArray]]:
    """Divides a batch into micro-batches of consecutive rows, at most `largest` tokens of context each.

    It is for a cache that is loaded per micro-batch. Returns each micro-batch with the positions of its rows
    in `batch`. contexts: [s] tokens of each sequence, with those of this step. A sequence with more than
    `largest` new rows is cut, unless `whole_sequences`. A piece with a longer context is a micro-batch of its
    own.
    """
    cuts, piece_tokens = [0], 0
    starts = batch.query_starts.tolist()
    for (start, stop), context in zip(pairwise(starts), contexts.tolist(), strict=True):
        # Pieces of similar size: a short last piece would load the whole context for few rows.
        count = 1 if whole_sequences else -(-(stop - start) // largest)
        ends = [start + (piece + 1) * (stop - start) // count for piece in range(count)]
        for begin, end in pairwise([start, *ends]):
            tokens = context - (stop - end)
            if cuts[-1] < begin and piece_tokens + tokens > largest:
                cuts.append(begin)
                piece_tokens = 0
            piece_tokens += tokens
    return [(batch.rows(*rows), np.arange(*rows)) for rows in pairwise([*cuts, batch.num_rows])]


def is_cut(batch: TokenBatch, micro_batches: Sequence[tuple[TokenBatch, IntArray]]) -> bool:
    """Whether a sequence has rows in two micro-batches."""
    return not np.isin([origin[0] for _, origin in micro_batches], batch.query_starts).all()


def _select_sequences(batch: TokenBatch, sequence_ids: Sequence[int]) -> tuple[TokenBatch, IntArray]:
    starts = batch.query_starts
    rows = [np.arange(starts[index], starts[index + 1]) for index in sequence_ids]
    return batch.sequences(sequence_ids), np.concatenate(rows)


def _group_sequences(rows: Sequence[int], largest: int) -> list[list[int]]:
    """Groups consecutive sequences. A group of several sequences has at most `largest` rows."""
    groups: list[list[int]] = []
    group_rows = largest + 1
    for index, count in enumerate(rows):
        if group_rows + count > largest:
            groups.append([])
            group_rows = 0
        groups[-1].append(index)
        group_rows += count
    return groups
