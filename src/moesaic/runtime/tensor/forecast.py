"""Which rank each row is scattered to, layer after layer: the tables of a profile, asked step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.collectives.group import Group
from moesaic.core.tables import Tables
from moesaic.core.tokens import IntArray
from moesaic.policy import predict
from moesaic.policy.shuffle import Align, Shuffle, plan
from moesaic.runtime.tensor.counted import Counted


class Forecast:
    """Of the rows of one step. All ranks make the same one: they know the same."""

    def __init__(
        self,
        group: Group,
        counted: Counted,
        tables: Tables | None = None,
        align: Align = "move",
        expert_ranks: int = 1,
    ) -> None:
        """tables: None: nothing is expected, rows are scattered in the batch's order. expert_ranks: that
        share an expert; rows that are expected there take turns among them."""
        self._group, self._tables = group, tables
        self._align: Align = align if tables is not None else "none"
        self._index = {} if tables is None else {layer: i for i, layer in enumerate(tables.layers)}
        self._expert_ranks = expert_ranks
        self._tokens: IntArray = np.zeros(0, dtype=np.int64)
        self._past: list[IntArray] = []
        """Ranks of the rows in the last routed layers, two at most."""
        self._counted = counted

    @property
    def name(self) -> str:
        """Of the form that it makes."""
        return "reduce-scatter" if self._tables is None else f"shuffled ({self._align})"

    def begin(self, token_ids: IntArray) -> None:
        """Another step, of these rows [n]. Ids beyond the tables' vocabulary are taken for its last one."""
        last = 0 if self._tables is None else self._tables.vocab_size - 1
        self._tokens, self._past = np.minimum(token_ids, last), []

    def shuffle(self, layer: int) -> Shuffle:
        """Where the rows go in this layer."""
        count = len(self._tokens)
        if self._tables is None:
            zeros = np.zeros(count, dtype=np.int64)
            return plan(zeros, zeros, self._group.size, "none")
        history = np.stack(self._past, axis=1) if len(self._past) == 2 else None
        ranks, sure = predict.predict(self._tables, self._index[layer], self._tokens, history)
        ranks = ranks * self._expert_ranks + np.arange(count) % self._expert_ranks
        found = plan(ranks, sure, self._group.size, self._align)
        self._counted.shuffled_rows += count
        self._counted.kept_rows += found.kept
        return found

    def learn(self, layer: int, expert_ids: npt.NDArray[Any], shuffle: Shuffle) -> None:
        """The gate has spoken for this rank's rows [m, k]: every rank gets to know where all rows were, if
        another layer follows."""
        if self._tables is None or layer == self._tables.layers[-1]:
            return
        owners = self._tables.experts[self._index[layer]]
        mine = predict.device(expert_ids, owners, self._tables.ranks)
        self._past = [*self._past[-1:], self._group.gather_notes(mine, shuffle.order)]
