"""Requests that wait for their grammar before the scheduler sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from moesaic.core import messages
from moesaic.core.request import Request
from moesaic.policy.scheduling.schedulers.actions import RequestsArrived


@dataclass(frozen=True)
class _Waiting:
    request: Request
    generated: list[int]
    """Tokens that it got from a worker that died."""
    grammar: Future[Any]


class Arrivals:
    """Holds back requests whose grammar is not compiled yet, so that no step waits for it."""

    def __init__(self, compiled: Callable[[Request], Future[Any] | None]) -> None:
        """compiled: the compiled grammar of a request, which may still be under way; None: it has none."""
        self._compiled = compiled
        self._waiting: list[_Waiting] = []

    @property
    def waiting(self) -> bool:
        """Whether any request is held back."""
        return bool(self._waiting)

    def add(self, message: messages.Submit) -> RequestsArrived:
        """Those of the new requests that need not wait."""
        arrived = RequestsArrived([])
        generated = [*message.generated_ids, *([] for _ in message.requests[len(message.generated_ids) :])]
        for request, tokens in zip(message.requests, generated, strict=True):
            grammar = self._compiled(request)
            if grammar is None or grammar.done():
                arrived.extend(RequestsArrived([request], [tokens]))
            else:
                self._waiting.append(_Waiting(request, tokens, grammar))
        return arrived

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Forget requests. Unknown ids are ignored."""
        self._waiting = [one for one in self._waiting if one.request.request_id not in request_ids]

    def ready(self, timeout: float) -> RequestsArrived:
        """The requests whose grammars are compiled now, in order of arrival.

        Waits up to `timeout` seconds for the first one.
        """
        if self._waiting and timeout > 0.0:
            wait([one.grammar for one in self._waiting], timeout, FIRST_COMPLETED)
        done: list[_Waiting] = []
        left: list[_Waiting] = []
        for one in self._waiting:  # each is asked once, since a grammar may be compiled meanwhile
            (done if one.grammar.done() else left).append(one)
        self._waiting = left
        return RequestsArrived([one.request for one in done], [one.generated for one in done])
