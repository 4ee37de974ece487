"""Several attention workers behind one connection, which the engine uses.

The router knows the worker of each request and its tokens so far. When a worker dies, its requests go to
other workers, or wait until it is restarted. The new worker computes prompt and generated tokens again and
continues. A sampled token depends only on the request's seed and its position, so the engine notices nothing.

With prefill workers, one of them computes the known tokens of a request and samples the next one. Meanwhile
it sends their KV to the worker that was chosen to go on. That worker gets the request once the token and the
KV are there. If one of the two dies before that, another worker computes the request's tokens again.

Question: Which attention worker gets a request?
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from dataclasses import replace

from moesaic.cluster.objectives import Objectives
from moesaic.cluster.requests import (
    Clock,
    Entry,
    Transfer,
    WorkerRecord,
    can_continue,
    drop_foreign,
    drop_moved,
    limit_to_next_token,
    measure_occupancy,
    send,
    update_blocks,
    without_scores,
)
from moesaic.cluster.totals import counters_only, sum_stats
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import KVSent, Stats
from moesaic.core.metrics import WorkerStats
from moesaic.core.request import FinishReason
from moesaic.core.worker_info import WorkerInfo
from moesaic.policy.placement.dispatch import Dispatch, WorkerLoad, choose_apart, least_loaded
from moesaic.transport.base import Connection


class Router:
    """A `Connection` to all workers together. It is thread-safe."""

    def __init__(self, dispatch: Dispatch = least_loaded, clock: Clock = time.monotonic) -> None:
        self.dispatch = dispatch
        """Chooses the worker of a request, also after its worker has died. Called with the lock held."""
        self.objectives = Objectives()
        """Counts every token for latency objectives. Called with the lock held."""
        self._clock = clock
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[messages.Message | ConnectionLost] = queue.SimpleQueue()
        self._lost_error: ConnectionLost | None = None
        self._workers: dict[int, WorkerRecord] = {}
        self._entries: dict[int, Entry] = {}
        self._past_stats = WorkerStats()
        """Counters of workers that have left, so that totals never decrease."""
        self._transfers: dict[int, int] = {}
        """Transfer under way -> its request."""
        self._numbers = itertools.count(1)
        self._held_requests: deque[int] = deque()
        """Requests that wait until a worker has room for the KV of their prompts."""
        self.moved_requests = 0
        """Requests whose worker died or left, so far."""

    # ---- the engine's side

    def send(self, message: messages.Message) -> None:
        with self._lock:
            match message:
                case messages.Submit(requests):
                    for request in requests:
                        self._entries[request.request_id] = Entry(request)
                    self._place([request.request_id for request in requests])
                case messages.Cancel(request_ids):
                    self._cancel(request_ids)
                    self._place([])  # they may have left room for requests that wait
                case messages.Shutdown():
                    for worker in self._workers.values():
                        send(worker, message)

    def receive(self, timeout: float | None = None) -> messages.Message | None:
        if self._lost_error is None:
            try:
                item = self._outbox.get(block=timeout != 0, timeout=timeout)
            except queue.Empty:
                return None
            if not isinstance(item, ConnectionLost):
                return item
            self._lost_error = item
        raise self._lost_error

    def close(self) -> None:
        """Closes the connection: the engine's `receive` reports the end."""
        self.fail("closed")

    # ---- the supervisor's side

    def tell(self, message: messages.Message) -> None:
        """Sends the engine a message that comes from no worker in service."""
        self._outbox.put(message)

    def fail(self, reason: str) -> None:
        """Reports that nothing can be served any more."""
        self._outbox.put(ConnectionLost(reason))

    def join(
        self,
        worker: int,
        connection: Connection,
        info: WorkerInfo,
        prefill: bool = False,
        kv: messages.ReceivesKV | None = None,
    ) -> None:
        """Adds a worker that is ready, and sends it waiting requests.

        prefill: whether it computes prompts for the others. kv: where it receives KV; None: it does not.
        """
        with self._lock:
            if (former_record := self._workers.get(worker)) is not None:
                self._keep_counts(former_record)
            self._workers[worker] = WorkerRecord(connection, info, prefill=prefill, kv=kv)
            self._place_all()

    def drain(self, worker: int) -> None:
        """Gives this worker no new requests, because it will leave."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker].is_draining = True

    def suspect(self, worker: int, is_suspected: bool) -> None:
        """Gives this worker no new requests while nothing is heard of it."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker].is_suspected = is_suspected
                self._place_all()

    def is_drained(self, worker: int) -> bool:
        """Whether all its requests have ended."""
        with self._lock:
            return worker not in self._workers or not self._workers[worker].requests

    @property
    def transfers(self) -> list[tuple[int, int]]:
        """(transfer, worker that goes on with its request) of the transfers under way."""
        with self._lock:
            owners = ((number, self._entries[request_id]) for number, request_id in self._transfers.items())
            return [
                (number, entry.transfer.decode_worker)
                for number, entry in owners
                if entry.transfer is not None
            ]

    @property
    def can_generate(self) -> bool:
        """Whether there is a worker that generates."""
        with self._lock:
            return not all(worker.prefill for worker in self._workers.values())

    def stats(self) -> WorkerStats:
        """Returns statistics of all workers together, including past ones."""
        with self._lock:
            return self._total()

    def _total(self) -> WorkerStats:
        stats = sum_stats([self._past_stats, *(worker.stats for worker in self._workers.values())])
        return replace(stats, waiting=stats.waiting + len(self._held_requests))

    def measure_occupancy(self) -> float:
        """How full the workers are that generate; see `requests.measure_occupancy`."""
        with self._lock:
            return measure_occupancy(
                [worker for worker in self._workers.values() if not (worker.is_draining or worker.prefill)]
            )

    def waiting_prompts(self) -> int:
        """Number of requests that wait at prefill workers."""
        with self._lock:
            return sum(worker.stats.waiting for worker in self._workers.values() if worker.prefill)

    def prefill_seconds(self) -> dict[int, float]:
        """Prefill worker -> seconds for which it has had prompts, or KV to send, since it is here."""
        with self._lock:
            now = self._clock()
            prefill = {number: worker for number, worker in self._workers.items() if worker.prefill}
            return {number: worker.seconds_with_requests(now) for number, worker in prefill.items()}

    def stats_by_worker(self) -> dict[int, WorkerStats]:
        """Returns the statistics of each worker in service."""
        with self._lock:
            return {number: worker.stats for number, worker in self._workers.items()}

    def leave(self, worker: int) -> None:
        """Removes a worker. Its requests go to others, or wait for one. Its late messages are ignored."""
        with self._lock:
            if (record := self._workers.pop(worker, None)) is None:
                return
            self._keep_counts(record)
            orphans = [key for key, entry in self._entries.items() if entry.worker == worker]
            for key in orphans:
                entry = self._entries[key]
                self._break_off(entry)
                entry.worker, entry.blocks, entry.has_moved = None, {}, True
            self.moved_requests += len(orphans)
            if orphans:
                self._outbox.put(messages.RequestsMoved(orphans))
            self._place(orphans)
            for entry in list(self._entries.values()):
                if (
                    (transfer := entry.transfer) is not None
                    and transfer.decode_worker == worker
                    and not transfer.has_lost_worker
                ):
                    entry.blocks.pop(worker)
                    transfer.is_broken = transfer.has_lost_worker = True
                    self._continue_request(entry)

    def take(self, worker: int, message: messages.Message) -> None:
        """Passes a worker's message on to the engine. Raises ConnectionLost for one that nobody can use."""
        with self._lock:
            if (record := self._workers.get(worker)) is None:
                return  # a late message of a worker that has left
            message = drop_foreign(message, worker, record.info.vocab_size, self._entries)
            match message:
                case messages.Tokens():
                    message = self._count(message)
                    self._place([])  # a request that ended may have left room for one that waits
                case messages.KVReceived(number):
                    self._record_received_kv(worker, number)
                    return
                case messages.KVNotSent(numbers):
                    self._record_unsent_kv(numbers)
                    return
                case messages.RequestsAdmitted():
                    message = drop_moved(message, self._entries)
                case messages.Stats() | messages.KVSent():
                    record.stats = with_report(record.stats, message)
                    message = messages.Stats(self._total())
            self._outbox.put(message)

    def tell_ready(self) -> None:
        """Describes all workers that generate to the engine as one. Without any it keeps what it knows."""
        with self._lock:
            infos = [worker.info for worker in self._workers.values() if not worker.prefill]
        if infos:
            self.tell(messages.Ready(as_one_worker(infos)))

    def loads(self, prefill: bool = False) -> dict[int, WorkerLoad]:
        """Returns the load of each worker that gets new requests. prefill: of prefill workers."""
        return {
            worker: record.load
            for worker, record in self._workers.items()
            if not (record.is_draining or record.is_suspected) and record.prefill == prefill
        }

    # ---- internal, with the lock held

    def _keep_counts(self, record: WorkerRecord) -> None:
        """Keeps what a worker has counted that is no longer in service."""
        self._past_stats = sum_stats([self._past_stats, counters_only(record.stats)])

    def _place_all(self) -> None:
        """Sends every request that waits to a worker, in order of arrival."""
        self._held_requests.clear()
        self._place([key for key, entry in self._entries.items() if entry.worker is None])

    def _place(self, request_ids: list[int]) -> None:
        """Sends each of these requests to a worker, after those that are held back. Without workers they
        wait."""
        if not (request_ids or self._held_requests) or not self.loads():
            return
        submits: dict[int, messages.Submit] = {}
        self._held_requests += request_ids
        while self._held_requests:
            request_id = self._held_requests[0]
            entry = self._entries[request_id]
            known_tokens = [*entry.request.prompt_token_ids, *entry.tokens]
            blocks = -(-len(known_tokens) // next(iter(self._workers.values())).info.block_size)
            loads, prefill = self.loads(), self.loads(prefill=True)
            places = choose_apart(self.dispatch, loads, prefill, known_tokens, blocks)
            if places is None:
                break  # requests keep their order: a later one must not overtake one that waits for room
            self._held_requests.popleft()
            entry.worker = places.decode if places.prefill is None else places.prefill
            self._enter(entry, entry.worker)
            submit = submits.setdefault(entry.worker, messages.Submit([]))
            submit.generated_ids.append(list(entry.tokens))
            if places.prefill is None or not self._can_continue(entry, len(known_tokens) + 1):
                submit.requests.append(entry.request)
            else:
                submit.requests.append(limit_to_next_token(entry.request, len(entry.tokens)))
                submit.targets[request_id] = self._begin_transfer(entry, places.decode)
        for worker, submit in submits.items():
            send(self._workers[worker], submit)

    def _enter(self, entry: Entry, worker: int) -> None:
        """Counts the request at this worker."""
        self._workers[worker].enter(self._clock())
        entry.blocks[worker] = 0
        update_blocks(entry, self._workers)

    def _exit(self, entry: Entry, worker: int) -> None:
        """Does not count the request at this worker any more. The worker may be gone."""
        blocks, record = entry.blocks.pop(worker, None), self._workers.get(worker)
        if record is not None and blocks is not None:
            record.exit(blocks, self._clock())

    def _end(self, request_id: int) -> Entry | None:
        """Removes a request. Returns it if it was known."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._break_off(entry)
            if entry.worker is not None:
                self._exit(entry, entry.worker)
            elif request_id in self._held_requests:
                self._held_requests.remove(request_id)
        return entry

    def _cancel(self, request_ids: list[int]) -> None:
        by_worker: dict[int, list[int]] = {}
        for request_id in request_ids:
            entry = self._end(request_id)
            if entry is not None and entry.worker is not None:
                by_worker.setdefault(entry.worker, []).append(request_id)
        for worker, ids in by_worker.items():
            send(self._workers[worker], messages.Cancel(ids))

    def _count(self, message: messages.Tokens) -> messages.Tokens:
        """Records new tokens. Returns the message, in which a request that only its prefill worker has
        finished goes on."""
        reasons = list(message.finish)
        for index, (request_id, token) in enumerate(zip(message.request_ids, message.token_ids, strict=True)):
            entry = self._entries.get(request_id)
            if entry is None:
                continue
            entry.tokens.append(token)
            entry.last_token_time = self.objectives.record_token(entry.request.arrival, entry.last_token_time)
            if (
                entry.transfer is not None
                and reasons[index] is FinishReason.LENGTH
                and self._can_continue(entry)
            ):
                reasons[index], entry.transfer.has_sampled = None, True
                self._continue_request(entry)
            if reasons[index] is None:
                update_blocks(entry, self._workers)
            else:
                self._end(request_id)
        return replace(message, finish=reasons)

    # ---- from a prefill worker to another one, with the lock held

    def _begin_transfer(self, entry: Entry, decode_worker: int) -> messages.KVTarget:
        """Reserves a place at the worker that goes on. Returns where the KV goes."""
        kv = self._workers[decode_worker].kv
        assert kv is not None, "beside prefill workers every other one receives KV"
        entry.transfer = Transfer(next(self._numbers), decode_worker)
        self._transfers[entry.transfer.number] = entry.request.request_id
        self._enter(entry, decode_worker)
        return messages.KVTarget(entry.transfer.number, kv.endpoint, kv.secret)

    def _can_continue(self, entry: Entry, tokens: int | None = None) -> bool:
        """Whether a request may get another token. tokens: its tokens with the prompt; None: as many as
        now."""
        now = len(entry.request.prompt_token_ids) + len(entry.tokens)
        longest = min(worker.info.max_model_len for worker in self._workers.values())
        return can_continue(entry, now if tokens is None else tokens, longest)

    def _record_received_kv(self, worker: int, number: int) -> None:
        entry = self._entries.get(self._transfers.get(number, -1))
        if entry is None or entry.transfer is None:  # the request was cancelled, or began anew
            send(self._workers[worker], messages.DropKV([number]))
        else:
            entry.transfer.has_received = True
            self._continue_request(entry)

    def _record_unsent_kv(self, numbers: list[int]) -> None:
        for number in numbers:
            entry = self._entries.get(self._transfers.get(number, -1))
            if entry is not None and entry.transfer is not None:
                entry.transfer.is_broken = True
                self._continue_request(entry)

    def _continue_request(self, entry: Entry) -> None:
        """Gives the request to the worker that goes on, once its token and its KV are there."""
        transfer = entry.transfer
        assert transfer is not None and entry.worker is not None
        if not transfer.has_sampled or not (transfer.has_received or transfer.is_broken):
            return
        request, has_worker = entry.request, not transfer.has_lost_worker
        self._exit(entry, entry.worker)
        entry.has_moved = True
        if transfer.is_broken:
            self._break_off(entry)
        else:
            del self._transfers[transfer.number]
        if not has_worker:
            entry.worker = None
            self._place([request.request_id])
            return
        if transfer.is_broken:
            self._enter(entry, transfer.decode_worker)
        entry.worker, entry.transfer = transfer.decode_worker, None
        transfers = {} if transfer.is_broken else {request.request_id: transfer.number}
        submit = messages.Submit(
            [without_scores(request)], [list(entry.tokens)], received_transfers=transfers
        )
        send(self._workers[transfer.decode_worker], submit)

    def _break_off(self, entry: Entry) -> None:
        """Ends the request's transfer, if there is one."""
        transfer, entry.transfer = entry.transfer, None
        if transfer is None:
            return
        del self._transfers[transfer.number]
        self._exit(entry, transfer.decode_worker)
        if not transfer.has_lost_worker:
            send(self._workers[transfer.decode_worker], messages.DropKV([transfer.number]))


def as_one_worker(infos: list[WorkerInfo]) -> WorkerInfo:
    """Describes workers as one, with the seats and memory of all."""
    names = ("num_blocks", "kv_bytes", "max_num_seqs", "state_bytes", "state_seats", "state_snapshots")
    return replace(infos[0], **{name: sum(getattr(info, name) for info in infos) for name in names})


def with_report(stats: WorkerStats, news: Stats | KVSent) -> WorkerStats:
    """What is known of a worker once it has reported again.

    A prefill worker reports pieces that have arrived from other threads than its steps, so that the newer
    report may come first. It has more bytes.
    """
    transfers = news.stats if isinstance(news, KVSent) else news.stats.transfers
    if transfers.sent_bytes < stats.transfers.sent_bytes:
        transfers = stats.transfers
    return replace(stats if isinstance(news, KVSent) else news.stats, transfers=transfers)
