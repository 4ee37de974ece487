"""Builds a profile while requests arrive: it counts all of them, and keeps as many routes as
fit into memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from moesaic.core.profile import Counts, Profile, Routes, TokenArray, transitions
from moesaic.core.routing import RoutedModel, draw, joined

COUNTED_AT_ONCE = 8192
"""Minimum number of tokens that are counted together.

Merging takes time in proportion to the size of the counts. So more tokens are collected once the counts are
larger than this.
"""


class Tally:
    """Counts every request, and keeps a uniform sample of their routes.

    Each request draws a number, and the requests with the lowest numbers stay in the sample. The sample
    shrinks as the counts grow. Once the counts alone need all of the memory, nothing more is counted.
    """

    def __init__(self, model: RoutedModel, most_bytes: int, seed: int = 0) -> None:
        """most_bytes: maximum memory of counts and routes together."""
        self._model = model
        self._most = most_bytes
        self._seed = seed
        nothing = joined(model, [])
        self._counts = self._count_of(nothing)
        self._transitions = transitions(nothing.experts, model.num_experts)
        self._pending: list[Routes] = []
        self._kept: list[tuple[float, int, Routes]] = []
        """A heap of (minus its draw, number of the request, its routes)."""
        self._sample_bytes = self._waiting = 0
        self._limit = 1.0
        """Requests that draw this number or a higher one are not kept."""
        self.requests = self.tokens = 0
        """Number of requests and tokens that were counted."""
        self.left_out = 0
        """Requests that arrived when the memory was full."""

    @property
    def full(self) -> bool:
        """Whether nothing more is counted."""
        return self._count_bytes > self._most

    def add(self, routes: Routes) -> None:
        """Count more requests."""
        if self.full:
            self.left_out += routes.requests
            return
        for index in range(routes.requests):
            self._keep(routes, index)
        self.requests += routes.requests
        self.tokens += len(routes.tokens)
        self._pending.append(routes)
        self._waiting += len(routes.tokens)
        enough = max(COUNTED_AT_ONCE, len(self._counts[0].experts) // self._model.top_k)
        if self._waiting >= enough or sum(map(_bytes, self._pending)) > self._most // 8:
            self._count()
        self._fit()

    def profile(self, topics: Sequence[str] = (), nearest: TokenArray | None = None) -> Profile:
        """The profile of all requests so far. topics, nearest: as in Profile."""
        self._count()
        self._fit()
        model = self._model
        kept = [routes for _, _, routes in sorted(self._kept, key=lambda one: one[1])]
        return Profile(
            model=model.model,
            vocab_size=model.vocab_size,
            num_experts=model.num_experts,
            top_k=model.top_k,
            layers=model.layers,
            counts=self._counts,
            transitions=self._transitions.copy(),
            routes=joined(model, kept),
            topics=tuple(topics),
            nearest=nearest,
            hidden=model.hidden,
        )

    @property
    def known(self) -> TokenArray:
        """Token ids that were seen, ascending."""
        self._count()
        return self._counts[0].known.astype(np.int32)

    @property
    def _count_bytes(self) -> int:
        return sum(_bytes(part) for part in self._counts) + self._transitions.nbytes

    def _keep(self, routes: Routes, index: int) -> None:
        number = self.requests + index
        drawn = draw(number, self._seed)
        if drawn < self._limit:
            one = routes.of([index])
            heapq.heappush(self._kept, (-drawn, number, one))
            self._sample_bytes += _bytes(one)

    def _fit(self) -> None:
        """Drop routes until counts and routes fit into the memory."""
        room = self._most - self._count_bytes - sum(map(_bytes, self._pending))
        while self._kept and self._sample_bytes > room:
            drawn, _, one = heapq.heappop(self._kept)
            self._limit = -drawn
            self._sample_bytes -= _bytes(one)

    def _count(self) -> None:
        if not self._pending:
            return
        routes, self._pending, self._waiting = joined(self._model, self._pending), [], 0
        more = self._count_of(routes)
        self._counts = tuple(old + new for old, new in zip(self._counts, more, strict=True))
        self._transitions += transitions(routes.experts, self._model.num_experts)

    def _count_of(self, routes: Routes) -> tuple[Counts, ...]:
        model = self._model
        return tuple(
            Counts.of(routes.tokens, routes.experts[:, layer], model.vocab_size, model.num_experts)
            for layer in range(len(model.layers))
        )


def _bytes(arrays: Counts | Routes) -> int:
    """Bytes of all its arrays."""
    return sum(int(getattr(arrays, field.name).nbytes) for field in fields(arrays))
