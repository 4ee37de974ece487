"""What the router knows of a request and of a worker, and how a request changes on its way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import Message
from moesaic.core.metrics import WorkerStats
from moesaic.core.request import FinishReason, Request
from moesaic.core.worker_info import WorkerInfo
from moesaic.policy.placement.dispatch import WorkerLoad
from moesaic.transport.base import Connection

Clock = Callable[[], float]
"""Returns seconds, monotonic."""
WITHOUT_TOKEN = (FinishReason.ERROR, FinishReason.NO_ALLOWED_TOKEN)
"""Reasons of a request that ends without a token."""


@dataclass
class Transfer:
    """The KV of a request on its way from a prefill worker."""

    number: int
    decode_worker: int
    """The worker that goes on with the request."""
    has_sampled: bool = False
    """The prefill worker has sampled its token, so it has finished."""
    has_received: bool = False
    is_broken: bool = False
    """The KV will not arrive."""
    has_lost_worker: bool = False
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
    has_moved: bool = False
    """True if another worker ran it before."""
    last_token_time: float | None = None
    """Time of its last token, as `Objectives.record_token` returned it."""


@dataclass
class WorkerRecord:
    connection: Connection
    info: WorkerInfo
    stats: WorkerStats = field(default_factory=WorkerStats)
    requests: int = 0
    """Requests of this worker that have not ended."""
    blocks: int = 0
    """KV blocks of these requests."""
    is_draining: bool = False
    """True if it gets no new requests."""
    is_suspected: bool = False
    """True while nothing is heard of it. It gets no new requests."""
    prefill: bool = False
    """True if it computes prompts for other workers."""
    kv: messages.ReceivesKV | None = None
    """Where it receives KV. None: it does not."""
    busy_seconds: float = 0.0
    """Seconds for which it had requests, up to the last moment at which it had none."""
    busy_since: float = 0.0
    """When it got the first of its requests, if it has some."""

    def enter(self, now: float) -> None:
        """Counts one more request."""
        if not self.requests:
            self.busy_since = now
        self.requests += 1

    def exit(self, blocks: int, now: float) -> None:
        """Counts one request less, which had so many blocks."""
        self.requests, self.blocks = self.requests - 1, self.blocks - blocks
        if not self.requests:
            self.busy_seconds += now - self.busy_since

    def seconds_with_requests(self, now: float) -> float:
        return self.busy_seconds + (now - self.busy_since if self.requests else 0.0)

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(self.info.num_blocks, self.blocks, self.requests)


def measure_occupancy(workers: Collection[WorkerRecord]) -> float:
    """Share of the seats or KV blocks that open requests take at these workers, whichever is larger: 0 to 1.

    Example: 3 requests for 4 seats with 10 of 100 blocks -> 0.75. Waiting requests count too.
    """
    seats = sum(worker.info.max_num_seqs for worker in workers)
    blocks = sum(worker.info.num_blocks for worker in workers)
    used_share = sum(worker.requests for worker in workers) / max(1, seats)
    return min(1.0, max(used_share, sum(worker.blocks for worker in workers) / max(1, blocks)))


def update_blocks(entry: Entry, workers: Mapping[int, WorkerRecord]) -> None:
    """Updates the number of KV blocks that the request uses at its workers."""
    rows = len(entry.request.prompt_token_ids) + len(entry.tokens)
    for worker, former_blocks in entry.blocks.items():
        record = workers.get(worker)
        if record is not None:  # the worker may have left
            entry.blocks[worker] = blocks = -(-rows // record.info.block_size)
            record.blocks += blocks - former_blocks


def can_continue(entry: Entry, tokens: int, longest: int) -> bool:
    """Whether a request of so many tokens, with its prompt, may have another one.

    longest: tokens of the longest sequence that the workers take.
    """
    max_tokens, prompt = entry.request.params.max_tokens, len(entry.request.prompt_token_ids)
    return tokens < longest and (max_tokens is None or tokens < prompt + max_tokens)


def drop_foreign(message: Message, worker: int, vocab_size: int, entries: Mapping[int, Entry]) -> Message:
    """A worker's message without what it says of other workers' requests.

    vocab_size: of the worker. Raises ConnectionLost for a token that is not in the vocabulary.
    """
    match message:
        case messages.PromptLogprobs(request_id) if _is_foreign(request_id, worker, entries):
            return messages.Tokens([], [], [])
        case messages.Tokens(request_ids, token_ids, finish):
            for token, reason in zip(token_ids, finish, strict=True):
                if not 0 <= token < vocab_size and reason not in WITHOUT_TOKEN:
                    raise ConnectionLost(f"it sent token {token}; the vocabulary has {vocab_size}")
            if any(_is_foreign(key, worker, entries) for key in request_ids):
                return _select_own(message, worker, entries)
    return message


def _is_foreign(request_id: int, worker: int, entries: Mapping[int, Entry]) -> bool:
    """Whether another worker has this request."""
    return request_id in entries and entries[request_id].worker != worker


def _select_own(message: messages.Tokens, worker: int, entries: Mapping[int, Entry]) -> messages.Tokens:
    """The message about requests that no other worker has."""
    indices = [
        i for i, request_id in enumerate(message.request_ids) if not _is_foreign(request_id, worker, entries)
    ]
    return messages.Tokens(
        [message.request_ids[i] for i in indices],
        [message.token_ids[i] for i in indices],
        [message.finish[i] for i in indices],
        [message.logprobs[i] for i in indices if message.logprobs],
        [message.routes[i] for i in indices if message.routes],
    )


def drop_moved(message: messages.RequestsAdmitted, entries: Mapping[int, Entry]) -> messages.RequestsAdmitted:
    """The message without requests that moved, since the engine knows that they were admitted."""
    return filter_admitted(message, lambda key: key not in entries or not entries[key].has_moved)


def filter_admitted(
    message: messages.RequestsAdmitted, is_wanted: Callable[[int], bool]
) -> messages.RequestsAdmitted:
    """The message about those of its requests that are wanted."""
    indices = [index for index, request_id in enumerate(message.request_ids) if is_wanted(request_id)]
    return messages.RequestsAdmitted(
        [message.request_ids[index] for index in indices],
        [message.queue_seconds[index] for index in indices],
        [message.cached_tokens[index] for index in indices],
    )


def limit_to_next_token(request: Request, num_generated: int) -> Request:
    """The request up to its next token."""
    min_tokens, max_tokens = request.params.min_tokens, num_generated + 1
    params = replace(request.params, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
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
