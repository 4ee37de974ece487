"""Many attention workers behind one connection: who gets a request, and what happens when one leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.cluster.router import Router
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import Message
from moesaic.core.metrics import BlockStats, SpeculationStats, StateStats, TransferStats, WorkerStats
from moesaic.core.request import FinishReason, Request, SamplingParams
from moesaic.transport.local import LocalConnection, local_pair
from tests.support.fake_worker import info


class Workers:
    """A router and the far ends of its workers."""

    def __init__(self, count: int) -> None:
        self.router = Router()
        self.ends: list[LocalConnection] = []
        for number in range(count):
            ours, theirs = local_pair()
            self.ends.append(theirs)
            self.router.join(number, ours, info())

    def submit(self, *request_ids: int) -> None:
        params = SamplingParams(max_tokens=8)
        requests = [Request(number, [1, 2, 3], params, (), 0.0) for number in request_ids]
        for request in requests:
            self.router.send(messages.Submit([request]))

    def got(self, worker: int) -> list[tuple[int, list[int]]]:
        """(request, tokens it has already) that went to a worker since the last call."""
        found = []
        while (message := self.ends[worker].receive(0.0)) is not None:
            if isinstance(message, messages.Submit):
                generated = message.generated_ids or [[] for _ in message.requests]
                pairs = zip(message.requests, generated, strict=True)
                found += [(request.request_id, tokens) for request, tokens in pairs]
        return found

    def heard(self) -> list[Message]:
        """What the engine hears."""
        found = []
        while (message := self.router.receive(0.0)) is not None:
            found.append(message)
        return found


def token(request_id: int, value: int, finish: FinishReason | None = None) -> messages.Tokens:
    return messages.Tokens([request_id], [value], [finish])


def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new() -> None:
    workers = Workers(2)
    workers.submit(0, 1)
    assert [workers.got(0), workers.got(1)] == [[(0, [])], [(1, [])]]
    workers.router.drain(0)
    workers.submit(2, 3, 4)
    assert workers.got(0) == [] and len(workers.got(1)) == 3
    assert not workers.router.is_drained(0)
    workers.router.take(0, token(0, 7, FinishReason.LENGTH))
    assert workers.router.is_drained(0) and not workers.router.is_drained(1)
    workers.router.leave(0)
    assert workers.router.moved_requests == 0


def test_requests_wait_while_the_only_worker_drains() -> None:
    workers = Workers(1)
    workers.router.drain(0)
    workers.submit(0)
    assert workers.got(0) == []
    ours, theirs = local_pair()
    workers.ends.append(theirs)
    workers.router.join(1, ours, info())
    assert workers.got(1) == [(0, [])]


def test_a_request_moves_with_its_tokens_and_what_the_old_worker_still_says_is_ignored() -> None:
    workers = Workers(2)
    workers.submit(0)
    assert workers.got(0) == [(0, [])]
    workers.router.take(0, token(0, 7))
    workers.router.leave(0)
    assert workers.got(1) == [(0, [7])]
    workers.heard()
    for late in (
        token(0, 8),
        messages.RequestsAdmitted([0], [0.0], [0]),
        messages.Stats(WorkerStats(running=1)),
    ):
        workers.router.take(0, late)
    assert workers.heard() == []
    workers.router.take(1, token(0, 8))
    assert workers.heard() == [token(0, 8)]
    assert workers.router.moved_requests == 1


def test_a_worker_says_nothing_about_the_requests_of_others() -> None:
    workers = Workers(2)
    workers.submit(0, 1)
    workers.router.take(1, messages.Tokens([0, 1], [7, 8], [FinishReason.LENGTH, None]))
    workers.router.take(1, messages.PromptLogprobs(0, 0, []))
    told = [one for one in workers.heard() if one != messages.Tokens([], [], [])]
    assert told == [token(1, 8)]
    workers.router.take(0, token(0, 9, FinishReason.LENGTH))
    assert workers.heard() == [token(0, 9, FinishReason.LENGTH)]


@pytest.mark.parametrize("wrong", [-1, info().vocab_size, 1 << 62])
def test_a_token_that_is_not_in_the_vocabulary_reaches_nobody(wrong: int) -> None:
    workers = Workers(2)
    workers.submit(0)
    with pytest.raises(ConnectionLost, match="the vocabulary has"):
        workers.router.take(0, token(0, wrong))
    workers.router.leave(0)
    assert workers.got(1) == [(0, [])], "the next worker begins without it"


def test_what_a_worker_counted_stays_counted() -> None:
    workers = Workers(2)
    for worker in (0, 1):
        drafts = SpeculationStats(drafts=3, prices=(1.0, 1.5))
        workers.router.take(worker, messages.Stats(WorkerStats(running=2, steps=10, speculation=drafts)))
    assert workers.router.stats().speculation == SpeculationStats(drafts=6, prices=(2.0, 3.0))
    workers.router.leave(0)
    left = SpeculationStats(drafts=6, prices=(1.0, 1.5))
    assert workers.router.stats() == WorkerStats(running=2, steps=20, speculation=left)


def test_nothing_that_a_worker_held_is_counted_once_it_is_gone() -> None:
    workers = Workers(2)
    held = WorkerStats(
        running=2,
        waiting=1,
        blocks=BlockStats(num_total=8, num_free=3, num_cached=1, num_used=4, prefix_hits=5),
        states=StateStats(seats=4, seats_used=2, pages=9, pages_free=4, snapshots=3),
        transfers=TransferStats(received_requests=6, held_bytes=7),
    )
    for worker in (0, 1):
        workers.router.take(worker, messages.Stats(held))
    workers.router.leave(0)
    left = workers.router.stats()
    assert left.states == held.states and left.blocks == replace(held.blocks, prefix_hits=10)
    assert (left.running, left.waiting) == (2, 1)
    assert left.transfers == TransferStats(received_requests=12, held_bytes=7)


def test_the_engine_hears_what_all_workers_are_together() -> None:
    workers = Workers(3)
    workers.router.tell_ready()
    [ready] = workers.heard()
    assert isinstance(ready, messages.Ready)
    assert (ready.info.num_blocks, ready.info.max_num_seqs) == (3 * 64, 3 * 4)
    for worker in range(3):
        workers.router.leave(worker)
    workers.router.tell_ready()
    assert workers.heard() == []
