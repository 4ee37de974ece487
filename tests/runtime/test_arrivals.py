"""Requests that wait for their grammar, and those that need not."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from moesaic.core import messages
from moesaic.core.request import Request, SamplingParams
from moesaic.runtime.arrivals import Arrivals


class Compiler:
    """Grammars are compiled when a test says so."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[None]] = {}

    def compiled(self, request: Request) -> Future[None] | None:
        return self.futures.setdefault(request.grammar, Future()) if request.grammar else None


def request(number: int, grammar: str = "") -> Request:
    return Request(number, [1], SamplingParams(), grammar=grammar)


def test_only_requests_with_a_grammar_wait() -> None:
    compiler = Compiler()
    arrivals = Arrivals(compiler.compiled)
    waiting = [request(1, "a"), request(3, "b"), request(4, "a")]
    message = messages.Submit([request(0), waiting[0], request(2), *waiting[1:]], [[5], [6]])
    arrived = arrivals.add(message)
    assert [one.request_id for one in arrived.requests] == [0, 2]
    assert arrived.generated_ids == [[5], []]
    assert arrivals.has_waiting and not arrivals.take_ready(0.0).requests
    compiler.futures["a"].set_result(None)
    ready = arrivals.take_ready(0.0)
    assert [one.request_id for one in ready.requests] == [1, 4]
    assert ready.generated_ids == [[6], []]
    assert arrivals.has_waiting
    arrivals.cancel([3, 77])
    assert not arrivals.has_waiting
    known = arrivals.add(messages.Submit([request(5, "a")]))
    assert [one.request_id for one in known.requests] == [5], "its grammar is there already"


def test_it_waits_for_the_first_grammar() -> None:
    compiler = Compiler()
    arrivals = Arrivals(compiler.compiled)
    arrivals.add(messages.Submit([request(1, "a"), request(2, "b")]))
    assert not arrivals.take_ready(0.01).requests
    threading.Timer(0.05, lambda: compiler.futures["b"].set_result(None)).start()
    assert [one.request_id for one in arrivals.take_ready(3600.0).requests] == [2]
