"""StateBlocks under random use of a tiny pool: pages and seats are simulated as the kernels write them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.policy.scheduling.test_kvblocks_machine import audit

from moesaic.core.tokens import STATE_CHUNK, IntArray
from moesaic.policy.scheduling.stateblocks import ZEROS, StateBlocks

WORDS = ([0] * 70, [1] * 70, [0] * 64, [1] * 3, [0] * 150)
"""Parts of prompts: many prompts share prefixes, off the boundaries of chunks and blocks."""


@dataclass
class Holder:
    tokens: list[int]
    computed: int
    seat: int
    """Which seat it has had since it was admitted."""

    @property
    def array(self) -> IntArray:
        return np.array(self.tokens, dtype=np.int64)


class StateMachine(RuleBasedStateMachine):
    @initialize(
        tokens=st.integers(200, 2500),
        size=st.sampled_from([8, 16, 48]),
        seats=st.integers(1, 4),
        snapshots=st.integers(0, 4),
        reuse=st.sampled_from([True, True, True, False]),
    )
    def start(self, tokens: int, size: int, seats: int, snapshots: int, reuse: bool) -> None:
        self.pool = StateBlocks(tokens // size, size, reuse, seats, snapshots)
        count = 1 + self.pool.state_stats().pages
        self.pages: list[tuple[int, ...] | None] = [None] * count
        """The tokens whose state each page has."""
        self.pages[ZEROS] = ()
        self.rows: list[tuple[int, ...]] = [()] * seats
        """The tokens since the last multiple of STATE_CHUNK, of each seat."""
        self.holders: dict[int, Holder] = {}
        self.arrived = 0

    @precondition(lambda self: len(self.holders) <= len(self.rows))
    @rule(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=4), scores=st.booleans())
    def allocate(self, words: list[list[int]], scores: bool) -> None:
        tokens = [token for word in words for token in word]
        before, states = self.pool.stats(), self.pool.state_stats()
        holder = Holder(tokens, 0, -1)
        cached = self.pool.allocate(self.arrived, holder.array, 0 if scores else len(tokens) - 1)
        if cached is None:
            assert self.pool.stats() == before and self.pool.state_stats() == states
        else:
            assert cached % STATE_CHUNK == 0 and cached < len(tokens)
            holder.computed = cached
            self.holders[self.arrived] = holder
        self.arrived += 1

    @precondition(lambda self: self.holders)
    @rule(
        data=st.data(),
        steps=st.lists(st.sampled_from([1, 9, 63, 64, 65, 130, 200]), min_size=1, max_size=5),
        last=st.sampled_from(["done", "done", "failed", "lost"]),
    )
    def compute(self, data: st.DataObject, steps: list[int], last: str) -> None:
        """Steps of one request. The last one may fail half-way, or the request may be dropped in it."""
        request_id = data.draw(st.sampled_from(sorted(self.holders)))
        for rows in steps[:-1]:
            self._step(request_id, rows, "done")
        self._step(request_id, steps[-1], last)

    def _step(self, request_id: int, rows: int, ends: str) -> None:
        holder = self.holders[request_id]
        stop = min(holder.computed + rows, len(holder.tokens))
        if holder.computed == stop:
            return
        stop = self.pool.cut(request_id, holder.computed, stop)
        assert holder.computed < stop
        read, at, write, seat = self.pool.states(request_id)
        assert write != ZEROS and at == holder.computed // STATE_CHUNK * STATE_CHUNK
        assert self.pages[read] == tuple(holder.tokens[:at])
        if holder.computed > at:
            assert self.rows[seat] == tuple(holder.tokens[at : holder.computed])
        passed = stop // STATE_CHUNK * STATE_CHUNK
        if passed > at:
            self.pages[write] = tuple(holder.tokens[:passed]) if ends == "done" else None
        self.rows[seat] = tuple(holder.tokens[passed:stop]) if ends == "done" else (-1,)
        if ends == "done":
            holder.computed = stop
            self.pool.commit(request_id, holder.array, stop)
        elif ends == "failed":
            holder.computed = self.pool.rewind(request_id, holder.computed)
        else:
            del self.holders[request_id]
            self.pool.free(request_id)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def extend(self, data: st.DataObject, more: list[int]) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.holders)))
        holder = self.holders[request_id]
        if self.pool.extend(request_id, len(holder.tokens) + len(more)):
            holder.tokens = holder.tokens + more

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.holders)))
        del self.holders[request_id]
        self.pool.free(request_id)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        audit(self.pool)
        pool, held = self.pool, self.pool._request_states
        assert set(held) == set(self.holders)
        seats = [one.seat for one in held.values()]
        assert sorted([*seats, *pool._seats]) == list(range(pool._num_seats))
        owned = [one.own_page for one in held.values()]
        pages = [*owned, *pool._pages, *pool._snapshots.values()]
        assert sorted(pages) == list(range(1, len(self.pages))), "each page is in one place"
        stats = pool.state_stats()
        assert stats.pages == stats.pages_free + stats.seats_used + stats.snapshots
        readers = [one.read_page for one in held.values() if one.read_page not in (one.own_page, ZEROS)]
        assert {page: readers.count(page) for page in pool._snapshots.values()} == pool._readers
        for one in pool._snapshots.values():
            assert self.pages[one] is not None, "a snapshot is a whole state"

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for request_id in self.holders:
                self.pool.free(request_id)
            stats = self.pool.state_stats()
            assert stats.seats_used == 0 and stats.pages_free + stats.snapshots == stats.pages


@pytest.mark.hypothesis
@pytest.mark.slow
def test_the_pool_under_random_use() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    quiet = settings(max_examples=80, stateful_step_count=40, derandomize=True, deadline=None)
    run_state_machine_as_test(StateMachine, settings=quiet)  # type: ignore[no-untyped-call]
