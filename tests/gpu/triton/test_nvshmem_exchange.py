"""The launches that send rows to servers by NVSHMEM, against plain torch, in one process."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.gpu.triton.test_exchange import EXPERTS, INDEX, LAYER, POLLS, WORKER, steps
from tests.support.nvshmem_calls import calls
from tests.support.triton_kernels import IS_INTERPRETED, Launches

from moesaic.core.messages import JoinJob
from moesaic.experts import wire
from moesaic.gpu.exchange.exchange_launches import ADDRESSES, LEAST_SLOTS, Exchange
from moesaic.gpu.nvshmem.job import Channels
from moesaic.gpu.triton import nvshmem_exchange as exchange

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="the heaps of this test are memory of the CPU")


class Heaps:
    """A worker's heap, those of its servers, and an exchange among them. Process 1 + s has slot s."""

    def __init__(self, rows: int, top_k: int, width: int, slots: list[int], table: list[int]) -> None:
        """slots: those that have a server. table: the slot of each expert."""
        servers = LEAST_SLOTS
        self.place = JoinJob(b"", 0, 1, servers)
        self.channels = Channels(servers, rows, rows * top_k, width)
        self.heaps = torch.zeros(1 + servers, self.channels.size, dtype=torch.uint8)
        self.told = torch.zeros(4, servers, dtype=torch.int64)
        self.header = torch.full((servers, 8), -7, dtype=torch.int32)
        self.abort = torch.zeros(1, dtype=torch.int64)
        self.sent: list[int] = []
        self.rows, self.width = rows, width
        own, where = self.heaps[0].data_ptr(), self.channels
        addresses = torch.zeros(ADDRESSES, servers, dtype=torch.int64)
        for slot in slots:
            host = [self.told[0, slot], self.header[slot], self.told[1, slot], self.told[2, slot]]
            request_word, header, answer, doubt = (one.data_ptr() for one in host)
            places = where.request(slot), where.answer_word(slot), where.answers(slot)
            request, answer_word, answers = (own + one for one in places)
            there = own + where.request(0), own + where.request_word(0)
            column = [request, request_word, answer_word, answers, 1 + slot, *there, header, answer, doubt]
            addresses[:, slot] = torch.tensor(column)
        headers = torch.from_numpy(np.stack([wire.header(layer, width, WORKER) for layer in (0, LAYER)]))
        self.exchange = Exchange(
            addresses,
            torch.tensor([[-1] * EXPERTS, table], dtype=torch.int32),
            headers,
            wire.ROWS_WORD,
            wire.PAIRS_WORD,
            torch.empty(0, width),
            torch.full((servers, rows + 1), -7, dtype=torch.int32),
            torch.tensor([rows, 0], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64),
            torch.full((2, servers), -1, dtype=torch.int32),
            torch.tensor([self.abort.data_ptr()]),
        )

    def put(self, target: int, source: int, size: int, signal: int, number: int, pe: int) -> None:
        """As NVSHMEM: to the same places in the heap of another process."""
        own, there = self.heaps[0].data_ptr(), self.heaps[pe].data_ptr()
        assert 0 <= source - own <= source - own + size <= self.channels.size
        ctypes.memmove(there + target - own, source, size)
        ctypes.c_int64.from_address(there + signal - own).value = number
        self.sent.append(size)

    def word(self, pe: int, place: int) -> int:
        return int(self.heaps[pe, place : place + 8].view(torch.int64))

    def request(self, slot: int) -> wire.Request:
        """As a server reads it, with its rows."""
        memory = memoryview(self.heaps[1 + slot].numpy()).cast("B")[self.channels.request(0) :]  # type: ignore[arg-type]
        rows, pairs = wire.read_counts(memory)
        size = wire.size(rows, pairs, self.width, False, on_device=True)
        request = wire.parse(memory[:size], LAYER + 1, EXPERTS, self.width, on_device=self.rows)
        assert request.places is not None and request.places.tolist() == list(range(rows))
        begin = self.channels.rows_at(rows, pairs)
        hidden = np.frombuffer(memory, np.float32, rows * self.width, begin).reshape(rows, self.width)
        request.__dict__["hidden"] = hidden
        return request

    def answer(self, slot: int, doubt: bool = False) -> None:
        """Each pair's answer is its row times its expert's number plus one."""
        request, where = self.request(slot), self.channels
        rows = request.hidden[request.rows] * np.float32(request.experts[:, None] + 1)
        begin = where.answers(slot)
        self.heaps[0, begin : begin + rows.nbytes] = torch.from_numpy(rows.reshape(-1).view(np.uint8))
        word = self.heaps[0, where.answer_word(slot) :][:8].view(torch.int64)
        word[0] = 2 * self.word(1 + slot, where.request_word(0)) + doubt


@given(steps())
@settings(max_examples=25, deadline=None)
def test_a_layer_of_a_step(step: tuple[torch.Tensor, torch.Tensor, int, list[int]]) -> None:
    """A server gets the rows of its pairs and no others, in one piece, and answers land at their pairs."""
    hidden, ids, live, table = step
    (rows, top_k), width, used = ids.shape, hidden.shape[1], sorted(set(table))
    heaps = Heaps(rows, top_k, width, used, table)
    heaps.exchange.step[0] = live
    heaps.exchange.sequence[0] = 41
    before = Launches.count
    with calls(heaps.put):
        sources = exchange.dispatch(heaps.exchange, INDEX, hidden, ids)
        assert not heaps.sent and not heaps.told.any()
        exchange.post(heaps.exchange, INDEX)
        of_pair = torch.tensor(table)[ids[:live]].flatten()
        asked = torch.bincount(of_pair, minlength=LEAST_SLOTS)
        assert torch.equal(heaps.exchange.pair_counts[INDEX].long(), asked)
        assert torch.equal(heaps.told[0], torch.where(asked > 0, 42, 0))
        assert len(heaps.sent) == int((asked > 0).sum())
        for slot in asked.nonzero().flatten().tolist():
            request, pairs = heaps.request(slot), (of_pair == slot).nonzero().flatten().numpy()
            mine, lines = np.unique(pairs // top_k, return_inverse=True)
            assert (request.layer, request.worker, request.attempt) == (LAYER, WORKER, 0)
            assert request.rows.tolist() == lines.tolist()
            assert request.experts.tolist() == ids.flatten()[pairs].tolist()
            assert np.array_equal(request.hidden, hidden[mine].numpy())
            assert wire.read_counts(memoryview(heaps.header[slot].numpy()).cast("B")) == (
                len(mine),
                len(pairs),
            )  # type: ignore[arg-type]
            heaps.answer(slot, doubt=slot == 0)
        exchange.wait(heaps.exchange, INDEX, POLLS)
        found = exchange.collect(sources, top_k, width)
    assert Launches.count - before == 5
    wanted = hidden[:, None] * (ids[:, :, None] + 1)
    wanted[live:] = 0.0
    assert torch.equal(found, wanted) and heaps.exchange.step.tolist() == [live, 0]
    assert torch.equal(heaps.told[1], heaps.told[0]) and heaps.told[2].tolist()[1:] == [0] * (LEAST_SLOTS - 1)
    assert bool(heaps.told[2, 0]) == bool(asked[0])


@pytest.fixture
def asked() -> Iterator[Heaps]:
    """Two rows were sent to two slots, and the first one has answered."""
    heaps = Heaps(2, 2, 5, [0, 1], [0, 0, 0, 1, 1, 1])
    with calls(heaps.put):
        exchange.dispatch(heaps.exchange, INDEX, torch.randn(2, 5), torch.tensor([[0, 5], [5, 1]]))
        exchange.post(heaps.exchange, INDEX)
        heaps.answer(0)
        yield heaps


def test_the_spinning_program_ends_with_the_last_answer(asked: Heaps) -> None:
    waiting = threading.Thread(target=exchange.wait, args=(asked.exchange, INDEX, POLLS))
    waiting.start()
    until = time.monotonic() + 20
    while not asked.told[1, 0] and time.monotonic() < until:
        time.sleep(0.01)
    assert waiting.is_alive() and asked.told[1, :2].tolist() == [1, 0], "the host is told of each answer"
    asked.answer(1)
    waiting.join(20)
    assert not waiting.is_alive() and asked.exchange.step[1] == 0


@pytest.mark.parametrize("why", ["told", "polls"])
def test_a_step_that_fails_asks_nobody_any_more(asked: Heaps, why: str) -> None:
    asked.abort[0] = int(why == "told")
    exchange.wait(asked.exchange, INDEX, POLLS if why == "told" else 3)
    assert asked.exchange.step.tolist() == [2, 1]
    before, sent = asked.heaps.clone(), len(asked.sent)
    sources = exchange.dispatch(asked.exchange, INDEX, torch.randn(2, 5), torch.tensor([[0, 1], [5, 4]]))
    exchange.post(asked.exchange, INDEX)
    exchange.wait(asked.exchange, INDEX, POLLS)  # ends at once: else it would take a minute
    assert torch.equal(asked.heaps, before) and len(asked.sent) == sent
    assert not sources.any() and not exchange.collect(sources, 2, 5).any()
