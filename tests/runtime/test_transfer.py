"""KV from a prefill worker to another one, over real connections and over memory that is a few bytes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from moesaic.config import HostTransport
from moesaic.core import messages
from moesaic.core.endpoint import Endpoint
from moesaic.core.metrics import TransferStats
from moesaic.core.request import Request, SamplingParams
from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.models.kvcache.images import Bytes, OnLayerWritten
from moesaic.policy.scheduling.schedulers.actions import Restore, StepPlan
from moesaic.runtime.transfer import sending
from moesaic.runtime.transfer.pieces import HEADER_BYTES, PieceHeader
from moesaic.runtime.transfer.receiving import KVReceiver
from moesaic.runtime.transfer.sending import KVSender
from moesaic.transport.calls import Caller
from moesaic.transport.listening import connect

BLOCK = 4
"""Tokens of a block."""
PATIENCE = 60.0
NONE = np.zeros(0, np.int64)


class Memory:
    """8 blocks of 3 layers, of 2 bytes in each; pages and seats of 3 bytes each."""

    num_layers, layer_bytes, state_bytes = 3, 2, 6

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.blocks = draw.integers(0, 256, (8, 6), np.uint8)
        self.states = draw.integers(0, 256, (8, 3), np.uint8)
        self.written: OnLayerWritten = lambda layer: None

    def watch(self, on_layer_written: OnLayerWritten) -> None:
        self.written = on_layer_written

    def copy_blocks(self, blocks: IntArray, layers: range) -> Bytes:
        return self._of(layers)[blocks].swapaxes(0, 1).reshape(-1)

    def put_blocks(self, blocks: IntArray, layers: range, data: Bytes, num_skipped: int = 0) -> None:
        lines = data.reshape(len(layers), len(blocks), 2).swapaxes(0, 1)
        self._of(layers)[blocks[num_skipped:]] = lines[num_skipped:]

    def _of(self, layers: range) -> Bytes:
        """[8, layers, 2]"""
        return self.blocks.reshape(8, 3, 2)[:, layers.start : layers.stop]

    def copy_states(self, page: int, seat: int) -> Bytes:
        return self.states[[page, seat]].reshape(-1)

    def put_states(self, page: int, seat: int, data: Bytes) -> None:
        self.states[[page, seat]] = data.reshape(2, 3)


class Pair:
    """A sender and a receiver, and what they report."""

    def __init__(
        self, transport: HostTransport = "shm", most_queued: int = 1 << 20, early: int = 1 << 20
    ) -> None:
        self.here, self.there = Memory(1), Memory(2)
        self.reports: list[messages.Message] = []
        self.receiver = KVReceiver(self.there, BLOCK, self.reports.append)
        self.sender = KVSender(self.here, BLOCK, self.reports.append, transport, most_queued, early)

    def begin(self, transfer: int = 1, tokens: int = 10, endpoint: Endpoint | None = None) -> None:
        """Request 5 of so many tokens, one of which is generated, arrives at the sender."""
        target = messages.KVTarget(transfer, endpoint or self.receiver.endpoint, self.receiver.secret)
        request = Request(5, [1] * (tokens - 1), SamplingParams())
        self.sender.expect(messages.Submit([request], [[9]], {5: target}))

    def step(self, done: int, request_id: int = 5, layers: int = 0, ends: bool = True) -> None:
        """The rows up to `done` are computed, in blocks 3, 1, 6, from page 4 to page 2 and in seat 7.

        layers: so many of them tell that they are written; those of a replayed step tell nothing.
        """
        line = np.array([[4, 0, 2, 7]])
        table, one = np.array([[3, 1, 6]]), np.array([1])
        batch = TokenBatch(one, one, np.array([0, 1]), np.array([done]), table, NONE, line)
        plan = StepPlan(0, batch, np.array([request_id]), one, NONE, NONE)
        self.sender.begin(plan)
        for layer in range(layers):
            self.here.written(layer)
        if ends:
            self.sender.on_step_computed(plan)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.reports
            time.sleep(0.001)

    def arrived(self, transfer: int = 1) -> None:
        self.wait(lambda: messages.KVReceived(transfer) in self.reports)

    def claim(self, transfer: int = 1) -> dict[int, int]:
        """Request 5 goes on at the receiver, with what the transfer brought."""
        request = Request(5, [1, 2], SamplingParams())
        self.receiver.expect(messages.Submit([request], received_transfers={5: transfer}))
        return self.receiver.count_received_tokens([request])


@pytest.fixture
def pair() -> Iterator[Pair]:
    with contextlib.closing(Pair()) as made:
        yield made


@pytest.mark.parametrize("transport", ["shm", "socket"])
def test_blocks_travel_as_they_are_complete_and_the_last_one_with_the_states(
    transport: HostTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "PIECE_BYTES", 6)  # a block each
    pair = Pair(transport)
    pair.begin(tokens=10)
    pair.step(5)
    pair.wait(lambda: pair.receiver.stats().held_bytes == 6)
    kept = pair.here.blocks.copy()
    pair.here.blocks[3] = 0  # it was copied
    pair.step(12)  # two rows are drafted tokens
    pair.arrived()
    assert pair.claim() == {5: 10}
    blocks = np.array([0, 2, 4, 5])
    pair.receiver.restore(Restore(5, range(4, 10), blocks, (1, 0, 1, 6)))
    assert (pair.there.blocks[[2, 4]] == kept[[1, 6]]).all()
    untouched = Memory(2)
    assert (pair.there.blocks[[0, 5]] == untouched.blocks[[0, 5]]).all()  # the first one was cached
    assert (pair.there.states[[1, 6]] == pair.here.states[[4, 7]]).all()
    assert pair.receiver.stats().held_bytes == 0 and pair.receiver.stats().received_tokens == 6
    pair.wait(lambda: pair.sender.stats().sent_bytes == 3 * HEADER_BYTES + 18 + 6)
    assert pair.sender.stats().sent_requests == 1 and pair.sender.stats().failed_transfers == 0
    pair.close()


def test_an_idle_sender_reports_that_all_has_arrived(pair: Pair) -> None:
    """Nothing else happens at it after the last step, which ends before the last pieces have arrived."""
    pair.begin()
    pair.step(5)
    pair.step(10)
    pair.wait(lambda: pair.sender.stats().sent_bytes == 2 * HEADER_BYTES + 18 + 6)
    pair.wait(lambda: messages.KVSent(pair.sender.stats()) in pair.reports)


def test_layers_leave_before_their_step_has_ended() -> None:
    """In groups of enough bytes. The last layer stays until the end, also for a step that ends early."""
    pair = Pair(early=4)
    pair.begin(tokens=10)
    pair.step(5, layers=1, ends=False)  # one block of one layer
    assert pair.receiver.stats().held_bytes == 0 == pair.sender.stats().sent_bytes
    pair.here.written(1)
    pair.wait(lambda: pair.receiver.stats().held_bytes == 4)
    pair.here.written(2)
    kept = pair.here.blocks.copy()
    pair.step(5)
    pair.wait(lambda: pair.receiver.stats().held_bytes == 6)
    pair.here.blocks[3] = 0  # it was copied
    pair.step(10, layers=3, ends=False)  # two blocks: a piece each of layers 0 and 1
    pair.wait(lambda: pair.sender.stats().early_bytes == 3 * HEADER_BYTES + 12)
    pair.step(10)
    pair.arrived()
    assert pair.claim() == {5: 10}
    pair.receiver.restore(Restore(5, range(10), np.array([0, 2, 4]), (1, 0, 1, 6)))
    assert (pair.there.blocks[[0, 2, 4]] == kept[[3, 1, 6]]).all()
    assert (pair.there.states[[1, 6]] == pair.here.states[[4, 7]]).all()
    pair.wait(lambda: pair.sender.stats().sent_bytes == 5 * HEADER_BYTES + 18 + 6)
    assert pair.sender.stats().early_bytes == 3 * HEADER_BYTES + 12
    pair.close()


def test_layers_of_steps_that_tell_nothing_leave_at_the_end() -> None:
    pair = Pair(early=1)
    pair.begin(tokens=10)
    pair.step(5, layers=2)
    pair.step(10)
    pair.arrived()
    assert pair.claim() == {5: 10}
    pair.receiver.restore(Restore(5, range(10), np.array([0, 2, 4]), (1, 0, 1, 6)))
    assert (pair.there.blocks[[0, 2, 4]] == pair.here.blocks[[3, 1, 6]]).all()
    pair.close()


def test_a_request_that_ends_during_a_step_sends_nothing_more() -> None:
    pair = Pair(early=1)
    pair.begin(tokens=10)
    pair.step(5, ends=False)
    pair.sender.forget([5])
    pair.here.written(0)
    pair.step(5, layers=3)
    assert pair.sender.stats() == TransferStats() and pair.reports == []
    pair.close()


def test_the_page_is_the_one_that_stands_at_the_last_multiple(pair: Pair) -> None:
    pair.begin(tokens=70)
    table = np.array([[0] * 18])
    line, one = np.array([[4, 0, 2, 7]]), np.array([1])
    batch = TokenBatch(one, one, np.array([0, 1]), np.array([70]), table, NONE, line)
    pair.sender.on_step_computed(StepPlan(0, batch, np.array([5]), one, NONE, NONE))
    pair.arrived()
    pair.claim()
    pair.receiver.restore(Restore(5, range(70), np.zeros(18, np.int64), (1, 64, 1, 6)))
    assert (pair.there.states[[1, 6]] == pair.here.states[[2, 7]]).all()


def test_other_requests_send_nothing(pair: Pair) -> None:
    pair.step(10)
    pair.begin()
    pair.step(10, request_id=6)
    pair.sender.forget([5, 77])
    pair.step(10)
    assert pair.reports == [] and pair.sender.stats().sent_requests == 0


def test_what_is_dropped_is_not_kept_whenever_it_comes(pair: Pair) -> None:
    pair.begin()
    pair.step(5)
    pair.wait(lambda: pair.receiver.stats().held_bytes)
    pair.receiver.drop([1])
    pair.step(10)
    pair.arrived()
    assert pair.receiver.stats().held_bytes == 0 and pair.claim() == {}


def test_a_request_that_ends_before_it_is_admitted_leaves_nothing(pair: Pair) -> None:
    pair.begin()
    pair.step(10)
    pair.arrived()
    assert pair.claim() and pair.receiver.stats().held_bytes
    pair.receiver.forget([5])
    assert pair.receiver.stats().held_bytes == 0


def test_a_worker_that_is_not_there_is_reported(pair: Pair) -> None:
    pair.begin(endpoint=Endpoint("unix:@nobody"))
    pair.step(10)
    pair.wait(lambda: messages.KVNotSent([1]) in pair.reports)
    pair.begin(transfer=2, endpoint=Endpoint("unix:@nobody"))
    pair.step(10)
    pair.wait(lambda: messages.KVNotSent([2]) in pair.reports)
    assert pair.sender.stats().failed_transfers == 2


def test_requests_are_given_up_while_too_much_waits() -> None:
    pair = Pair(most_queued=-1)
    pair.begin()
    pair.step(5)
    assert pair.reports == [messages.KVNotSent([1])]
    pair.step(10)
    assert pair.reports == [messages.KVNotSent([1])]
    pair.close()


def by_hand(pair: Pair) -> Caller:
    return connect(pair.receiver.endpoint.address, pair.receiver.secret, "shm", 1 << 20)


def post(caller: Caller, *parts: bytes) -> None:
    data = b"".join(parts)
    call = caller.open(len(data), 1, 1)
    assert call is not None
    call.request[:] = data
    caller.post(call)


def header(
    first: int, blocks: int, tokens: int = 0, layers: tuple[int, int] = (0, 3), transfer: int = 1
) -> PieceHeader:
    """layers: the first one, and their number."""
    return PieceHeader(transfer, *layers, first, blocks, tokens)


DAMAGED: dict[str, list[tuple[bytes, bytes]]] = {
    "short": [(b"x", b"")],
    "bytes are missing": [(header(0, 2).pack(), bytes(6))],
    "too many": [(header(0, 1).pack(), bytes(7))],
    "no states": [(header(0, 1, 4).pack(), bytes(6))],
    "a gap": [(header(1, 1).pack(), bytes(6))],
    "twice": [(header(0, 1).pack(), bytes(6))] * 2,
    "behind the end": [
        (header(0, 1, 4).pack(), bytes(12)),
        (header(1, 1).pack(), bytes(6)),
    ],
    "a layer that is not there": [(header(0, 1, layers=(2, 2)).pack(), bytes(4))],
    "no layer": [(header(0, 1, layers=(1, 0)).pack(), b"")],
    "the last piece before another layer": [(header(0, 1, 4, layers=(0, 2)).pack(), bytes(10))],
    "a layer twice": [(header(0, 1, layers=(1, 1)).pack(), bytes(2)), (header(0, 1).pack(), bytes(6))],
    "more tokens than blocks": [(header(0, 1, 5).pack(), bytes(12))],
    "more blocks than tokens": [(header(0, 2, 4).pack(), bytes(18))],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_piece_ends_its_connection_and_nothing_else(
    name: str, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caller = by_hand(pair)
    for parts in DAMAGED[name]:
        post(caller, *parts)
    pair.wait(lambda: "dropped a prefill worker" in caplog.text)
    pair.begin(transfer=2)
    pair.step(10)
    pair.arrived(2)
    assert pair.claim(2) == {5: 10}
    pair.receiver.drop([1])
    assert pair.receiver.stats().held_bytes > 0  # that of request 5
    caller.close()


def test_unfinished_kv_of_a_dead_prefill_worker_is_forgotten(pair: Pair) -> None:
    caller = by_hand(pair)
    post(caller, header(0, 1).pack(), bytes(6))
    post(caller, header(0, 1, 4, transfer=2).pack(), bytes(12))
    pair.arrived(2)
    caller.close()
    pair.wait(lambda: pair.receiver.stats().held_bytes == 12)
    assert pair.claim(1) == {}
    assert pair.claim(2) == {5: 4}
