from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.experts import wire

LAYERS, EXPERTS, HIDDEN = 3, 5, 4
HEADER = struct.Struct("<4sHBBIIIII")


def parse(data: bytes) -> wire.Request:
    return wire.parse(memoryview(data), LAYERS, EXPERTS, HIDDEN)


def header(
    magic: bytes = b"MOE3",
    layer: int = 0,
    kind: int = 0,
    parts: int = 0,
    rows: int = 0,
    pairs: int = 0,
    hidden: int = HIDDEN,
    attempt: int = 0,
    worker: int = 0,
) -> bytes:
    return HEADER.pack(magic, layer, kind, parts, rows, pairs, hidden, attempt, worker)


def written(experts: list[int], rows: list[int], hidden: np.ndarray, partial: bool = False) -> bytearray:
    """A request of layer 2, second attempt; weights 0, 1, 2, ... when partial."""
    memory = bytearray(wire.size(len(hidden), len(experts), HIDDEN, partial))
    weights = np.arange(len(experts), dtype=np.float32) if partial else None
    named = np.array(experts, np.int64), np.array(rows, np.int64)
    wire.write(memoryview(memory), 2, *named, weights, hidden, attempt=1)
    return memory


def test_worked_example() -> None:
    """Two rows, three pairs: 28 bytes of header, 3 experts, 3 rows, 8 numbers."""
    hidden = np.arange(8, dtype=np.float32).reshape(2, 4)
    data = bytes(written([4, 0, 1], [0, 0, 1], hidden))
    assert len(data) == 28 + 12 + 12 + 32
    assert data[:28] == header(layer=2, rows=2, pairs=3, attempt=1)
    request = parse(data)
    assert (request.layer, request.attempt, request.weights) == (2, 1, None)
    assert (request.experts.tolist(), request.rows.tolist()) == ([4, 0, 1], [0, 0, 1])
    np.testing.assert_array_equal(request.hidden, hidden)
    assert request.answer_rows == 3


def test_a_partial_answer_has_a_row_for_each_row() -> None:
    data = bytes(written([4, 0, 1], [0, 0, 1], np.zeros((2, 4), np.float32), partial=True))
    request = parse(data)
    assert request.weights is not None and request.weights.tolist() == [0, 1, 2]
    assert request.answer_rows == 2


@given(st.data(), st.booleans(), st.integers(1, 6), st.integers(0, 9))
def test_what_is_written_is_read(data: st.DataObject, partial: bool, rows: int, pairs: int) -> None:
    experts = data.draw(st.lists(st.integers(0, EXPERTS - 1), min_size=pairs, max_size=pairs))
    places = data.draw(st.lists(st.integers(0, rows - 1), min_size=pairs, max_size=pairs))
    bits = data.draw(st.binary(min_size=16 * rows, max_size=16 * rows))
    hidden = np.frombuffer(bits, dtype=np.float32).reshape(rows, HIDDEN)
    memory = written(experts, places, hidden, partial)
    offset = data.draw(st.integers(0, 7), label="an address that no number is aligned to")
    request = wire.parse(memoryview(bytes(offset) + memory)[offset:], LAYERS, EXPERTS, HIDDEN)
    assert (request.experts.tolist(), request.rows.tolist()) == (experts, places)
    assert request.hidden.tobytes() == bits, "not a bit changes, NaN or not"


def test_indices_are_copies() -> None:
    """Memory is shared with the client, who may change after the check what was checked."""
    memory = written([4, 0, 1], [0, 0, 1], np.zeros((2, 4), np.float32))
    request = wire.parse(memoryview(memory), LAYERS, EXPERTS, HIDDEN)
    memory[28:52] = b"\xff" * 24
    assert (request.experts.tolist(), request.rows.tolist()) == ([4, 0, 1], [0, 0, 1])


GOOD = bytes(written([4, 0, 1], [0, 0, 1], np.zeros((2, 4), np.float32)))


def changed(at: int, *values: int) -> bytes:
    """GOOD with other 32-bit numbers from byte `at` on."""
    return GOOD[:at] + struct.pack(f"<{len(values)}i", *values) + GOOD[at + 4 * len(values) :]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes is too short"),
        (GOOD[:27], "27 bytes is too short"),
        (GOOD[:-1], "claims 2 rows and 3 pairs"),
        (GOOD + b"\0", "claims 2 rows and 3 pairs"),
        (b"MOE1" + GOOD[4:], "damaged header or is meant for another model"),
        (header(layer=LAYERS), "another model"),
        (header(kind=5), "damaged header"),
        (header(kind=0x81), "damaged header"),
        (header(kind=2, rows=1) + bytes(16), "a call without pairs claims 1 rows, 0 pairs and 0 parts"),
        (header(kind=4, parts=1) + bytes(8), "a call without pairs claims 0 rows, 0 pairs and 1 parts"),
        (header(hidden=HIDDEN + 1), "another model"),
        (header(rows=2**32 - 1), "claims 4294967295 rows"),
        (header(pairs=2**32 - 1), "claims 0 rows and 4294967295 pairs"),
        (header(pairs=1) + struct.pack("<ii", 0, 0), "names row 0 to 0 of 0"),
        (changed(28, 5), "names expert 0 to 5 of 5"),
        (changed(28, -1), "names expert -1 to 1 of 5"),
        (changed(40, 2), "names row 0 to 2 of 2"),
        (changed(40, -(2**31)), "names row -2147483648 to 1 of 2"),
    ],
)
def test_what_is_no_request_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ConnectionLost, match=message):
        parse(data)


def sound(data: bytes) -> None:
    """Refused, or a request whose indices can be followed."""
    try:
        request = parse(data)
    except ConnectionLost:
        return
    assert request.work is None or not len(request.experts)
    assert request.layer < LAYERS and request.hidden.shape[1] == HIDDEN
    assert len(request.experts) == len(request.rows)
    assert request.weights is None or len(request.weights) == len(request.rows)
    assert ((request.experts >= 0) & (request.experts < EXPERTS)).all()
    assert ((request.rows >= 0) & (request.rows < len(request.hidden))).all()
    assert request.answer_rows >= min(1, len(request.experts))


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    sound(data)


SMALL = st.one_of(st.integers(0, 6), st.integers(0, 2**32 - 1))


@pytest.mark.slow
@given(st.integers(0, 4), st.integers(0, 5), SMALL, SMALL, st.sampled_from([HIDDEN, 0, 5]), st.data())
def test_any_body_behind_a_header(
    layer: int, kind: int, rows: int, pairs: int, hidden: int, data: st.DataObject
) -> None:
    """Of the length that the header claims, or another one."""
    length = wire.size(rows, pairs, hidden, kind == 1) - HEADER.size
    if length > 400 or data.draw(st.booleans(), label="another length"):
        length = data.draw(st.integers(0, 100))
    body = data.draw(st.binary(min_size=length, max_size=length))
    if data.draw(st.booleans(), label="small indices"):
        body = bytes(byte % 3 if index % 4 == 0 else 0 for index, byte in enumerate(body))
    sound(header(layer=layer, kind=kind, rows=rows, pairs=pairs, hidden=hidden) + body)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_any_damaged_byte(at: int, byte: int) -> None:
    sound(GOOD[:at] + bytes([byte]) + GOOD[at + 1 :])


@pytest.mark.parametrize("work", [True, False])
def test_a_knock_says_whether_there_is_work(work: bool) -> None:
    memory = bytearray(wire.ARRIVAL_BYTES)
    wire.write_arrival(memoryview(memory), HIDDEN, work, 1 << 40, worker=3)
    request = parse(bytes(memory))
    assert request.work is work and request.answer_rows == 1 and not len(request.experts)
    assert (request.step, request.worker) == (1 << 40, 3)
    assert parse(GOOD).work is None and parse(GOOD).step == 0


def test_a_step_that_cannot_be_is_refused() -> None:
    memory = bytearray(wire.ARRIVAL_BYTES)
    wire.write_arrival(memoryview(memory), HIDDEN, True, wire.MOST_STEPS + 1)
    with pytest.raises(DamagedMessage, match="step 4611686018427387905"):
        parse(bytes(memory))
    with pytest.raises(DamagedMessage, match="is the last one"):
        wire.read_step_begun(memoryview(b"\xff" * 4 * HIDDEN))


def test_the_answer_to_a_knock_says_which_step_began() -> None:
    answer = memoryview(bytearray(4 * HIDDEN))
    wire.write_step_begun(answer, 12)
    assert wire.read_step_begun(answer) == 12


def on_device(places: list[int], rows: int, partial: bool = False) -> wire.Request:
    """A request of pairs 4, 0 and 1, whose rows are among `rows` of a GPU, written and read."""
    memory = bytearray(wire.size(len(places), 3, HIDDEN, partial, on_device=True))
    named = np.array([4, 0, 1]), np.array([0, 0, 1])
    weights = np.ones(3, np.float32) if partial else None
    nothing, there = np.empty((0, HIDDEN), np.float32), np.array(places)
    wire.write(memoryview(memory), 2, *named, weights, nothing, places=there)
    assert len(memory) == 28 + 12 + 12 + 12 * partial + 4 * len(places)
    return wire.parse(memoryview(memory), LAYERS, EXPERTS, HIDDEN, rows)


def test_rows_on_a_gpu_are_named_by_their_numbers() -> None:
    request = on_device([7, 2], rows=8)
    assert request.places is not None and request.places.tolist() == [7, 2]
    assert (request.experts.tolist(), request.rows.tolist()) == ([4, 0, 1], [0, 0, 1])
    assert len(request.hidden) == 0 and request.answer_rows == 3
    assert on_device([7, 2], rows=8, partial=True).answer_rows == 2


@pytest.mark.parametrize("places", [[8, 2], [0, -1]])
def test_rows_that_the_gpu_does_not_have_are_damage(places: list[int]) -> None:
    with pytest.raises(DamagedMessage, match="a request reads rows .* of 8"):
        on_device(places, rows=8)


def test_the_two_forms_are_not_confused() -> None:
    with pytest.raises(DamagedMessage, match="claims 2 rows"):
        wire.parse(memoryview(GOOD), LAYERS, EXPERTS, HIDDEN, 8)


def test_pairs_are_added_up_in_turns() -> None:
    request = parse(bytes(written([4, 0, 1, 2, 3], [0, 0, 1, 2, 1], np.zeros((3, 4), np.float32))))
    assert [turn.tolist() for turn in request.turns] == [[0, 2, 3], [1, 4]]
