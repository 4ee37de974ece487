from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.tokenpool import TokenPool, Units

Key = tuple[int, int, int, int]
"""(request id, epoch, first position, layer)"""


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def run(call: int, rows: Sequence[int], request_ids: Sequence[int] | None = None, layer: int = 0) -> Units:
    """A call whose units belong to requests 0, 1, ... unless named otherwise. Each begins at position 0."""
    owners = ints(*(range(len(rows)) if request_ids is None else request_ids))
    return Units.of_run(call, layer, owners, 0 * owners, 0 * owners, ints(*rows))


def keys(units: Units | None) -> list[Key]:
    if units is None:
        return []
    columns = zip(units.request_ids, units.epochs, units.positions, strict=True)
    return [(int(r), int(e), int(p), units.layer) for r, e, p in columns]


def requests(units: Units | None) -> list[int]:
    return [key[0] for key in keys(units)]


def test_worked_example() -> None:
    pool = TokenPool()
    units = Units.of_run(0, 3, ints(7, 8), ints(0, 1), ints(20, 0), ints(1, 2))
    pool.open(units, top_k=2)
    assert pool.waiting() == {3: 3}

    assert pool.receive_units(0, ints(5, 0, 2)) is None
    assert keys(pool.receive_units(0, ints(2, 1))) == [(7, 0, 20, 3)]
    assert pool.waiting() == {3: 2}
    assert pool.missing(0).tolist() == [3, 4] and not pool.is_complete(0)

    ready = pool.receive_units(0, ints(3, 4))
    assert ready is not None and keys(ready) == [(8, 1, 0, 3)]
    assert (ready.call, ready.starts.tolist(), ready.rows.tolist()) == (0, [1], [2])
    assert pool.is_complete(0) and not len(pool) and pool.missing(0).tolist() == [] and pool.waiting() == {}


def test_units_become_ready_in_the_order_of_the_call() -> None:
    pool = TokenPool()
    pool.open(run(0, [1, 1, 1, 1]), top_k=1)
    assert requests(pool.receive_units(0, ints(3, 0, 2))) == [0, 2, 3]
    assert requests(pool.receive_units(0, ints(3, 2, 1, 1))) == [1]


def test_a_part_that_came_twice_at_once_counts_once() -> None:
    pool = TokenPool()
    pool.open(run(0, [1]), top_k=3)
    assert pool.receive_units(0, ints(1, 1, 1)) is None
    assert pool.missing(0).tolist() == [0, 2]


def test_calls_do_not_mix() -> None:
    pool = TokenPool()
    pool.open(run(0, [1], layer=4), top_k=2)
    pool.open(run(5, [3], layer=4), top_k=1)
    pool.open(run(6, [1], layer=2), top_k=1)
    assert pool.waiting() == {4: 4, 2: 1}
    assert pool.receive_units(5, ints(0, 1)) is None
    assert pool.missing(0).tolist() == [0, 1]
    assert requests(pool.receive_units(6, ints(0))) == [0]
    assert pool.waiting() == {4: 4} and len(pool) == 2


def test_a_dropped_unit_is_never_ready_but_its_parts_are_awaited() -> None:
    pool = TokenPool()
    pool.open(run(0, [1, 2, 1], request_ids=[1, 2, 1]), top_k=1)
    assert requests(pool.receive_units(0, ints(0))) == [1]
    pool.drop(1)
    assert pool.waiting() == {0: 2}
    assert requests(pool.receive_units(0, ints(1, 2))) == [2]
    assert not pool.is_complete(0) and pool.missing(0).tolist() == [3] and pool.waiting() == {}
    assert pool.receive_units(0, ints(3)) is None
    assert pool.is_complete(0)


def test_late_parts_of_an_older_epoch_complete_nothing() -> None:
    """The request was preempted while one part was outstanding. It comes back, and the old part arrives last
    but one."""
    pool = TokenPool()
    pool.open(Units.of_run(0, 2, ints(9), ints(0), ints(5), ints(1)), top_k=2)
    pool.receive_units(0, ints(0))
    pool.drop(9)
    pool.open(Units.of_run(1, 2, ints(9), ints(1), ints(5), ints(1)), top_k=2)
    assert pool.receive_units(1, ints(0)) is None
    assert pool.receive_units(0, ints(1)) is None
    assert keys(pool.receive_units(1, ints(1))) == [(9, 1, 5, 2)]
    assert not len(pool)


def test_parts_of_a_call_that_is_done_are_ignored() -> None:
    pool = TokenPool()
    pool.open(run(3, [1]), top_k=1)
    pool.receive_units(3, ints(0))
    assert pool.receive_units(3, ints(0)) is None
    assert pool.receive_units(1, ints(0)) is None  # a number that was skipped
    pool.drop(0)


def test_nothing_arrives_in_an_empty_answer() -> None:
    pool = TokenPool()
    pool.open(run(0, [1]), top_k=1)
    assert pool.receive_units(0, ints()) is None and not pool.is_complete(0)


def test_misuse_is_told() -> None:
    pool = TokenPool()
    pool.open(run(4, [2]), top_k=2)
    with pytest.raises(ValueError, match="call 4 comes after call 4: numbers must grow"):
        pool.open(run(4, [1]), top_k=1)
    for units, top_k in ((run(5, []), 1), (run(5, [1, 0]), 1), (run(5, [1]), 0)):
        with pytest.raises(ValueError, match="call 5: every unit waits for at least one part"):
            pool.open(units, top_k)
    for pairs in (ints(0, 4), ints(-1)):
        with pytest.raises(ValueError, match="call 4 has pairs 0 to 3: got "):
            pool.receive_units(4, pairs)
    assert pool.missing(4).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="call 6 was never opened"):
        pool.is_complete(6)


ROWS = st.lists(st.one_of(st.just(1), st.integers(1, 9)), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=200, derandomize=True)
@given(ROWS, st.integers(1, 4), st.data())
def test_a_unit_is_ready_with_the_last_of_its_parts(rows: list[int], top_k: int, data: st.DataObject) -> None:
    """Answers come in any order, in any pieces, and repeatedly. The result is compared with a set of pairs
    for each unit."""
    pool = TokenPool()
    pool.open(run(0, rows), top_k)
    ends = np.cumsum(rows) * top_k
    lacks = [set(range(end - n * top_k, end)) for end, n in zip(ends.tolist(), rows, strict=True)]
    num_pairs = int(ends[-1])
    order = data.draw(st.permutations(range(num_pairs)))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_pairs))) | {num_pairs})
    for first, last in zip([0, *cuts], cuts, strict=False):
        again = data.draw(st.lists(st.sampled_from(order[:last]), max_size=3))
        pairs = [*order[first:last], *again]
        complete = [unit for unit, lack in enumerate(lacks) if lack and not lack - set(pairs)]
        for lack in lacks:
            lack.difference_update(pairs)
        assert requests(pool.receive_units(0, ints(*pairs))) == complete
        assert pool.missing(0).tolist() == sorted(set().union(*lacks))
    assert pool.is_complete(0)


@dataclass
class ToyCall:
    """A call as plain sets: the open units, and the outstanding pairs of each."""

    layer: int
    lacks: dict[Key, set[int]]
    rows: dict[Key, int]
    num_pairs: int
    dropped: set[Key] = field(default_factory=set)

    @property
    def out(self) -> set[int]:
        return set().union(*self.lacks.values())


class PoolMachine(RuleBasedStateMachine):
    """Random calls, answers, drops and dying servers, compared with plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = TokenPool()
        self.calls: dict[int, ToyCall] = {}
        self.ready: list[Key] = []
        self.epochs = [0, 0, 0]
        self.positions = [0, 0, 0]

    @rule(
        owners=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        rows=st.lists(st.integers(1, 4), min_size=5, max_size=5),
        top_k=st.integers(1, 3),
        layer=st.integers(0, 1),
        skipped=st.integers(0, 1),
    )
    def open(self, owners: list[int], rows: list[int], top_k: int, layer: int, skipped: int) -> None:
        call = max(self.calls, default=-1) + 1 + skipped
        toy = ToyCall(layer, {}, {}, 0)
        for owner, n in zip(owners, rows, strict=False):
            key = (owner, self.epochs[owner], self.positions[owner], layer)
            self.positions[owner] += n
            toy.lacks[key] = set(range(toy.num_pairs, toy.num_pairs + n * top_k))
            toy.rows[key] = n
            toy.num_pairs += n * top_k
        request_ids, epochs, positions, _ = (ints(*column) for column in zip(*toy.lacks, strict=True))
        sizes = ints(*toy.rows.values())
        self.pool.open(Units.of_run(call, layer, request_ids, epochs, positions, sizes), top_k)
        self.calls[call] = toy

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(sorted(self.calls)))
        self.answer(call, data.draw(st.lists(st.integers(0, self.calls[call].num_pairs - 1))))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def resend(self, data: st.DataObject) -> None:
        """Sends the missing pairs again. They arrive at once."""
        call = data.draw(st.sampled_from(sorted(self.calls)))
        missing = self.pool.missing(call)
        assert missing.tolist() == sorted(self.calls[call].out)
        self.answer(call, missing.tolist())
        assert self.pool.is_complete(call)

    @rule(request_id=st.integers(0, 2))
    def preempt(self, request_id: int) -> None:
        self.pool.drop(request_id)
        for toy in self.calls.values():
            toy.dropped |= {key for key, lack in toy.lacks.items() if key[0] == request_id and lack}
        self.epochs[request_id] += 1
        self.positions[request_id] = 0

    def answer(self, call: int, pairs: list[int]) -> None:
        toy = self.calls[call]
        complete = [key for key, lack in toy.lacks.items() if lack and not lack - set(pairs)]
        for lack in toy.lacks.values():
            lack.difference_update(pairs)
        ready = keys(self.pool.receive_units(call, ints(*pairs)))
        assert ready == [key for key in complete if key not in toy.dropped]
        self.ready += ready
        self.check()

    def check(self) -> None:
        waiting: dict[int, int] = {}
        for call, toy in self.calls.items():
            assert self.pool.is_complete(call) == (not toy.out)
            for key, lack in toy.lacks.items():
                if lack and key not in toy.dropped:
                    waiting[toy.layer] = waiting.get(toy.layer, 0) + toy.rows[key]
        assert self.pool.waiting() == waiting
        assert len(self.pool) == sum(bool(toy.out) for toy in self.calls.values())

    def teardown(self) -> None:
        """Checks that every unit was ready once or was dropped, and that nothing is left."""
        for call in self.calls:
            self.answer(call, self.pool.missing(call).tolist())
        opened = {key for toy in self.calls.values() for key in toy.lacks}
        dropped = {key for toy in self.calls.values() for key in toy.dropped}
        assert len(self.ready) == len(set(self.ready)) and set(self.ready) == opened - dropped
        assert not len(self.pool) and self.pool.waiting() == {} and not self.pool._calls


@pytest.mark.slow
def test_random_use() -> None:
    quiet = settings(max_examples=150, stateful_step_count=30, derandomize=True, deadline=None)
    run_state_machine_as_test(PoolMachine, settings=quiet)
