"""The launches between a worker and its servers against plain torch, in one process."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.triton_kernels import IS_INTERPRETED, Launches

from moesaic.experts import wire
from moesaic.gpu.exchange.exchange_launches import ADDRESSES, LEAST_SLOTS, Exchange
from moesaic.gpu.triton import exchange

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="mailboxes of this test are memory of the CPU")

LAYER, INDEX, WORKER, EXPERTS = 5, 1, 77, 6
POLLS = 1 << 20


class Mailboxes:
    """Slots of one process, and an exchange among them."""

    def __init__(self, rows: int, top_k: int, width: int, slots: list[int], table: list[int]) -> None:
        """slots: the slots that have a mailbox. table: the slot of each expert."""
        self.width = width
        self.requests = torch.full(
            (LEAST_SLOTS, wire.size(rows, rows * top_k, width, False, on_device=True) // 4), -7
        ).int()
        self.words = torch.zeros(2, LEAST_SLOTS, dtype=torch.int64)
        self.answers = torch.full((LEAST_SLOTS, max(1, rows * top_k), width), torch.nan)
        self.abort = torch.zeros(1, dtype=torch.int64)
        addresses = torch.zeros(ADDRESSES, LEAST_SLOTS, dtype=torch.int64)
        for slot in slots:
            memory = self.requests, self.words[0], self.words[1], self.answers
            addresses[:4, slot] = torch.tensor([one[slot].data_ptr() for one in memory])
        headers = torch.from_numpy(np.stack([wire.header(layer, width, WORKER) for layer in (0, LAYER)]))
        self.exchange = Exchange(
            addresses,
            torch.tensor([[-1] * EXPERTS, table], dtype=torch.int32),
            headers,
            wire.ROWS_WORD,
            wire.PAIRS_WORD,
            torch.full((rows, width), torch.nan),
            torch.empty(0, 0, dtype=torch.int32),
            torch.tensor([rows, 0], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64),
            torch.full((2, LEAST_SLOTS), -1, dtype=torch.int32),
            torch.tensor([self.abort.data_ptr()]),
        )

    def request(self, slot: int) -> wire.Request:
        """As a server reads it."""
        memory = memoryview(self.requests[slot].numpy()).cast("B")  # type: ignore[arg-type]
        size = wire.size(*wire.read_counts(memory), self.width, False, on_device=True)
        request = wire.parse(memory[:size], LAYER + 1, EXPERTS, self.width, on_device=len(self.exchange.rows))
        assert request.places is not None and request.places.tolist() == list(range(len(request.places)))
        return replace(request, hidden=self.exchange.rows.numpy()[request.places])

    def answer(self, slot: int) -> None:
        """Each pair's answer is its row times its expert's number plus one."""
        request = self.request(slot)
        rows = request.hidden[request.rows] * (request.experts[:, None] + 1)
        self.answers[slot, : len(rows)] = torch.from_numpy(rows)
        self.words[1, slot] = self.words[0, slot]


@st.composite
def steps(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, list[int]]:
    """Hidden rows, expert ids, the rows that are not padded, and each expert's slot."""
    rows, top_k, width = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 40))
    live = draw(st.integers(0, rows))
    experts = st.lists(st.integers(0, EXPERTS - 1), min_size=top_k, max_size=top_k, unique=True)
    ids = draw(st.lists(experts, min_size=rows, max_size=rows))
    servers = draw(st.sampled_from(([3], [0, 2], [0, 1, LEAST_SLOTS - 1])))
    table = draw(st.lists(st.sampled_from(servers), min_size=EXPERTS, max_size=EXPERTS))
    return torch.randn(rows, width), torch.tensor(ids), live, table


@given(steps())
@settings(max_examples=25, deadline=None)
def test_a_layer_of_a_step(step: tuple[torch.Tensor, torch.Tensor, int, list[int]]) -> None:
    """Servers without pairs are not told, padded rows are not sent, and answers land at their pairs."""
    hidden, ids, live, table = step
    (rows, top_k), width, used = ids.shape, hidden.shape[1], sorted(set(table))
    mailboxes = Mailboxes(rows, top_k, width, used, table)
    mailboxes.exchange.step[0] = live
    mailboxes.exchange.sequence[0] = 41
    before = Launches.count
    sources = exchange.dispatch(mailboxes.exchange, INDEX, hidden, ids)
    assert not mailboxes.words.any()
    exchange.post(mailboxes.exchange, INDEX)
    of_pair = torch.tensor(table)[ids[:live]].flatten()
    asked = torch.bincount(of_pair, minlength=LEAST_SLOTS)
    assert torch.equal(mailboxes.exchange.pair_counts[INDEX].long(), asked)
    assert torch.equal(mailboxes.words[0], torch.where(asked > 0, 42, 0))
    assert torch.equal(mailboxes.exchange.rows[:live], hidden[:live])
    assert mailboxes.exchange.rows[live:].isnan().all()
    for slot in asked.nonzero().flatten().tolist():
        request, pairs = mailboxes.request(slot), (of_pair == slot).nonzero().flatten().numpy()
        assert (request.layer, request.worker, request.attempt) == (LAYER, WORKER, 0)
        assert request.rows.tolist() == (pairs // top_k).tolist()
        assert request.experts.tolist() == ids.flatten()[pairs].tolist()
        mailboxes.answer(slot)
    exchange.wait(mailboxes.exchange, INDEX, POLLS)
    found = exchange.collect(sources, top_k, width)
    assert Launches.count - before == 4
    wanted = hidden[:, None] * (ids[:, :, None] + 1)
    wanted[live:] = 0.0
    assert torch.equal(found, wanted) and mailboxes.exchange.step.tolist() == [live, 0]


def asked(slots: list[int], table: list[int]) -> Mailboxes:
    """Two rows were sent to these slots."""
    mailboxes = Mailboxes(2, 2, 5, slots, table)
    exchange.dispatch(mailboxes.exchange, INDEX, torch.randn(2, 5), torch.tensor([[0, 5], [5, 1]]))
    exchange.post(mailboxes.exchange, INDEX)
    return mailboxes


def test_the_spinning_program_ends_with_the_last_answer() -> None:
    mailboxes = asked([0, 1], [0, 0, 0, 1, 1, 1])
    mailboxes.answer(0)
    waiting = threading.Thread(target=exchange.wait, args=(mailboxes.exchange, INDEX, POLLS))
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    mailboxes.answer(1)
    waiting.join(20)
    assert not waiting.is_alive() and mailboxes.exchange.step[1] == 0


@pytest.mark.parametrize("why", ["told", "polls"])
def test_a_step_that_fails_asks_nobody_any_more(why: str) -> None:
    mailboxes = asked([0, 1], [0, 0, 0, 1, 1, 1])
    mailboxes.answer(0)
    mailboxes.abort[0] = int(why == "told")
    exchange.wait(mailboxes.exchange, INDEX, POLLS if why == "told" else 3)
    assert mailboxes.exchange.step.tolist() == [2, 1]
    before, requests = mailboxes.words.clone(), mailboxes.requests.clone()
    sources = exchange.dispatch(mailboxes.exchange, INDEX, torch.randn(2, 5), torch.tensor([[0, 1], [5, 4]]))
    exchange.post(mailboxes.exchange, INDEX)
    exchange.wait(mailboxes.exchange, INDEX, POLLS)  # ends at once: else it would take a minute
    assert torch.equal(mailboxes.words, before) and torch.equal(mailboxes.requests, requests)
    assert not sources.any() and not exchange.collect(sources, 2, 5).any()


def test_an_answer_to_an_older_request_does_not_count() -> None:
    mailboxes = asked([0], [0] * 6)
    mailboxes.words[1, 0] = 1 - int(mailboxes.exchange.sequence)
    exchange.wait(mailboxes.exchange, INDEX, 3)
    assert mailboxes.exchange.step[1] == 1


def test_experts_of_slots_without_a_mailbox_are_asked_of_nobody() -> None:
    """The host starts no such step, but memory must be safe whatever the table says."""
    mailboxes = asked([0], [0, -1, 0, 1, 1, 1])
    assert mailboxes.words[0].nonzero().flatten().tolist() == [0] and mailboxes.request(0).rows.tolist() == [
        0
    ]
