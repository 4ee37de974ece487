"""Collects routing decisions as rows are computed, and assembles them into whole requests.

A row is one token of one request, with the experts that it chose in every layer. Rows arrive step after step.
Those of a request may come in any order, and some come twice (computed again after a preemption). `Assembly`
collects them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.core.profile import NO_TOPIC, Routes
from moesaic.core.tokens import IntArray

END_POSITION = -1
"""The position of a record which says that its request ended. Its `token` is the length of the prompt."""

Rows = npt.NDArray[np.void]
"""[n] records of RoutedModel.row."""
RowSink = Callable[[Rows], None]
"""A function that receives rows as they are computed."""


@dataclass(frozen=True)
class RoutedModel:
    """The sizes of the model whose routing is recorded. A profile has them too."""

    model: str
    """The fingerprint of the model, as in a placement."""
    vocab_size: int
    num_experts: int
    top_k: int
    layers: tuple[int, ...]
    """Indices of the layers with routed experts, ascending."""
    hidden: int = 0
    """Size of a hidden state, 0 if it is not known."""

    @cached_property
    def row(self) -> np.dtype[np.void]:
        """The dtype of a record: experts [layers, k] best first, token id, position from 0, request.

        `request` is the request's id + 1, so that zeroed memory contains no rows. It is written last.
        """
        experts = ("experts", "<i2", (len(self.layers), self.top_k))
        return np.dtype([experts, ("token", "<i4"), ("position", "<i4"), ("request", "<i8")])


def draw(number: int, seed: int) -> float:
    """A pseudo-random fraction in [0, 1), spread evenly over numbers and determined by the arguments
    (SplitMix64).

    Example: with seed 0, 513 of the numbers 0 to 9999 get less than 0.05.
    """
    mask = (1 << 64) - 1
    state = ((number + 1) * 0x9E3779B97F4A7C15 + seed * 0xD1342543DE82EF95) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return float((state ^ (state >> 31)) >> 11) / float(1 << 53)


def ending(model: RoutedModel, request: int, prompt: int) -> Rows:
    """The record which says that `request`, with a prompt of `prompt` tokens, has no more rows."""
    row = np.zeros(1, model.row)
    row["request"], row["position"], row["token"] = request + 1, END_POSITION, prompt
    return row


class Assembly:
    """The rows of unfinished requests, and of those that ended since the last `take`."""

    def __init__(self, model: RoutedModel, max_bytes: int) -> None:
        """max_bytes: maximum memory for rows. Beyond it, requests are discarded, the longest first."""
        self._model = model
        self._max_rows = max(1, max_bytes // model.row.itemsize)
        self._rows: list[Rows] = []
        self._num_rows = 0
        self._discarded_requests: set[int] = set()
        """Discarded requests that have not ended (their id + 1)."""
        self.num_discarded = 0
        """Number of discarded requests."""

    def add(self, rows: Rows) -> None:
        """Add rows in the order in which they were computed. The array is kept, not copied."""
        self._rows.append(rows)
        self._num_rows += len(rows)

    @property
    def is_full(self) -> bool:
        """Whether the rows exceed the maximum memory, so that `take` should be called."""
        return self._num_rows > self._max_rows

    def take(self) -> tuple[IntArray, Routes]:
        """Remove the requests that ended. Returns their ids, ascending, and their routes, without missing
        rows.

        Example: rows of request 3 at positions 0, 1, 1 and its end, and one row of request 4. Returns ids [3]
        and two tokens. Request 4 stays.
        """
        rows = np.concatenate([np.zeros(0, self._model.row), *self._rows])
        if self._discarded_requests:
            rows = rows[
                ~np.isin(rows["request"], list(self._discarded_requests)) | (rows["position"] == END_POSITION)
            ]
        rows = rows[np.lexsort((rows["position"], rows["request"]))]
        is_duplicate = np.zeros(len(rows), dtype=bool)
        if len(rows):
            same_request = rows["request"][1:] == rows["request"][:-1]
            is_duplicate[:-1] = same_request & (rows["position"][1:] == rows["position"][:-1])
        ends = rows[rows["position"] == END_POSITION]
        self._discarded_requests.difference_update(ends["request"].tolist())
        has_ended = np.isin(rows["request"], ends["request"])
        self._keep(rows[~has_ended & ~is_duplicate])
        return _routes(rows[has_ended & ~is_duplicate & (rows["position"] != END_POSITION)], ends)

    def _keep(self, rows: Rows) -> None:
        """Keep these rows, or the shortest requests that fit into half of the memory."""
        requests, counts = np.unique(rows["request"], return_counts=True)
        if len(rows) > self._max_rows:
            order = np.argsort(counts, kind="stable")
            discarded_requests = requests[order[np.cumsum(counts[order]) > self._max_rows // 2]]
            rows = rows[~np.isin(rows["request"], discarded_requests)]
            self._discarded_requests.update(discarded_requests.tolist())
            self.num_discarded += len(discarded_requests)
        self._rows, self._num_rows = [rows], len(rows)


def _routes(rows: Rows, ends: Rows) -> tuple[IntArray, Routes]:
    """The ids and routes of ended requests.

    rows: their rows by request and position, each once. ends: the records of their ends.
    """
    requests, starts, counts = np.unique(rows["request"], return_index=True, return_counts=True)
    last = dict(zip(ends["request"].tolist(), ends["token"].tolist(), strict=True))
    lengths = np.array([last[request] for request in requests.tolist()], dtype=np.int64)
    in_prompt = rows["position"] < np.repeat(lengths, counts)
    owners = np.repeat(np.arange(len(requests)), counts)
    routes = Routes(
        tokens=rows["token"].astype(np.int32),
        starts=np.append(starts, len(rows)).astype(np.int64),
        prompts=np.bincount(owners[in_prompt], minlength=len(requests)).astype(np.int64),
        topics=np.full(len(requests), NO_TOPIC, dtype=np.int16),
        experts=np.ascontiguousarray(rows["experts"]).astype(np.int16),
    )
    return requests.astype(np.int64) - 1, routes


def join_routes(model: RoutedModel, parts: list[Routes]) -> Routes:
    """All of these routes as one, in this order."""
    lengths: list[Any] = [np.diff(part.starts) for part in parts]
    empty = np.zeros(0, dtype=np.int64)
    experts = np.zeros((0, len(model.layers), model.top_k), dtype=np.int16)
    return Routes(
        tokens=np.concatenate([empty.astype(np.int32), *(part.tokens for part in parts)]),
        starts=np.concatenate([[0], np.cumsum(np.concatenate([empty, *lengths]))]).astype(np.int64),
        prompts=np.concatenate([empty, *(part.prompts for part in parts)]),
        topics=np.concatenate([empty.astype(np.int16), *(part.topics for part in parts)]),
        experts=np.concatenate([experts, *(part.experts for part in parts)]),
    )
