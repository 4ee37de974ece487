"""Chooses the rank that each row is scattered to, layer after layer, from the tables of a profile."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from moesaic.core.tables import Tables
from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import Group
from moesaic.policy.placement import predict
from moesaic.policy.placement.shuffle import Align, Shuffle, plan
from moesaic.runtime.group.arrays import to_host
from moesaic.runtime.group.experts import GroupCounts

NO_TOKENS: IntArray = np.zeros(0, dtype=np.int64)


class RowAssignment(Protocol):
    """Assigns the rows of a step to ranks."""

    def max_rows(self, rows: int) -> int:
        """The most rows of a rank in a step of so many."""
        ...

    def begin(self, token_ids: IntArray) -> None:
        """A step with these rows [n] begins."""
        ...

    def shuffle(self, layer: int) -> Shuffle:
        """Where the rows go in this layer."""
        ...

    def learn(self, layer: int, expert_ids: torch.Tensor, shuffle: Shuffle) -> None:
        """The gate chose these experts [m, k] for the rows of this rank."""
        ...


class ExpectedRanks:
    """Rows go where the tables expect their experts. All ranks know the same, so they agree."""

    def __init__(
        self, group: Group, counts: GroupCounts, tables: Tables, align: Align = "move", expert_ranks: int = 1
    ) -> None:
        """expert_ranks: the ranks that share an expert. Rows that go there are spread over them in turn."""
        self._group, self._counts, self._tables = group, counts, tables
        self._align, self._expert_ranks = align, expert_ranks
        self._index = {layer: i for i, layer in enumerate(tables.layers)}
        self._tokens = NO_TOKENS
        self._past: list[IntArray] = []
        """The ranks of the rows in the last routed layers, at most two."""

    def begin(self, token_ids: IntArray) -> None:
        """Ids beyond the tables' vocabulary count as its last token."""
        self._tokens, self._past = np.minimum(token_ids, self._tables.vocab_size - 1), []

    def max_rows(self, rows: int) -> int:
        return rows if self._align == "variable" else -(-rows // self._group.size)

    def shuffle(self, layer: int) -> Shuffle:
        count = len(self._tokens)
        if layer not in self._index:  # one that only drafts tokens
            zeros = np.zeros(count, dtype=np.int64)
            return plan(zeros, zeros, self._group.size, "none")
        # The tables predict from two layers, so the first two layers have no history.
        history = np.stack(self._past, axis=1) if len(self._past) == 2 else None
        ranks, sure = predict.predict(self._tables, self._index[layer], self._tokens, history)
        ranks = ranks * self._expert_ranks + np.arange(count) % self._expert_ranks
        new_shuffle = plan(ranks, sure, self._group.size, self._align)
        self._counts.shuffled_rows += count
        self._counts.kept_rows += new_shuffle.num_kept
        return new_shuffle

    def learn(self, layer: int, expert_ids: torch.Tensor, shuffle: Shuffle) -> None:
        """Tell every rank where all rows were, unless this is the last layer."""
        if layer not in self._index or layer == self._tables.layers[-1]:
            return
        owners = self._tables.experts[self._index[layer]]
        own_ranks = predict.device(to_host(expert_ids), owners, self._tables.ranks)
        self._past = [*self._past[-1:], self._group.gather_notes(own_ranks, shuffle.order)]
