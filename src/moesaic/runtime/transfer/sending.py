"""A prefill worker's side: copies each step's KV out of the cache, and sends it in the background.

A layer has the keys and values of a step's rows as soon as the step has come to that layer. So they are
sent while later layers are computed, in groups of layers of some size. The last layer is sent once the step
has ended: a layer that drafts tokens is the last one, and it runs after the others.

Question: How does a prefill worker send KV?
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from moesaic.config import ON_GPUS, HostTransport
from moesaic.core import messages
from moesaic.core.endpoint import Endpoint
from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.messages import KVTarget
from moesaic.core.metrics import TransferStats
from moesaic.core.tokens import STATE_CHUNK, IntArray
from moesaic.models.kvcache.images import Bytes, CopiedMemory
from moesaic.policy.scheduling.schedulers.actions import StepPlan
from moesaic.runtime.transfer.pieces import HEADER_BYTES, PieceHeader, Transfers
from moesaic.transport.calls import HEAP_BYTES, Call, Caller
from moesaic.transport.host import this_host
from moesaic.transport.listening import connect, kind_of
from moesaic.transport.waiting import wait
from moesaic.transport.wakeup import Wakeup

PIECE_BYTES = 8 << 20
"""Bytes of a piece, unless one block and the states are more. The receiver copies one while the next one is
written."""
EARLY_BYTES = 64 << 10
"""Bytes that leave together before the end of their step, at least. On a GPU, where each copy waits for what
was launched before it, these are PIECE_BYTES."""
SLACK = 1 << 20
"""Bytes of a connection's memory besides its pieces."""
MAX_QUEUED_BYTES = 1 << 30
"""Bytes that wait for one worker, above which further requests are not sent: it computes them itself."""

Report = Callable[[messages.Message], None]


class _Chunk:
    """A part of a prompt that one step computes."""

    has_ended = False
    """The step has ended."""


@dataclass(frozen=True)
class _Piece:
    header: PieceHeader
    data: tuple[Bytes, ...]
    chunk: _Chunk
    """The chunk of the prompt with which the piece was computed."""

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + sum(map(len, self.data))


class Link:
    """The connection to one worker. Its thread connects, sends the pieces in order, and ends when the worker
    is gone."""

    def __init__(
        self,
        target: KVTarget,
        transport: HostTransport,
        heap_bytes: int,
        on_arrived: Callable[[int, int, float], None],
        on_idle: Callable[[], None],
        on_lost: Callable[[Link], None],
    ) -> None:
        """on_arrived: called with the bytes of each piece that has arrived, those of them that left before
        the end of their step, and its seconds on the way.

        on_idle: called once all pieces so far have arrived. on_lost: called once when nothing more can be
        sent. All three are called in the link's thread.
        """
        self.endpoint = target.endpoint
        self.is_lost = False
        self.queued_bytes = 0
        """Bytes of pieces that wait."""
        self._target, self._transport, self._heap = target, transport, heap_bytes
        self._on_arrived, self._on_idle, self._on_lost = on_arrived, on_idle, on_lost
        self._lock = threading.Lock()
        self._pieces: deque[_Piece] = deque()
        self._open: dict[int, tuple[Call, _Piece, int, float]] = {}
        """Call -> what is under way: a piece, its bytes that left early, and when it left."""
        self._wakeup = Wakeup()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="sending KV", daemon=True)
        self._thread.start()

    def put(self, piece: _Piece) -> bool:
        """Send a piece after those that wait. False if that is not possible any more."""
        with self._lock:
            if self.is_lost:
                return False
            self._pieces.append(piece)
            self.queued_bytes += piece.num_bytes
        self._wakeup.ring()
        return True

    def close(self) -> None:
        """End the thread and the connection."""
        self._stopping = True
        self._wakeup.ring()
        self._thread.join()

    def list_unfinished(self) -> list[int]:
        """The transfers of which pieces have not arrived. Called once the link is lost."""
        pieces = [*self._pieces, *(piece for _, piece, _, _ in self._open.values())]
        return sorted({piece.header.transfer for piece in pieces})

    def _run(self) -> None:
        caller: Caller | None = None
        try:
            address = self.endpoint.address_for(this_host())
            transport = "shm" if self._transport in ON_GPUS else self._transport  # images are of the host
            kind = kind_of(transport, address)
            caller = connect(address, self._target.secret, kind, self._heap)
            self._send(caller)
        except (MoesaicError, OSError):
            pass  # the supervisor notices a dead worker by itself
        finally:
            with self._lock:
                self.is_lost = True
            if caller is not None:
                caller.close()
            self._wakeup.close()
            self._on_lost(self)
            self._pieces.clear()
            self._open.clear()  # so that the connection's memory is freed

    def _send(self, caller: Caller) -> None:
        """Send what is queued, until `close`. Raises ConnectionLost when the worker is gone."""
        while not self._stopping:
            self._wakeup.clear()
            for call, _ in caller.poll():
                _, piece, early_bytes, began = self._open.pop(call.number)
                caller.release(call)
                self._on_arrived(piece.num_bytes, early_bytes, time.monotonic() - began)
                if not (self._open or self._pieces):
                    self._on_idle()
            if not self._post(caller):
                wait([caller], (self._wakeup.fileno(),), spin=0.0)

    def _post(self, caller: Caller) -> bool:
        """Send the next piece, if there is one and there is room."""
        if not self._pieces:
            return False
        piece, began = self._pieces[0], time.monotonic()
        call = caller.open(piece.num_bytes, 1, 1)
        if call is None:
            return False
        call.request[:HEADER_BYTES] = piece.header.pack()
        start = HEADER_BYTES
        for part in piece.data:
            call.request[start : start + len(part)] = part.data
            start += len(part)
        self._open[call.number] = call, piece, 0 if piece.chunk.has_ended else piece.num_bytes, began
        caller.post(call)
        with self._lock:
            self._pieces.popleft()
            self.queued_bytes -= piece.num_bytes
        return True


@dataclass
class _Outgoing:
    """A request whose KV is sent."""

    target: KVTarget
    tokens: int
    """Tokens whose KV is sent: all that are known before the next one is sampled."""
    sent_blocks: IntArray
    """[layers] number of blocks of each layer that were sent."""
    chunk: _Chunk = field(default_factory=_Chunk)
    """The one that is computed now, or next."""

    def blocks(self, num_computed: int, block_size: int) -> int:
        """Number of blocks that can be sent once `num_computed` tokens are computed."""
        return -(-num_computed // block_size) if num_computed == self.tokens else num_computed // block_size


@dataclass(frozen=True)
class _Rows:
    """The rows of one request in a step."""

    request_id: int
    num_computed: int
    """Tokens whose KV is known once the step has ended."""
    table: IntArray
    """Numbers of the request's KV blocks, in the order of its tokens."""
    states: tuple[int, int] | None
    """Page and seat of the request's state, or None for a model without states."""


class KVSender(Transfers):
    """Sends the KV of requests while they are computed, by groups of layers and chunk after chunk."""

    def __init__(
        self,
        memory: CopiedMemory,
        block_size: int,
        report: Report,
        transport: HostTransport = "shm",
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        min_early_bytes: int = EARLY_BYTES,
    ) -> None:
        """report: sends a message to the router, from any thread. max_queued_bytes: bytes that wait for one
        worker before requests are given up. min_early_bytes: bytes of a request that leave before the end of
        their step, at least; fewer leave after it."""
        self._memory, self._block_size = memory, block_size
        self._report, self._transport, self._max_queued_bytes, self._min_early_bytes = (
            report,
            transport,
            max_queued_bytes,
            min_early_bytes,
        )
        largest = memory.num_layers * memory.layer_bytes + memory.state_bytes
        self._heap = max(HEAP_BYTES, 2 * largest + SLACK)
        self._outgoing: dict[int, _Outgoing] = {}
        self._step: list[_Rows] = []
        """The rows that are computed now and may leave before the end of their step."""
        self._links: dict[Endpoint, Link] = {}
        self._lock = threading.Lock()
        """Protects `_stats`."""
        self._stats = TransferStats()
        memory.watch(self._on_layer_written)

    def expect(self, message: messages.Submit) -> None:
        generated_tokens = dict(
            zip(
                (submitted_request.request_id for submitted_request in message.requests),
                message.generated_ids,
                strict=False,
            )
        )
        for request in message.requests:
            target = message.targets.get(request.request_id)
            if target is not None:
                tokens = len(request.prompt_token_ids) + len(generated_tokens.get(request.request_id, []))
                no_blocks = np.zeros(self._memory.num_layers, np.int64)
                self._outgoing[request.request_id] = _Outgoing(target, tokens, no_blocks)

    def begin(self, plan: StepPlan) -> None:
        """A step whose rows all give logits may be recorded, and no copy can be part of that. So it sends at
        its end, like a replayed one, which tells nothing of its layers."""
        is_recordable = plan.batch.num_rows == len(plan.batch.logit_rows)
        self._step = [] if is_recordable else self._rows(plan)

    def on_step_computed(self, plan: StepPlan) -> None:
        for rows in self._rows(plan):
            outgoing = self._outgoing[rows.request_id]
            outgoing.chunk.has_ended, is_complete = True, rows.num_computed == outgoing.tokens
            if not self._send(outgoing, rows, self._memory.num_layers) or is_complete:
                del self._outgoing[rows.request_id]
            outgoing.chunk = _Chunk()

    def _on_layer_written(self, layer: int) -> None:
        """Send what a step has computed up to this layer, if it is enough for a piece."""
        for rows in self._step if layer + 1 < self._memory.num_layers else ():
            outgoing = self._outgoing.get(rows.request_id)
            if outgoing is None:  # it was given up, or cancelled
                continue
            blocks = outgoing.blocks(rows.num_computed, self._block_size)
            num_blocks = np.maximum(blocks - outgoing.sent_blocks[: layer + 1], 0).sum()
            is_enough = num_blocks * self._memory.layer_bytes >= self._min_early_bytes
            if is_enough and not self._send(outgoing, rows, layer + 1):
                del self._outgoing[rows.request_id]

    def _rows(self, plan: StepPlan) -> list[_Rows]:
        """The rows of requests whose KV is sent."""
        rows = []
        for index, request_id in enumerate(plan.request_ids.tolist()) if self._outgoing else ():
            if request_id in self._outgoing:
                num_computed = min(int(plan.batch.context_lens[index]), self._outgoing[request_id].tokens)
                table = plan.batch.block_tables[index]
                rows.append(_Rows(request_id, num_computed, table, _places(plan, index, num_computed)))
        return rows

    def forget(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._outgoing.pop(request_id, None)

    def stats(self) -> TransferStats:
        with self._lock:
            return self._stats

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _send(self, outgoing: _Outgoing, rows: _Rows, layers: int) -> bool:
        """Send the blocks of the first `layers` layers that are complete and were not sent.

        With all layers, the last piece of a request has its states. Returns False if nothing more of this
        request can be sent.
        """
        link = self._link(outgoing.target)
        ends = layers == self._memory.num_layers and rows.num_computed == outgoing.tokens
        parts = self._parts(outgoing, outgoing.blocks(rows.num_computed, self._block_size), layers)
        if ends and not parts:
            parts = [(range(0), 0, outgoing.blocks(rows.num_computed, self._block_size))]
        for index, (part, first, count) in enumerate(parts):
            blocks, last = rows.table[first : first + count], ends and index == len(parts) - 1
            data = [self._memory.copy_blocks(blocks, part)]
            if last and rows.states is not None:
                data.append(self._memory.copy_states(*rows.states))
            tokens = outgoing.tokens if last else 0
            header = PieceHeader(outgoing.target.transfer, part.start, len(part), first, count, tokens)
            outgoing.sent_blocks[part.start : part.stop] = first + count
            piece = _Piece(header, tuple(data), outgoing.chunk)
            if link.queued_bytes > self._max_queued_bytes or not link.put(piece):
                self._give_up([outgoing.target.transfer])
                return False
            self._count(TransferStats(sent_requests=int(last)))
        return True

    def _parts(self, outgoing: _Outgoing, blocks: int, layers: int) -> list[tuple[range, int, int]]:
        """Layers, first block and number of blocks of each piece that is due.

        Layers of which the same blocks were sent share a piece, unless they are too large for one.
        """
        parts: list[tuple[range, int, int]] = []
        edges = np.flatnonzero(np.diff(outgoing.sent_blocks[:layers])) + 1
        for start, stop in pairwise([0, *edges.tolist(), layers] if layers else []):
            size = max(1, PIECE_BYTES // max(1, (stop - start) * self._memory.layer_bytes))
            firsts = range(int(outgoing.sent_blocks[start]), blocks, size)
            parts += [(range(start, stop), first, min(size, blocks - first)) for first in firsts]
        return parts

    def _link(self, target: KVTarget) -> Link:
        if target.endpoint not in self._links:
            for address in [address for address, link in self._links.items() if link.is_lost]:
                self._links.pop(address).close()
            callbacks = self._on_piece_arrived, self._on_link_idle, self._on_link_lost
            self._links[target.endpoint] = Link(target, self._transport, self._heap, *callbacks)
        return self._links[target.endpoint]

    def _on_link_lost(self, link: Link) -> None:
        transfers = link.list_unfinished()
        if transfers:
            self._give_up(transfers)

    def _on_piece_arrived(self, num_bytes: int, early_bytes: int, seconds: float) -> None:
        late = 0.0 if early_bytes else seconds
        self._count(TransferStats(sent_bytes=num_bytes, sent_seconds=late, early_bytes=early_bytes))

    def _on_link_idle(self) -> None:
        """Report what has arrived: a worker without requests would say it with its next step."""
        with contextlib.suppress(ConnectionLost):  # the process ends
            self._report(messages.KVSent(self.stats()))

    def _count(self, increment: TransferStats) -> None:
        with self._lock:
            counts = vars(self._stats)
            self._stats = replace(
                self._stats, **{name: counts[name] + value for name, value in vars(increment).items()}
            )

    def _give_up(self, transfers: list[int]) -> None:
        self._count(TransferStats(failed_transfers=len(transfers)))
        with contextlib.suppress(ConnectionLost):  # the process ends
            self._report(messages.KVNotSent(transfers))


def _places(plan: StepPlan, index: int, num_computed: int) -> tuple[int, int] | None:
    """The page with a sequence's state at the last multiple of STATE_CHUNK, and its seat. None: no states."""
    if not len(plan.batch.states):
        return None
    read, position, write, seat = plan.batch.states[index].tolist()
    return write if num_computed // STATE_CHUNK * STATE_CHUNK > position else read, seat
