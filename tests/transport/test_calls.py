"""Every transport of calls passes the same checks. What needs another process is in test_calls_death.py."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.call_pairs import (
    HEAP,
    KINDS,
    Silent,
    ask,
    descriptors,
    incoming,
    lost,
    noise,
    pair,
    receive,
    rows_of,
    until,
)

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.tokens import IntArray
from moesaic.transport.calls import MAX_CALLS, MAX_ROWS, Answerer, Call, Caller, Incoming, Outstanding
from moesaic.transport.waiting import wait

Ends = tuple[Caller, Answerer]


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    with pair(request.param, tmp_path) as both:
        yield both


SIZES = [(0, 1, 0), (0, 3, 5), (1, 1, 1), (13, 7, 3), (4096, 64, 4097), (5_000_001, 2, 3_000_000)]


@pytest.mark.parametrize(("request_bytes", "rows", "row_bytes"), SIZES)
def test_bytes_arrive_as_they_were_written(ends: Ends, request_bytes: int, rows: int, row_bytes: int) -> None:
    caller, answerer = ends
    question, reply = noise(request_bytes, 1), noise(rows * row_bytes, 2)
    for _ in range(2):  # the second call meets memory that was used before
        call = ask(caller, question, rows, row_bytes)
        (got,) = incoming(caller, answerer)
        assert (got.number, got.rows, got.row_bytes) == (call.number, rows, row_bytes)
        assert bytes(got.request) == question and got.request.readonly
        assert len(got.answer) == len(call.answer) == rows * row_bytes
        got.answer[:] = reply
        got.publish(np.arange(rows))
        assert sorted(rows_of(caller, answerer, call, rows)) == list(range(rows))
        assert bytes(call.answer) == reply
        caller.release(call)


def test_numpy_reads_and_writes_in_place(ends: Ends) -> None:
    caller, answerer = ends
    call = caller.open(32, 2, 16)
    assert call is not None
    np.frombuffer(call.request, np.float32)[:] = np.arange(8)
    caller.post(call)
    (got,) = incoming(caller, answerer)
    np.frombuffer(got.answer, np.float32)[:] = np.frombuffer(got.request, np.float32) * 2
    got.publish(np.array([0, 1]))
    rows_of(caller, answerer, call, 2)
    assert np.frombuffer(call.answer, np.float32).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


def test_rows_are_published_in_any_order_and_portions(ends: Ends) -> None:
    caller, answerer = ends
    call = ask(caller, b"", 9, 2)
    (got,) = incoming(caller, answerer)
    for portion in ([7], [2, 3, 0], [8, 1], [], [6, 5, 4]):
        for row in portion:
            got.answer[2 * row : 2 * row + 2] = f"{row:02}".encode()
        got.publish(np.array(portion, np.int64))
        if portion:
            assert rows_of(caller, answerer, call, len(portion)) == portion
        for row in portion:
            assert bytes(call.answer[2 * row : 2 * row + 2]) == f"{row:02}".encode()
    caller.release(call)


def test_portions_between_two_polls_come_once(ends: Ends) -> None:
    caller, answerer = ends
    call = ask(caller, b"", 5, 1)
    (got,) = incoming(caller, answerer)
    for row in (4, 0, 2):
        got.publish(np.array([row]))
    assert rows_of(caller, answerer, call, 3) == [4, 0, 2]
    assert caller.poll() == []
    got.publish(np.array([1, 3]))
    assert rows_of(caller, answerer, call, 2) == [1, 3]


@pytest.mark.parametrize("rows", [[3], [-1], [0, 0], [1], [2, 1], [2, 2**40]])
def test_a_row_is_published_once_and_must_exist(ends: Ends, rows: list[int]) -> None:
    caller, answerer = ends
    call = ask(caller, b"", 3, 1)
    (got,) = incoming(caller, answerer)
    got.publish(np.array([1]))
    with pytest.raises(ValueError, match="published"):
        got.publish(np.array(rows))
    got.publish(np.array([2, 0]))  # nothing of the refused portion counts
    assert rows_of(caller, answerer, call, 3) == [1, 2, 0]
    with pytest.raises(ValueError, match="published"):
        got.publish(np.array([0]))


def test_many_calls_in_flight_are_answered_in_any_order(ends: Ends) -> None:
    caller, answerer = ends
    calls = {call.number: call for call in (ask(caller, bytes([i]), 1, 1) for i in range(200))}
    got = incoming(caller, answerer, 200)
    assert [one.number for one in got] == list(calls)
    for one in reversed(got):
        one.answer[:] = bytes([255 - one.request[0]])
        one.publish(np.array([0]))
    found: list[Call] = []
    while len(found) < 200:
        found += [call for call, rows in receive(caller, answerer) if rows == [0]]
    assert len({call.number for call in found}) == 200
    assert all(call is calls[call.number] for call in found)
    assert all(call.answer[0] == 255 - call.request[0] for call in found)


@pytest.mark.slow
def test_ten_thousand_small_calls(ends: Ends) -> None:
    caller, answerer = ends
    sent, done, open_calls = 0, 0, 0

    def step() -> bool:
        nonlocal sent, done, open_calls
        while open_calls < 64 and sent < 10_000:
            ask(caller, sent.to_bytes(4, "little"), 1, 4)
            sent, open_calls = sent + 1, open_calls + 1
        for one in answerer.poll():
            one.answer[:] = one.request
            one.publish(np.array([0]))
        for call, _ in caller.poll():
            assert call.answer == call.request
            caller.release(call)
            done, open_calls = done + 1, open_calls - 1
        return done == 10_000

    until(step, caller, answerer)
    assert not caller.poll() and not answerer.poll()


def test_no_room_until_a_call_is_released(ends: Ends) -> None:
    caller, _ = ends
    third = HEAP // 3 - 4096
    calls = [caller.open(third, 1, 0) for _ in range(3)]
    assert None not in calls
    assert caller.open(third, 1, 0) is None
    assert caller.open(16, 1, 16) is not None  # a small one still fits
    caller.release(calls[1])  # type: ignore[arg-type]
    assert caller.open(third, 1, 0) is not None


def test_open_calls_share_no_memory_and_all_of_it_comes_back(ends: Ends) -> None:
    caller, _ = ends
    rng = np.random.default_rng(0)
    whole = HEAP - (1 << 16)
    held: list[tuple[Call, int]] = []
    refused = 0
    for turn in range(3000):
        call = caller.open(int(rng.integers(0, 1 << 20)), int(rng.integers(1, 50)), int(rng.integers(0, 999)))
        if call is None or rng.random() < 0.2:
            refused += call is None
            for found, mark in [held.pop(int(rng.integers(len(held)))) for _ in range(min(3, len(held)))]:
                ends_of = [*found.request[:1], *found.request[-1:]]
                assert ends_of == [mark] * len(ends_of)
                caller.release(found)
        if call is not None:
            call.request[:] = bytes([turn % 256]) * len(call.request)
            held.append((call, turn % 256))
    assert refused
    for call, _ in held:
        caller.release(call)
    assert caller.open(whole, 1, 0) is not None


def test_a_limited_number_of_calls(ends: Ends) -> None:
    caller, answerer = ends
    calls = [ask(caller, b"x", 1, 1) for _ in range(MAX_CALLS)]
    assert caller.open(1, 1, 1) is None
    for one in incoming(caller, answerer, MAX_CALLS):
        one.publish(np.array([0]))
    assert len(receive(caller, answerer, MAX_CALLS)) == MAX_CALLS
    assert caller.open(1, 1, 1) is None  # read, not released
    caller.release(calls[7])
    assert caller.open(1, 1, 1) is not None


def test_both_sides_send_much_at_once(ends: Ends) -> None:
    """Requests of 16 MB wait in one direction while answers of 16 MB wait in the other: none blocks."""
    caller, answerer = ends
    first = ask(caller, noise(1000), 4, 4_000_000)
    (one,) = incoming(caller, answerer)
    one.answer[:] = noise(16_000_000, 3)
    one.publish(np.array([3, 2, 1, 0]))
    second = ask(caller, noise(16_000_000, 4), 1, 1)
    rows: list[tuple[Call, IntArray]] = []
    got: list[Incoming] = []

    def step() -> bool:
        rows.extend(caller.poll())
        got.extend(answerer.poll())
        return len(rows) == 1 and len(got) == 1

    until(step, caller, answerer)
    assert bytes(first.answer) == noise(16_000_000, 3)
    assert bytes(got[0].request) == noise(16_000_000, 4) and got[0].number == second.number


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_the_heap_goes_through_it_in_time(kind: str, tmp_path: Path) -> None:
    with pair(kind, tmp_path, heap_bytes=1 << 16) as (caller, answerer):
        for turn in range(50):
            call = ask(caller, noise(8000, turn), 2, 8000)
            (one,) = incoming(caller, answerer)
            one.answer[:] = noise(16_000, turn)
            one.publish(np.array([1, 0]))
            rows_of(caller, answerer, call, 2)
            assert bytes(call.answer) == noise(16_000, turn)
            caller.release(call)


def test_a_call_that_is_given_up_is_not_heard_of_again(ends: Ends) -> None:
    caller, answerer = ends
    large = ask(caller, b"", 2, HEAP // 3)
    kept = ask(caller, b"", 1, 1)
    one, two = incoming(caller, answerer, 2)
    one.publish(np.array([1]))
    assert rows_of(caller, answerer, large, 1) == [1]
    caller.release(large)
    with pytest.raises(ValueError, match="released"):
        caller.release(large)
    assert caller.open(HEAP // 2, 1, 0) is None  # the server may still write
    one.answer[:4] = b"late"
    one.publish(np.array([0]))
    two.publish(np.array([0]))
    assert [(call.number, rows) for call, rows in receive(caller, answerer)] == [(kept.number, [0])]
    assert caller.open(HEAP // 2, 1, 0) is not None


def test_released_calls_are_refused(ends: Ends) -> None:
    caller, answerer = ends
    call = caller.open(1, 1, 1)
    assert call is not None
    caller.post(call)
    with pytest.raises(ValueError, match="posted"):
        caller.post(call)
    for one in incoming(caller, answerer):
        one.publish(np.array([0]))
    rows_of(caller, answerer, call, 1)
    caller.release(call)
    with pytest.raises(ValueError, match="released"):
        caller.post(call)
    with pytest.raises(ValueError, match="released"):
        caller.release(call)


def test_a_call_that_is_over_publishes_nothing_into_the_next(ends: Ends) -> None:
    caller, answerer = ends
    call = ask(caller, b"", 1, 1)
    (over,) = incoming(caller, answerer)
    over.publish(np.array([0]))
    rows_of(caller, answerer, call, 1)
    caller.release(call)
    ask(caller, b"", 1, 1)  # in the same memory
    incoming(caller, answerer)
    with pytest.raises(ValueError, match="published"):
        over.publish(np.array([0]))


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ((1, 0, 1), "rows: got 0"),
        ((1, MAX_ROWS + 1, 1), "rows: got"),
        ((-1, 1, 1), "request_bytes: got -1"),
        ((1, 1, -4), "row_bytes: got -4"),
        ((HEAP, 1, 1), "request_bytes + rows * row_bytes: got"),
        ((0, 1 << 20, 1 << 50), "request_bytes + rows * row_bytes: got"),
    ],
)
def test_what_never_fits_is_an_error(ends: Ends, sizes: tuple[int, int, int], field: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(field)):
        ends[0].open(*sizes)


def test_what_was_published_is_reported_before_the_loss(ends: Ends) -> None:
    caller, answerer = ends
    call = ask(caller, b"", 3, 2)
    (one,) = incoming(caller, answerer)
    one.answer[:] = b"aabbcc"
    one.publish(np.array([2]))
    one.publish(np.array([0]))
    answerer.close()
    assert rows_of(caller, Silent(), call, 2) == [2, 0]
    assert bytes(call.answer[4:6]) == b"cc"
    lost(caller)
    for use in (caller.poll, lambda: caller.open(1, 1, 1)):
        with pytest.raises(ConnectionLost):
            use()
    caller.release(call)  # still allowed
    one.publish(np.array([1]))  # and this does nothing


def test_the_server_hears_that_the_client_closed(ends: Ends) -> None:
    caller, answerer = ends
    ask(caller, b"", 1, 1)
    (one,) = incoming(caller, answerer)
    caller.close()
    caller.close()
    lost(answerer)
    one.publish(np.array([0]))
    with pytest.raises(ConnectionLost):
        answerer.poll()
    with pytest.raises(ConnectionLost):
        caller.poll()


@pytest.mark.slow
def test_memory_outlives_its_ends(ends: Ends) -> None:
    caller, answerer = ends
    call = ask(caller, b"question", 1, 4)
    (one,) = incoming(caller, answerer)
    one.answer[:] = b"last"
    one.publish(np.array([0]))
    rows_of(caller, answerer, call, 1)
    kept = np.frombuffer(call.answer, np.uint8)
    theirs = np.frombuffer(one.request, np.uint8)
    caller.close()
    answerer.close()
    del caller, answerer, call, one
    gc.collect()
    assert kept.tobytes() == b"last" and theirs.tobytes() == b"question"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_stays_behind(kind: str, tmp_path: Path) -> None:
    before = descriptors()
    for _ in range(3):
        with pair(kind, tmp_path) as (caller, answerer):
            ask(caller, b"1234", 1, 4)
            incoming(caller, answerer)
    assert descriptors() == before
    assert "moesaic-calls" not in Path("/proc/self/maps").read_text()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_waiting_costs_next_to_nothing(ends: Ends) -> None:
    started = time.process_time()
    assert not wait(ends, timeout=1.0)
    assert time.process_time() - started < 0.01  # 1 % of a core


def test_looking_does_not_wait(ends: Ends) -> None:
    caller, answerer = ends
    assert not wait(ends, timeout=0)
    call = ask(caller, b"", 1, 1)
    until(lambda: wait([answerer], timeout=0))
    answerer.poll()[0].publish(np.array([0]))
    until(lambda: wait([caller], timeout=0))
    assert rows_of(caller, answerer, call, 1) == [0]
    assert not wait(ends, timeout=0)


def test_a_descriptor_ends_the_wait(ends: Ends) -> None:
    reading, writing = os.pipe()
    try:
        assert not wait(ends, [reading], timeout=0.01)
        os.write(writing, b"x")
        assert wait(ends, [reading])
    finally:
        os.close(reading)
        os.close(writing)


def test_outstanding_rows() -> None:
    rows = Outstanding(3)
    rows.take(np.array([2, 0]))
    assert rows.count == 1
    for bad in ([0], [1, 1], [3], [-1], [1, 2]):
        with pytest.raises(ValueError, match="published"):
            rows.take(np.array(bad))
    rows.take(np.array([], np.int64))
    rows.take(np.array([1]))
    assert rows.count == 0
