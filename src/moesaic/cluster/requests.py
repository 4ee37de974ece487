"""What the router knows of a request and of a worker, and how a request changes on its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import Message, WorkerInfo
from moesaic.core.metrics import WorkerStats
from moesaic.core.request import Request
from moesaic.transport.base import Connection


@dataclass
class Transfer:
    """The KV of a request on its way from a prefill worker."""

    number: int
    to: int
    """The worker that goes on with the request."""
    sampled: bool = False
    """The prefill worker has sampled its token, so it has finished."""
    received: bool = False
    broken: bool = False
    """The KV will not arrive."""
    gone: bool = False
    """The worker that it went to is gone. Its successor may have the same number."""


@dataclass
class Entry:
    """A request that has not ended."""

    request: Request
    worker: int | None = None
    """The worker that computes it."""
    transfer: Transfer | None = None
    """Where it goes from a prefill worker. None: its worker generates."""
    blocks: dict[int, int] = field(default_factory=dict)
    """KV blocks that count as used at its worker, and at the one that goes on."""
    tokens: list[int] = field(default_factory=list)
    moved: bool = False
    """True if another worker ran it before."""
    last: float | None = None
    """Time of its last token, as `Objectives.token` returned it."""


@dataclass
class WorkerRecord:
    connection: Connection
    info: WorkerInfo
    stats: WorkerStats = field(default_factory=WorkerStats)
    requests: int = 0
    """Requests of this worker that have not ended."""
    blocks: int = 0
    """KV blocks of these requests."""
    draining: bool = False
    """True if it gets no new requests."""
    suspected: bool = False
    """True while nothing is heard of it. It gets no new requests."""
    prefill: bool = False
    """True if it computes prompts for other workers."""
    kv: messages.ReceivesKV | None = None
    """Where it receives KV. None: it does not."""


def only(message: messages.Admitted, wanted: Callable[[int], bool]) -> messages.Admitted:
    """The message about those of its requests that are wanted."""
    kept = [index for index, request_id in enumerate(message.request_ids) if wanted(request_id)]
    return messages.Admitted(
        [message.request_ids[index] for index in kept],
        [message.queue_seconds[index] for index in kept],
        [message.cached_tokens[index] for index in kept],
    )


def until_next(request: Request, generated: int) -> Request:
    """The request up to its next token."""
    least, most = request.params.min_tokens, generated + 1
    params = replace(request.params, max_tokens=most, min_tokens=min(least, most))
    return replace(request, params=params)


def without_scores(request: Request) -> Request:
    """The request without the log-probabilities of its prompt, which the prefill worker has computed."""
    if request.params.prompt_logprobs is None:
        return request
    return replace(request, params=replace(request.params, prompt_logprobs=None))


def send(worker: WorkerRecord, message: Message) -> None:
    try:
        worker.connection.send(message)
    except ConnectionLost:
        pass  # its requests move when its reader thread notices the end
