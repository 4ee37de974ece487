"""One request's life behind the router: given to a worker, admitted, cancelled, moved, ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.cluster.router import Router
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import Message
from moesaic.core.request import FinishReason, Request, SamplingParams
from moesaic.policy.placement.dispatch import WorkerLoad
from moesaic.transport.local import LocalConnection, local_pair
from tests.support.fake_worker import info


def asked(request_id: int, prompt: int = 3) -> Request:
    return Request(request_id, [1] * prompt, SamplingParams(max_tokens=8), (), 0.0)


def joined(router: Router, worker: int, num_blocks: int = 64) -> LocalConnection:
    """The far end of a new worker."""
    ours, theirs = local_pair()
    router.join(worker, ours, replace(info(), num_blocks=num_blocks))
    return theirs


def told(end: LocalConnection | Router) -> list[Message]:
    """What came since the last call."""
    found = []
    while (message := end.receive(0.0)) is not None:
        found.append(message)
    return found


def submitted(end: LocalConnection) -> list[int]:
    return [request.request_id for message in told(end) for request in message.requests]  # type: ignore[union-attr]


def token(request_id: int, value: int, finish: FinishReason | None = None) -> messages.Tokens:
    return messages.Tokens([request_id], [value], [finish])


def test_requests_go_to_the_worker_with_most_free_blocks() -> None:
    """Blocks of 16: a prompt of 40 takes three of worker 1's ten; 8 and 7 are free, then 7 and 7."""
    router = Router()
    ends = [joined(router, 0, num_blocks=8), joined(router, 1, num_blocks=10)]
    router.send(messages.Submit([asked(0, 40), asked(1, 16), asked(2)]))
    assert [submitted(end) for end in ends] == [[1, 2], [0]]
    assert router.loads() == {0: WorkerLoad(8, 2, 2), 1: WorkerLoad(10, 3, 1)}
    for value in range(16):
        router.take(0, token(1, value))
    assert router.loads()[0] == WorkerLoad(8, 3, 2), "generated tokens count"
    router.take(0, token(1, 9, FinishReason.STOP))
    assert router.loads()[0] == WorkerLoad(8, 1, 1)


def test_requests_without_a_worker_wait_in_order() -> None:
    router = Router()
    router.send(messages.Submit([asked(0), asked(1)]))
    router.send(messages.Submit([asked(2)]))
    router.send(messages.Cancel([1]))
    end = joined(router, 0)
    assert submitted(end) == [0, 2]


def test_cancel_reaches_the_worker_that_has_the_request() -> None:
    router = Router()
    ends = [joined(router, 0), joined(router, 1)]
    router.send(messages.Submit([asked(0), asked(1), asked(2)]))
    for end in ends:
        told(end)
    router.send(messages.Cancel([2, 1, 77]))
    assert [told(end) for end in ends] == [[messages.Cancel([2])], [messages.Cancel([1])]]
    router.leave(0)
    assert submitted(ends[1]) == [0], "what was cancelled does not move"
    router.send(messages.Cancel([2]))
    assert told(ends[1]) == []


def test_a_moved_request_is_admitted_only_once() -> None:
    router = Router()
    joined(router, 0)
    router.send(messages.Submit([asked(0)]))
    first = messages.RequestsAdmitted([0], [0.5], [16])
    router.take(0, first)
    assert told(router) == [first]
    router.leave(0)
    end = joined(router, 1)
    router.send(messages.Submit([asked(1)]))
    assert submitted(end) == [0, 1]
    router.take(1, messages.RequestsAdmitted([0, 1], [3.0, 0.1], [0, 32]))
    assert told(router) == [messages.RequestsMoved([0]), messages.RequestsAdmitted([1], [0.1], [32])]


def test_tokens_of_every_worker_a_request_had_go_on_together() -> None:
    """Two workers die under it: the third gets all four tokens, in order."""
    router = Router()
    ends = [joined(router, worker) for worker in range(3)]
    router.send(messages.Submit([asked(0)]))
    for worker in range(2):
        router.take(worker, messages.Tokens([0], [10 * worker], [None]))
        router.take(worker, messages.Tokens([0], [10 * worker + 1], [None]))
        router.leave(worker)
    [message] = told(ends[2])
    assert isinstance(message, messages.Submit) and message.generated_ids == [[0, 1, 10, 11]]
    router.take(2, token(0, 20, FinishReason.LENGTH))
    router.leave(2)
    assert router.moved_requests == 2, "it had ended"


def test_a_worker_whose_connection_broke_gets_requests_until_it_leaves() -> None:
    """Nothing is lost: they move when it does."""
    router = Router()
    end = joined(router, 0)
    end.close()
    with pytest.raises(ConnectionLost):
        router._workers[0].connection.receive(0.0)
    router.send(messages.Submit([asked(0)]))
    router.send(messages.Cancel([5]))
    other = joined(router, 1)
    router.leave(0)
    router.leave(0)
    assert submitted(other) == [0] and router.moved_requests == 1


def test_the_engine_sees_the_end_after_what_was_said_before() -> None:
    router = Router()
    end = joined(router, 0)
    router.send(messages.Submit([asked(0)]))
    router.take(0, token(0, 7))
    router.fail("the model is gone")
    assert router.receive(0.0) == token(0, 7)
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="the model is gone"):
            router.receive(0.0)
    router.send(messages.Shutdown())
    assert isinstance(told(end)[-1], messages.Shutdown)


def test_the_engine_learns_which_requests_moved() -> None:
    router = Router()
    for worker in range(2):
        joined(router, worker)
    router.send(messages.Submit([asked(0), asked(1)]))
    router.leave(0)
    assert told(router) == [messages.RequestsMoved([0])]
    router.take(1, token(0, 5, FinishReason.STOP))
    router.take(1, token(1, 5, FinishReason.STOP))
    told(router)
    router.leave(1)
    assert told(router) == [], "nothing ran there"


def test_a_suspected_worker_gets_no_new_requests_and_keeps_its_own() -> None:
    router = Router()
    ends = [joined(router, 0), joined(router, 1)]
    router.send(messages.Submit([asked(0), asked(1)]))
    assert [submitted(end) for end in ends] == [[0], [1]]
    router.suspect(0, True)
    router.send(messages.Submit([asked(2), asked(3)]))
    assert [submitted(end) for end in ends] == [[], [2, 3]]
    router.take(0, token(0, 5))
    assert told(router)[-1] == token(0, 5), "what it has sent counts"
    router.suspect(0, False)
    router.send(messages.Submit([asked(4)]))
    assert [submitted(end) for end in ends] == [[4], []]


def test_requests_that_came_while_all_workers_were_suspected_go_to_the_first_one_that_is_trusted() -> None:
    router = Router()
    end = joined(router, 0)
    router.suspect(0, True)
    router.send(messages.Submit([asked(0), asked(1)]))
    assert submitted(end) == []
    router.suspect(0, False)
    assert submitted(end) == [0, 1]
    router.suspect(0, False)
    assert submitted(end) == [], "each of them once"
