"""Requests that begin at a prefill worker: who gets what, and what a death, an end or a failure changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moesaic.cluster.router import Router
from moesaic.core import messages
from moesaic.core.endpoint import Endpoint
from moesaic.core.messages import Message
from moesaic.core.metrics import TransferStats, WorkerStats
from moesaic.core.request import FinishReason, Request, SamplingParams
from moesaic.transport.local import LocalConnection, local_pair
from tests.support.fake_worker import info

PROMPT = list(range(3, 43))
PREFILL = 100
"""Number of the first prefill worker."""


class Workers:
    """A router, two workers that generate, and two prefill workers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.router = Router(clock=clock)
        self.ends: dict[int, LocalConnection] = {}
        for number in (0, 1, PREFILL, PREFILL + 1):
            self.join(number)

    def join(self, number: int) -> None:
        ours, self.ends[number] = local_pair()
        kv = messages.ReceivesKV(Endpoint(f"unix:@{number}"), b"secret") if number < PREFILL else None
        self.router.join(number, ours, info(max_model_len=1024), prefill=number >= PREFILL, kv=kv)

    def submit(self, request_id: int = 0, **params: Any) -> messages.Submit:
        """What the prefill worker gets of a request."""
        chosen = SamplingParams(**{"max_tokens": 8} | params)
        self.router.send(messages.Submit([Request(request_id, PROMPT, chosen)]))
        [submit] = [one for one in self.got(PREFILL) if isinstance(one, messages.Submit)]
        return submit

    def got(self, worker: int) -> list[Message]:
        """What went to a worker since the last call."""
        found = []
        while (message := self.ends[worker].receive(0.0)) is not None:
            found.append(message)
        return found

    def sampled(self, token: int = 50, finish: FinishReason | None = FinishReason.LENGTH) -> None:
        self.router.take(PREFILL, messages.Tokens([0], [token], [finish]))

    def heard(self) -> list[Message]:
        """What the engine hears."""
        found = []
        while (message := self.router.receive(0.0)) is not None:
            found.append(message)
        return found

    @property
    def open_requests(self) -> dict[int, int]:
        """Worker -> its requests."""
        loads = self.router.loads() | self.router.loads(prefill=True)
        assert all(load.used_blocks >= 0 for load in loads.values())
        assert all(bool(load.requests) == bool(load.used_blocks) for load in loads.values())
        return {worker: load.requests for worker, load in loads.items() if load.requests}


def test_the_prefill_worker_gets_one_token_to_sample_and_a_place_to_send_to() -> None:
    workers = Workers()
    submit = workers.submit(min_tokens=4)
    [request] = submit.requests
    assert (request.params.max_tokens, request.params.min_tokens) == (1, 1)
    assert submit.targets == {0: messages.KVTarget(1, Endpoint("unix:@0"), b"secret")}
    assert workers.got(0) == []
    assert workers.open_requests == {0: 1, PREFILL: 1} and workers.router.transfers == [(1, 0)]


def test_prefill_workers_do_not_count_as_room_for_answers() -> None:
    """--autoscale adds workers that generate once these are full, however idle the prefill workers are."""
    workers = Workers()
    seats = info(max_model_len=1024).max_num_seqs
    short = [Request(number, PROMPT[:5], SamplingParams(max_tokens=8)) for number in range(2 * seats)]
    workers.router.send(messages.Submit(short))
    assert workers.open_requests == {0: seats, 1: seats}
    assert workers.router.measure_occupancy() == 1.0


@pytest.mark.parametrize("token_first", [True, False])
def test_the_other_worker_goes_on_once_token_and_kv_are_there(token_first: bool) -> None:
    workers = Workers()
    workers.submit(prompt_logprobs=1)
    for token in (token_first, not token_first):
        assert workers.got(0) == []
        if token:
            workers.sampled()
        else:
            workers.router.take(0, messages.KVReceived(1))
    [submit] = workers.got(0)
    assert isinstance(submit, messages.Submit)
    assert submit.generated_ids == [[50]] and submit.received_transfers == {0: 1}
    [request] = submit.requests
    assert (request.params.max_tokens, request.params.prompt_logprobs) == (8, None)
    assert workers.heard() == [messages.Tokens([0], [50], [None])]
    assert workers.open_requests == {0: 1} and workers.router.transfers == []


@pytest.mark.parametrize(
    ("params", "finish"),
    [({}, FinishReason.STOP), ({}, FinishReason.ERROR), ({"max_tokens": 1}, FinishReason.LENGTH)],
)
def test_a_request_that_ends_with_its_first_token_goes_nowhere(
    params: dict[str, Any], finish: FinishReason
) -> None:
    workers = Workers()
    submit = workers.submit(**params)
    workers.sampled(finish=finish)
    assert workers.heard() == [messages.Tokens([0], [50], [finish])]
    assert bool(submit.targets) == (not params)  # the only token needs no KV elsewhere
    assert workers.got(0) == ([] if params else [messages.DropKV([1])])
    workers.router.take(0, messages.KVReceived(1))
    assert workers.got(0) == [messages.DropKV([1])]
    assert workers.open_requests == {}


def test_a_cancelled_request_is_dropped_on_both_sides() -> None:
    workers = Workers()
    workers.submit()
    workers.router.send(messages.Cancel([0]))
    assert workers.got(PREFILL) == [messages.Cancel([0])] and workers.got(0) == [messages.DropKV([1])]
    workers.sampled()
    workers.router.take(0, messages.KVReceived(1))
    assert workers.got(0) == [messages.DropKV([1])] and workers.open_requests == {}


@pytest.mark.parametrize("sampled", [True, False])
def test_a_dead_prefill_worker_is_replaced_and_its_late_kv_is_not_used(sampled: bool) -> None:
    workers = Workers()
    workers.submit()
    if sampled:
        workers.sampled()
    workers.router.leave(PREFILL)
    assert workers.got(0) == [messages.DropKV([1])]
    [again] = workers.got(PREFILL + 1)
    assert isinstance(again, messages.Submit)
    assert again.generated_ids == [[50] if sampled else []] and again.targets[0].transfer == 2
    assert again.requests[0].params.max_tokens == 1 + sampled
    workers.router.take(0, messages.KVReceived(1))
    assert workers.got(0) == [messages.DropKV([1])] and workers.router.transfers == [(2, 0)]
    assert workers.open_requests == {0: 1, PREFILL + 1: 1} and workers.router.moved_requests == 1


def test_without_a_prefill_worker_the_other_one_computes_the_prompt() -> None:
    workers = Workers()
    workers.submit()
    workers.router.leave(PREFILL + 1)
    workers.router.leave(PREFILL)
    [drop, submit] = workers.got(0)
    assert drop == messages.DropKV([1]) and isinstance(submit, messages.Submit)
    assert submit.requests[0].params.max_tokens == 8 and not submit.targets and not submit.received_transfers


@pytest.mark.parametrize("sampled", [True, False])
def test_a_dead_receiver_is_replaced_once_the_token_is_there(sampled: bool) -> None:
    workers = Workers()
    workers.submit()
    if sampled:
        workers.sampled()
    workers.router.leave(0)
    workers.join(0)  # restarted under its number, without what it had received
    if not sampled:
        assert workers.got(PREFILL) == [] and workers.got(1) == [] and workers.got(0) == []
        workers.sampled()
    [again] = workers.got(PREFILL)
    to = 1 if sampled else 0
    assert isinstance(again, messages.Submit) and again.generated_ids == [[50]]
    assert again.targets == {0: messages.KVTarget(2, Endpoint(f"unix:@{to}"), b"secret")}
    assert workers.open_requests == {to: 1, PREFILL: 1}


def test_kv_that_cannot_be_sent_is_computed_again() -> None:
    workers = Workers()
    workers.submit()
    workers.router.take(PREFILL, messages.KVNotSent([1, 99]))
    workers.sampled()
    [drop, submit] = workers.got(0)
    assert drop == messages.DropKV([1]) and isinstance(submit, messages.Submit)
    assert submit.generated_ids == [[50]] and not submit.received_transfers
    assert workers.open_requests == {0: 1} and workers.router.transfers == []


def test_only_workers_that_generate_count_as_serving() -> None:
    workers = Workers()
    workers.router.tell_ready()
    [ready] = workers.heard()
    assert isinstance(ready, messages.Ready) and ready.info.num_blocks == 2 * 64
    for number in (0, 1):
        workers.router.leave(number)
    assert not workers.router.can_generate
    workers.router.send(messages.Submit([Request(0, PROMPT, SamplingParams(max_tokens=8))]))
    assert workers.got(PREFILL) == []
    workers.join(1)
    assert len(workers.got(PREFILL)) == 1


def test_prompts_wait_until_a_worker_has_room_for_their_kv() -> None:
    """A worker has 64 blocks of 16 tokens. Prompts of 40 blocks do not fit beside each other."""
    workers = Workers()
    params = SamplingParams(max_tokens=8)
    long = [5] * (40 * 16)
    requests = [Request(number, prompt, params) for number, prompt in enumerate([long] * 4 + [PROMPT])]
    workers.router.send(messages.Submit(requests))

    def begun() -> list[int]:
        found = [*workers.got(PREFILL), *workers.got(PREFILL + 1)]
        return sorted(one.request_id for m in found if isinstance(m, messages.Submit) for one in m.requests)

    assert begun() == [0, 1] and workers.router.stats().waiting == 3
    workers.router.send(messages.Cancel([3]))
    assert begun() == [] and workers.router.stats().waiting == 2
    workers.router.take(PREFILL, messages.Tokens([0], [50], [FinishReason.STOP]))
    assert begun() == [2, 4], "the short one did not overtake"
    assert workers.router.stats().waiting == 0


def test_prompts_that_wait_are_placed_once_when_a_worker_joins_or_the_prefill_workers_are_gone() -> None:
    for change in ("join", "leave"):
        workers = Workers()
        long = Request(0, [5] * (40 * 16), SamplingParams(max_tokens=8))
        requests = [replace(long, request_id=number) for number in range(3)]
        workers.router.send(messages.Submit(requests))
        if change == "join":
            workers.join(2)
            assert workers.router.loads()[2].requests == 1
        else:
            workers.router.leave(PREFILL)
            workers.router.leave(PREFILL + 1)
            assert sum(load.requests for load in workers.router.loads().values()) == 3
        assert workers.router.stats().waiting == 0


def test_what_has_arrived_is_known_whichever_report_comes_first() -> None:
    """A link of the prefill worker reports in a thread of its own, so its news may be newer than a step's."""
    workers = Workers()
    old, new = (TransferStats(sent_requests=1, sent_bytes=size, sent_seconds=size / 8) for size in (100, 300))
    news = [messages.Stats(WorkerStats(running=1, transfers=old)), messages.KVSent(new)]
    for first, second in (news, news[::-1]):
        workers.router.take(PREFILL, first)
        workers.router.take(PREFILL, second)
        assert workers.router.stats().transfers == new
        assert workers.router.stats().running == 1
    assert workers.heard()[-1] == messages.Stats(WorkerStats(running=1, transfers=new))


def test_a_prefill_worker_is_busy_while_it_has_prompts_or_sends_their_kv() -> None:
    now = 0.0
    workers = Workers(lambda: now)
    workers.submit()
    now = 2.0
    workers.sampled()
    now = 3.0
    assert workers.router.prefill_seconds() == {PREFILL: 3.0, PREFILL + 1: 0.0}
    workers.router.take(0, messages.KVReceived(1))
    now = 9.0
    assert workers.router.prefill_seconds() == {PREFILL: 3.0, PREFILL + 1: 0.0}
    workers.router.take(PREFILL + 1, messages.Stats(WorkerStats(waiting=4)))
    workers.router.take(0, messages.Stats(WorkerStats(waiting=3)))
    assert (workers.router.waiting_prompts(), workers.router.stats().waiting) == (4, 7)


def test_the_worker_that_goes_on_may_die_twice_while_the_prompt_is_computed() -> None:
    """Its successor has the same number."""
    workers = Workers()
    workers.submit()
    for _ in range(2):
        workers.router.leave(0)
        workers.join(0)
    workers.router.leave(0)
    workers.sampled()
    [submit] = [one for one in workers.got(PREFILL) + workers.got(1) if isinstance(one, messages.Submit)]
    assert submit.generated_ids == [[50]]
