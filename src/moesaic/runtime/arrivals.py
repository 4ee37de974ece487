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
    generated_tokens: list[int]
    """Tokens that it got from a worker that died."""
    grammar: Future[Any]


class Arrivals:
    """Holds back requests whose grammar is not compiled yet, so that no step waits for it."""

    def __init__(self, find_grammar: Callable[[Request], Future[Any] | None]) -> None:
        """find_grammar: the compiled grammar of a request, which may still be under way; None: it has
        none."""
        self._find_grammar = find_grammar
        self._waiting: list[_Waiting] = []

    @property
    def has_waiting(self) -> bool:
        """Whether any request is held back."""
        return bool(self._waiting)

    def add(self, message: messages.Submit) -> RequestsArrived:
        """Takes new requests. Returns those that need not wait for a grammar."""
        arrivals = RequestsArrived([])
        generated_tokens = [
            *message.generated_ids,
            *([] for _ in message.requests[len(message.generated_ids) :]),
        ]
        for request, tokens in zip(message.requests, generated_tokens, strict=True):
            grammar = self._find_grammar(request)
            if grammar is None or grammar.done():
                arrivals.extend(RequestsArrived([request], [tokens]))
            else:
                self._waiting.append(_Waiting(request, tokens, grammar))
        return arrivals

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Forget requests. Unknown ids are ignored."""
        self._waiting = [
            waiting for waiting in self._waiting if waiting.request.request_id not in request_ids
        ]

    def take_ready(self, timeout: float) -> RequestsArrived:
        """The requests whose grammars are compiled now, in order of arrival.

        Waits up to `timeout` seconds for the first one.
        """
        if self._waiting and timeout > 0.0:
            wait([waiting.grammar for waiting in self._waiting], timeout, FIRST_COMPLETED)
        compiled_ones: list[_Waiting] = []
        still_waiting: list[_Waiting] = []
        for waiting in self._waiting:  # each is asked once, since a grammar may be compiled meanwhile
            (compiled_ones if waiting.grammar.done() else still_waiting).append(waiting)
        self._waiting = still_waiting
        return RequestsArrived(
            [waiting.request for waiting in compiled_ones],
            [waiting.generated_tokens for waiting in compiled_ones],
        )
