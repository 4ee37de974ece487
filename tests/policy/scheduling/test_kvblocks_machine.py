"""KVBlocks under random use of a tiny pool, against a simulated cache and an audit of its internal state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.toy_model import hashes

from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.kvblocks import ROOT, KVBlocks

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@dataclass
class Holder:
    tokens: list[int]
    computed: int

    @property
    def array(self) -> IntArray:
        return np.array(self.tokens, dtype=np.int64)


def audit(pool: KVBlocks) -> None:
    """Checks that each block is in one state, that counts are right, that known blocks form a forest, and
    that leaves are older."""
    tables = {request_id: table.blocks.array.tolist() for request_id, table in pool._tables.items()}
    holders = Counter(block for table in tables.values() for block in table)
    assert [holders[block] for block in range(pool.num_blocks)] == pool._references
    free, cached, used = set(pool._free), set(pool._cached_blocks), set(holders)
    assert len(free) == len(pool._free)
    assert sorted([*free, *cached, *used]) == list(range(pool.num_blocks))
    stats = pool.stats()
    assert (stats.num_free, stats.num_cached, stats.num_used) == (len(free), len(cached), len(used))
    assert stats.num_total == stats.num_free + stats.num_cached + stats.num_used and pool.available == len(
        free | cached
    )
    known = {block: key for block, key in enumerate(pool._keys) if key is not None}
    assert {key: block for block, key in known.items()} == pool._block_by_key
    assert cached <= set(known) and not free & set(known)
    by_identity = {pool._identities[block]: block for block in known}
    assert len(by_identity) == len(known) and ROOT not in by_identity
    age = {block: index for index, block in enumerate(pool._cached_blocks)}
    for block, (parent, _) in known.items():
        if parent != ROOT:
            before = by_identity[parent]  # a parent outlives its children
            assert pool._references[before] >= pool._references[block]
            assert before not in age or age[before] > age[block]
    for request_id, table in tables.items():
        first = pool._tables[request_id].num_committed
        assert all(block in known for block in table[:first])
        assert all(holders[block] == 1 and block not in known for block in table[first:])


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 9), size=st.integers(1, 3), reuse=st.sampled_from([True, True, False])
    )
    def start(self, num_blocks: int, size: int, reuse: bool) -> None:
        self.pool = KVBlocks(num_blocks, size, reuse)
        self.kv = np.full((num_blocks, size), -1, dtype=np.int64)
        self.holders: dict[int, Holder] = {}
        self.arrived = 0

    @rule(tokens=TOKENS, reusable=st.one_of(st.none(), st.integers(0, 12)), spare=st.integers(0, 2))
    def allocate(self, tokens: list[int], reusable: int | None, spare: int) -> None:
        before = self.pool.stats()
        holder = Holder(tokens, 0)
        limit = len(tokens) - 1 if reusable is None else reusable
        cached = self.pool.allocate(self.arrived, holder.array, limit, spare)
        if cached is None:
            assert self.pool.stats() == before
            assert self.pool.blocks_for(len(tokens)) + spare > before.num_free
        else:
            assert cached <= min(limit, len(tokens) - 1) and cached % self.pool.block_size == 0
            assert self.pool.available >= spare
            holder.computed = cached
            self.holders[self.arrived] = holder
        self.arrived += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), rows=st.integers(1, 12))
    def compute(self, data: st.DataObject, rows: int) -> None:
        """Runs a step for one request: writes its blocks, then commits them."""
        request_id = data.draw(st.sampled_from(sorted(self.holders)))
        holder = self.holders[request_id]
        end = min(holder.computed + rows, len(holder.tokens))
        for position, value in enumerate(hashes(holder.tokens)[holder.computed : end], start=holder.computed):
            block, offset = divmod(position, self.pool.block_size)
            self.kv[self.pool.table(request_id)[block], offset] = value
        holder.computed = end
        self.pool.commit(request_id, holder.array, end)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def extend(self, data: st.DataObject, more: list[int]) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.holders)))
        holder, before = self.holders[request_id], self.pool.stats()
        if self.pool.extend(request_id, len(holder.tokens) + len(more)):
            holder.tokens = holder.tokens + more
        else:
            assert self.pool.stats() == before
        assert self.pool.capacity(request_id) >= len(holder.tokens)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.holders)))
        del self.holders[request_id]
        self.pool.free(request_id)

    @rule(num_blocks=st.integers(0, 12))
    def resize(self, num_blocks: int) -> None:
        """Memory of blocks that leave is lost, and that of new ones is empty."""
        before, used = self.pool.stats(), self.pool.end_of_used
        if num_blocks < max(1, used):
            with pytest.raises(ValueError, match="in use"):
                self.pool.resize(num_blocks)
            assert self.pool.stats() == before
            return
        self.pool.resize(num_blocks)
        kept = self.kv[:num_blocks]
        self.kv = np.full((num_blocks, self.pool.block_size), -1, dtype=np.int64)
        self.kv[: len(kept)] = kept
        assert self.pool.num_blocks == num_blocks and self.pool.stats().num_used == before.num_used
        assert self.pool._free == sorted(self.pool._free, reverse=True)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        audit(self.pool)
        for request_id, holder in self.holders.items():
            table = self.pool.table(request_id)
            assert len(table) == len(set(table.tolist()))
            assert (
                self.kv[table].reshape(-1)[: holder.computed].tolist()
                == hashes(holder.tokens)[: holder.computed]
            )

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for request_id in self.holders:
                self.pool.free(request_id)
            assert self.pool.available == self.pool.num_blocks


def run_machine(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    quiet = settings(max_examples=examples, stateful_step_count=steps, derandomize=True, deadline=None)
    run_state_machine_as_test(PoolMachine, settings=quiet)


@pytest.mark.slow
def test_random_use() -> None:
    run_machine(100, 50)


@pytest.mark.full
def test_random_use_long() -> None:
    run_machine(260, 50)
