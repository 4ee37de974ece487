"""Several attention workers behind one connection, which the engine uses.

The router knows the worker of each request and its tokens so far. When a worker dies, its requests go to
other workers, or wait until it is restarted. The new worker computes prompt and generated tokens again and
continues. A sampled token depends only on the request's seed and its position, so the engine notices nothing.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest

from moesaic.cluster.objectives import Objectives
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import Message, WorkerInfo
from moesaic.core.metrics import WorkerStats
from moesaic.core.request import Request
from moesaic.policy.placement.dispatch import Dispatch, WorkerLoad, least_loaded
from moesaic.transport.base import Connection


@dataclass
class _Entry:
    """A request that has not ended."""

    request: Request
    worker: int | None = None
    blocks: int = 0
    """KV blocks that it uses at its worker."""
    tokens: list[int] = field(default_factory=list)
    moved: bool = False
    """True if another worker ran it before."""
    last: float | None = None
    """Time of its last token, as `Objectives.token` returned it."""


@dataclass
class _Worker:
    connection: Connection
    info: WorkerInfo
    stats: WorkerStats = field(default_factory=WorkerStats)
    requests: int = 0
    """Requests of this worker that have not ended."""
    blocks: int = 0
    """KV blocks of these requests."""
    draining: bool = False
    """True if it gets no new requests."""


class Router:
    """A `Connection` to all workers together. It is thread-safe."""

    def __init__(self, dispatch: Dispatch = least_loaded) -> None:
        self.dispatch = dispatch
        """Chooses the worker of a request, also after its worker has died. Called with the lock held."""
        self.objectives = Objectives()
        """Counts every token for latency objectives. Called with the lock held."""
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[Message | ConnectionLost] = queue.SimpleQueue()
        self._lost: ConnectionLost | None = None
        self._workers: dict[int, _Worker] = {}
        self._entries: dict[int, _Entry] = {}
        self._past = WorkerStats()
        """Counters of workers that have left, so that totals never decrease."""
        self.moved_requests = 0
        """Requests whose worker died or left, so far."""

    # ---- the engine's side

    def send(self, message: Message) -> None:
        with self._lock:
            match message:
                case messages.Submit(requests):
                    for request in requests:
                        self._entries[request.request_id] = _Entry(request)
                    self._place([request.request_id for request in requests])
                case messages.Cancel(request_ids):
                    self._cancel(request_ids)
                case messages.Shutdown():
                    for worker in self._workers.values():
                        _send(worker, message)

    def receive(self, timeout: float | None = None) -> Message | None:
        if self._lost is not None:
            raise self._lost
        try:
            item = self._outbox.get(block=timeout != 0, timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(item, ConnectionLost):
            self._lost = item
            raise item
        return item

    def close(self) -> None:
        """Closes the connection: the engine's `receive` reports the end."""
        self.fail("closed")

    # ---- the supervisor's side

    def tell(self, message: Message) -> None:
        """Sends the engine a message that comes from no worker in service."""
        self._outbox.put(message)

    def fail(self, reason: str) -> None:
        """Reports that nothing can be served any more."""
        self._outbox.put(ConnectionLost(reason))

    def join(self, worker: int, connection: Connection, info: WorkerInfo) -> None:
        """Adds a worker that is ready, and sends it waiting requests."""
        with self._lock:
            self._workers[worker] = _Worker(connection, info)
            self._place([key for key, entry in self._entries.items() if entry.worker is None])

    def drain(self, worker: int) -> None:
        """Gives this worker no new requests, because it will leave."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker].draining = True

    def drained(self, worker: int) -> bool:
        """Whether all its requests have ended."""
        with self._lock:
            return worker not in self._workers or not self._workers[worker].requests

    @property
    def serves(self) -> bool:
        """Whether there is a worker."""
        with self._lock:
            return bool(self._workers)

    def stats(self) -> WorkerStats:
        """Returns statistics of all workers together, including past ones."""
        with self._lock:
            return _sum([self._past, *(worker.stats for worker in self._workers.values())])

    def each(self) -> dict[int, WorkerStats]:
        """Returns the statistics of each worker in service."""
        with self._lock:
            return {number: worker.stats for number, worker in self._workers.items()}

    def leave(self, worker: int) -> None:
        """Removes a worker. Its requests go to others, or wait for one. Its late messages are ignored."""
        with self._lock:
            gone = self._workers.pop(worker, None)
            if gone is None:
                return
            self._past = _sum([self._past, _counters(gone.stats)])
            orphans = [key for key, entry in self._entries.items() if entry.worker == worker]
            for key in orphans:
                entry = self._entries[key]
                entry.worker, entry.blocks, entry.moved = None, 0, True
            self.moved_requests += len(orphans)
            self._place(orphans)

    def take(self, worker: int, message: Message) -> None:
        """Passes a worker's message on to the engine."""
        with self._lock:
            if worker not in self._workers:
                return
            match message:
                case messages.Tokens():
                    self._count(message)
                case messages.Admitted():
                    message = self._first_time(message)
                case messages.Stats(stats):
                    if worker in self._workers:  # otherwise it has just started, or was given up
                        self._workers[worker].stats = stats
                    every = [self._past, *(worker.stats for worker in self._workers.values())]
                    message = messages.Stats(_sum(every))
            self._outbox.put(message)

    def tell_ready(self) -> None:
        """Describes all workers to the engine as one. Without workers the engine keeps what it knows."""
        with self._lock:
            infos = [worker.info for worker in self._workers.values()]
        totals = {
            name: sum(getattr(info, name) for info in infos)
            for name in (
                "num_blocks",
                "kv_bytes",
                "max_num_seqs",
                "state_bytes",
                "state_seats",
                "state_snapshots",
            )
        }
        if infos:
            self.tell(messages.Ready(replace(infos[0], **totals)))

    def loads(self) -> dict[int, WorkerLoad]:
        """Returns the load of each worker that gets new requests."""
        return {
            worker: WorkerLoad(record.info.num_blocks, record.blocks, record.requests)
            for worker, record in self._workers.items()
            if not record.draining
        }

    # ---- internal, with the lock held

    def _place(self, request_ids: list[int]) -> None:
        """Sends each of these requests to a worker. Without workers they wait."""
        if not self.loads():
            return
        chosen: dict[int, list[_Entry]] = {}
        for request_id in request_ids:
            entry = self._entries[request_id]
            known = [*entry.request.prompt_token_ids, *entry.tokens]
            entry.worker = worker = self.dispatch(self.loads(), known)
            self._workers[worker].requests += 1
            self._measure(entry)
            chosen.setdefault(worker, []).append(entry)
        for worker, entries in chosen.items():
            generated = [list(entry.tokens) for entry in entries]
            submit = messages.Submit([entry.request for entry in entries], generated)
            _send(self._workers[worker], submit)

    def _measure(self, entry: _Entry) -> None:
        """Updates the number of blocks that the request uses at its worker."""
        if entry.worker is not None:
            worker = self._workers[entry.worker]
            rows = len(entry.request.prompt_token_ids) + len(entry.tokens)
            blocks = -(-rows // worker.info.block_size)
            worker.blocks += blocks - entry.blocks
            entry.blocks = blocks

    def _end(self, request_id: int) -> _Entry | None:
        """Removes a request. Returns it if it was known."""
        entry = self._entries.pop(request_id, None)
        if entry is not None and entry.worker is not None:
            worker = self._workers[entry.worker]
            worker.requests, worker.blocks = worker.requests - 1, worker.blocks - entry.blocks
        return entry

    def _cancel(self, request_ids: list[int]) -> None:
        by_worker: dict[int, list[int]] = {}
        for request_id in request_ids:
            entry = self._end(request_id)
            if entry is not None and entry.worker is not None:
                by_worker.setdefault(entry.worker, []).append(request_id)
        for worker, ids in by_worker.items():
            _send(self._workers[worker], messages.Cancel(ids))

    def _count(self, message: messages.Tokens) -> None:
        for request_id, token, finish in zip(
            message.request_ids, message.token_ids, message.finish, strict=True
        ):
            entry = self._entries.get(request_id)
            if entry is None:
                continue
            entry.tokens.append(token)
            entry.last = self.objectives.token(entry.request.arrival, entry.last)
            if finish is None:
                self._measure(entry)
            else:
                self._end(request_id)

    def _first_time(self, message: messages.Admitted) -> messages.Admitted:
        """Removes requests that moved from the message, since the engine knows that they were admitted."""
        known = [
            index
            for index, request_id in enumerate(message.request_ids)
            if request_id not in self._entries or not self._entries[request_id].moved
        ]
        return messages.Admitted(
            [message.request_ids[index] for index in known],
            [message.queue_seconds[index] for index in known],
            [message.cached_tokens[index] for index in known],
        )


def _send(worker: _Worker, message: Message) -> None:
    try:
        worker.connection.send(message)
    except ConnectionLost:
        pass  # its requests move when its reader thread notices the end


def _counters(stats: WorkerStats) -> WorkerStats:
    """Returns the part of a worker's statistics that outlives it: counts, but no state."""
    return replace(
        stats,
        running=0,
        waiting=0,
        blocks=replace(stats.blocks, total=0, free=0, cached=0, used=0),
        speculation=replace(stats.speculation, prices=()),
    )


def _sum(records: list[WorkerStats]) -> WorkerStats:
    """Returns the sum of records, field by field, including nested records."""

    def add(parts: list[object]) -> object:
        first = parts[0]
        if isinstance(first, int | float):
            return sum(parts)  # type: ignore[arg-type]
        if isinstance(first, tuple):  # one number for each layer, or none yet
            return tuple(map(sum, zip_longest(*parts, fillvalue=0)))  # type: ignore[call-overload]
        names = [one.name for one in fields(first)]  # type: ignore[arg-type]
        return type(first)(**{name: add([getattr(part, name) for part in parts]) for name in names})

    total = add(list(records))
    assert isinstance(total, WorkerStats)
    return total
