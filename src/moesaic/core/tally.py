"""Builds a profile while requests arrive: it counts all of them, and keeps as many routes as
fit into memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from moesaic.core.profile import Counts, Profile, Routes, TokenArray, transitions
from moesaic.core.routing import RoutedModel, draw, join_routes

MIN_COUNTED_TOKENS = 8192
"""Minimum number of tokens that are counted together.

Merging takes time in proportion to the size of the counts. So more tokens are collected once the counts are
larger than this.
"""


class Tally:
    """Counts every request, and keeps a uniform sample of their routes.

    Each request draws a number, and the requests with the lowest numbers stay in the sample. The sample
    shrinks as the counts grow. Once the counts alone need all of the memory, nothing more is counted.
    """

    def __init__(self, model: RoutedModel, max_bytes: int, seed: int = 0) -> None:
        """max_bytes: maximum memory of counts and routes together."""
        self._model = model
        self._max_bytes = max_bytes
        self._seed = seed
        empty = join_routes(model, [])
        self._counts = self._count_of(empty)
        self._transitions = transitions(empty.experts, model.num_experts)
        self._pending: list[Routes] = []
        self._sample: list[tuple[float, int, Routes]] = []
        """A heap of (minus its draw, number of the request, its routes)."""
        self._sample_bytes = self._waiting = 0
        self._limit = 1.0
        """Requests that draw this number or a higher one are not kept."""
        self.requests = self.tokens = 0
        """Number of requests and tokens that were counted."""
        self.left_out = 0
        """Requests that arrived when the memory was full."""

    @property
    def is_full(self) -> bool:
        """Whether nothing more is counted."""
        return self._count_bytes > self._max_bytes

    def add(self, routes: Routes) -> None:
        """Count more requests."""
        if self.is_full:
            self.left_out += routes.requests
            return
        for index in range(routes.requests):
            self._keep(routes, index)
        self.requests += routes.requests
        self.tokens += len(routes.tokens)
        self._pending.append(routes)
        self._waiting += len(routes.tokens)
        batch_tokens = max(MIN_COUNTED_TOKENS, len(self._counts[0].experts) // self._model.top_k)
        if self._waiting >= batch_tokens or sum(map(_bytes, self._pending)) > self._max_bytes // 8:
            self._count()
        self._fit()

    def profile(self, topics: Sequence[str] = (), nearest: TokenArray | None = None) -> Profile:
        """The profile of all requests so far. topics, nearest: as in Profile."""
        self._count()
        self._fit()
        model = self._model
        sample = [routes for _, _, routes in sorted(self._sample, key=lambda one: one[1])]
        return Profile(
            model=model.model,
            vocab_size=model.vocab_size,
            num_experts=model.num_experts,
            top_k=model.top_k,
            layers=model.layers,
            counts=self._counts,
            transitions=self._transitions.copy(),
            routes=join_routes(model, sample),
            topics=tuple(topics),
            nearest=nearest,
            hidden=model.hidden,
        )

    @property
    def known_tokens(self) -> TokenArray:
        """Token ids that were seen, ascending."""
        self._count()
        return self._counts[0].known_tokens.astype(np.int32)

    @property
    def _count_bytes(self) -> int:
        return sum(_bytes(part) for part in self._counts) + self._transitions.nbytes

    def _keep(self, routes: Routes, index: int) -> None:
        number = self.requests + index
        fraction = draw(number, self._seed)
        if fraction < self._limit:
            request_routes = routes.select([index])
            heapq.heappush(self._sample, (-fraction, number, request_routes))
            self._sample_bytes += _bytes(request_routes)

    def _fit(self) -> None:
        """Drop routes until counts and routes fit into the memory."""
        room = self._max_bytes - self._count_bytes - sum(map(_bytes, self._pending))
        while self._sample and self._sample_bytes > room:
            negated_fraction, _, request_routes = heapq.heappop(self._sample)
            self._limit = -negated_fraction
            self._sample_bytes -= _bytes(request_routes)

    def _count(self) -> None:
        if not self._pending:
            return
        routes, self._pending, self._waiting = join_routes(self._model, self._pending), [], 0
        new_counts = self._count_of(routes)
        self._counts = tuple(old + new for old, new in zip(self._counts, new_counts, strict=True))
        self._transitions += transitions(routes.experts, self._model.num_experts)

    def _count_of(self, routes: Routes) -> tuple[Counts, ...]:
        model = self._model
        return tuple(
            Counts.from_pairs(routes.tokens, routes.experts[:, layer], model.vocab_size, model.num_experts)
            for layer in range(len(model.layers))
        )


def _bytes(arrays: Counts | Routes) -> int:
    """Bytes of all arrays of a record."""
    return sum(int(getattr(arrays, field.name).nbytes) for field in fields(arrays))
