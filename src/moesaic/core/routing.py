"""Routing records: the experts that rows chose, assembled into whole requests.

A row is one token of one request with the experts that it chose in every layer. Rows arrive step by step.
The rows of a request arrive in any order, and some twice (computed again after a preemption). `Assembly`
puts them together.
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

ENDED = -1
"""Position of a record which says that the request has ended; its prompt had `token` tokens."""

Rows = npt.NDArray[np.void]
"""[n] records of RoutedModel.row."""
RowSink = Callable[[Rows], None]
"""Receives rows as they are computed."""


@dataclass(frozen=True)
class RoutedModel:
    """The model that rows belong to: the sizes that a profile has too."""

    model: str
    """Its fingerprint, as in a placement."""
    vocab_size: int
    num_experts: int
    top_k: int
    layers: tuple[int, ...]
    """Numbers of the layers with routed experts, ascending."""
    hidden: int = 0
    """Size of a row between layers; 0: unknown."""

    @cached_property
    def row(self) -> np.dtype[np.void]:
        """A record: experts [layers, k] best first, token id, position from 0, request.

        `request` is the id + 1, so that memory full of zeros holds no records. It is written last.
        """
        experts = ("experts", "<i2", (len(self.layers), self.top_k))
        return np.dtype([experts, ("token", "<i4"), ("position", "<i4"), ("request", "<i8")])


def draw(number: int, seed: int) -> float:
    """A fraction below 1, distributed evenly over numbers; the same for the same arguments (SplitMix64).

    Example: of the numbers 0 to 9999, 513 get less than 0.05 with seed 0.
    """
    mask = (1 << 64) - 1
    state = ((number + 1) * 0x9E3779B97F4A7C15 + seed * 0xD1342543DE82EF95) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return float((state ^ (state >> 31)) >> 11) / float(1 << 53)


def ending(model: RoutedModel, request: int, prompt: int) -> Rows:
    """The record which says that request `request`, with a prompt of `prompt` tokens, has ended."""
    row = np.zeros(1, model.row)
    row["request"], row["position"], row["token"] = request + 1, ENDED, prompt
    return row


class Assembly:
    """The rows of requests under way, and of those that ended since the last `take`."""

    def __init__(self, model: RoutedModel, most_bytes: int) -> None:
        """most_bytes: memory for rows. Requests that need more are given up, the longest first."""
        self._model = model
        self._most = max(1, most_bytes // model.row.itemsize)
        self._rows: list[Rows] = []
        self._held = 0
        self._left_out: set[int] = set()
        """Requests that were given up and have not ended."""
        self.given_up = 0
        """Number of requests given up so far."""

    def add(self, rows: Rows) -> None:
        """Add rows in the order in which they were computed. The array is kept."""
        self._rows.append(rows)
        self._held += len(rows)

    @property
    def full(self) -> bool:
        """True if it holds more than it should: `take` is due."""
        return self._held > self._most

    def take(self) -> tuple[IntArray, Routes]:
        """The ids of the requests that have ended, ascending, and their routes. Missing rows are left out.

        Example: rows of request 3 at positions 0, 1, 1 and its end, one row of request 4 -> ids [3], two
        tokens; request 4 stays.
        """
        rows = np.concatenate([np.zeros(0, self._model.row), *self._rows])
        if self._left_out:
            rows = rows[~np.isin(rows["request"], list(self._left_out)) | (rows["position"] == ENDED)]
        rows = rows[np.lexsort((rows["position"], rows["request"]))]
        again = np.zeros(len(rows), dtype=bool)
        if len(rows):
            same = rows["request"][1:] == rows["request"][:-1]
            again[:-1] = same & (rows["position"][1:] == rows["position"][:-1])
        ends = rows[rows["position"] == ENDED]
        self._left_out.difference_update(ends["request"].tolist())
        over = np.isin(rows["request"], ends["request"])
        self._keep(rows[~over & ~again])
        return _routes(rows[over & ~again & (rows["position"] != ENDED)], ends)

    def _keep(self, rows: Rows) -> None:
        """Keep these rows, or as many of them as half of the memory holds."""
        requests, counts = np.unique(rows["request"], return_counts=True)
        if len(rows) > self._most:
            order = np.argsort(counts, kind="stable")
            lost = requests[order[np.cumsum(counts[order]) > self._most // 2]]
            rows = rows[~np.isin(rows["request"], lost)]
            self._left_out.update(lost.tolist())
            self.given_up += len(lost)
        self._rows, self._held = [rows], len(rows)


def _routes(rows: Rows, ends: Rows) -> tuple[IntArray, Routes]:
    """The routes of ended requests. rows: sorted by request and position, without duplicates. ends: the
    records of their ends."""
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


def joined(model: RoutedModel, parts: list[Routes]) -> Routes:
    """All of these, one after another."""
    lengths: list[Any] = [np.diff(part.starts) for part in parts]
    nothing = np.zeros(0, dtype=np.int64)
    experts = np.zeros((0, len(model.layers), model.top_k), dtype=np.int16)
    return Routes(
        tokens=np.concatenate([nothing.astype(np.int32), *(part.tokens for part in parts)]),
        starts=np.concatenate([[0], np.cumsum(np.concatenate([nothing, *lengths]))]).astype(np.int64),
        prompts=np.concatenate([nothing, *(part.prompts for part in parts)]),
        topics=np.concatenate([nothing.astype(np.int16), *(part.topics for part in parts)]),
        experts=np.concatenate([experts, *(part.experts for part in parts)]),
    )
