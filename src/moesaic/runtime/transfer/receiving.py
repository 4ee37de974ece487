"""An attention worker's side: keeps the KV that arrives, until its request is admitted.

A thread takes the pieces out of the connections, also while the worker computes a step. So a prefill worker
never waits for a step of this one.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moesaic.core import messages
from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.core.metrics import TransferStats
from moesaic.core.request import Request
from moesaic.core.tokens import IntArray
from moesaic.models.kvcache.images import Bytes, CopiedMemory
from moesaic.policy.scheduling.schedulers.actions import Restore
from moesaic.runtime.transfer.pieces import HEADER_BYTES, PieceHeader, Transfers, parse
from moesaic.transport.calls import Answerer, Incoming
from moesaic.transport.listening import NIXL_KIND, Listener
from moesaic.transport.waiting import wait
from moesaic.transport.wakeup import Wakeup

LOG = logging.getLogger(__name__)
MAX_CLOSED_TRANSFERS = 4096
"""Transfers that were dropped or used, and whose late pieces are ignored. The oldest are forgotten."""
ONLY_ROW = np.zeros(1, np.int64)
"""The only row of a call."""


@dataclass
class _Image:
    """The KV of one request, as far as it has arrived."""

    source: Answerer
    blocks: IntArray
    """[layers] number of blocks of each layer that are here: the first ones of the request."""
    pieces: list[tuple[PieceHeader, Bytes]] = field(default_factory=list)
    tokens: int = 0
    """Tokens of the request's KV, once all pieces are here; else 0."""

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for _, data in self.pieces)


class KVReceiver(Transfers):
    """Receives KV from any number of prefill workers.

    `endpoint` and `secret` are what these need to connect.
    """

    def __init__(
        self,
        memory: CopiedMemory,
        block_size: int,
        report: Callable[[messages.Message], None],
        remote_address: str | None = None,
        allow_nixl: bool = False,
    ) -> None:
        """report: sends a message to the router, from any thread. remote_address: see `WorkerConfig`.
        allow_nixl: whether senders may write into memory of this process."""
        self._memory, self._block_size, self._report = memory, block_size, report
        self.secret = secrets.token_bytes(32)
        self._listener = Listener(
            "unix:@", self.secret, remote=remote_address, kinds=NIXL_KIND if allow_nixl else None
        )
        self.endpoint = self._listener.endpoint
        self._lock = threading.Lock()
        """Protects what follows."""
        self._images: dict[int, _Image] = {}
        """Transfer -> what has arrived."""
        self._closed_transfers: OrderedDict[int, None] = OrderedDict()
        """Transfers of which no further piece is kept."""
        self._ready: dict[int, _Image] = {}
        """Request -> its KV, until the request is admitted."""
        self._stats = TransferStats()
        self._wakeup = Wakeup()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="receiving KV", daemon=True)
        self._thread.start()

    # ---- the worker's side

    def expect(self, message: messages.Submit) -> None:
        with self._lock:
            for request_id, transfer in message.received_transfers.items():
                image = self._images.pop(transfer, None)
                self._close(transfer)
                if image is not None and image.tokens:
                    self._ready[request_id] = image

    def count_received_tokens(self, requests: Sequence[Request]) -> dict[int, int]:
        request_ids = (request.request_id for request in requests if request.request_id in self._ready)
        return {request_id: self._ready[request_id].tokens for request_id in request_ids}

    def restore(self, action: Restore) -> None:
        """Write the blocks that did not come from the prefix cache, and the states."""
        with self._lock:
            image = self._ready.pop(action.request_id)
        begin = action.tokens.start // self._block_size
        for header, data in image.pieces:
            self._put(header, data, action, max(0, begin - header.first_block))
        tokens = self._stats.received_tokens + len(action.tokens)
        self._stats = replace(
            self._stats, received_requests=self._stats.received_requests + 1, received_tokens=tokens
        )

    def forget(self, request_ids: Sequence[int]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._ready.pop(request_id, None)

    def drop(self, transfers: Sequence[int]) -> None:
        with self._lock:
            for transfer in transfers:
                self._images.pop(transfer, None)
                self._close(transfer)

    def stats(self) -> TransferStats:
        with self._lock:
            held_bytes = sum(image.num_bytes for image in (*self._images.values(), *self._ready.values()))
        return replace(self._stats, held_bytes=held_bytes)

    def close(self) -> None:
        self._stopping = True
        self._wakeup.ring()
        self._thread.join()
        self._listener.close()
        self._wakeup.close()

    def _put(self, header: PieceHeader, data: Bytes, action: Restore, num_skipped: int) -> None:
        """Write one piece, without its first `num_skipped` blocks."""
        blocks = action.blocks[header.first_block : header.first_block + header.num_blocks]
        end = header.num_layers * header.num_blocks * self._memory.layer_bytes
        if num_skipped < header.num_blocks:
            self._memory.put_blocks(blocks, header.layers, data[:end], num_skipped)
        if header.is_last and action.states:
            _, _, page, seat = action.states
            self._memory.put_states(page, seat, data[end:])

    def _close(self, transfer: int) -> None:
        self._closed_transfers[transfer] = None
        if len(self._closed_transfers) > MAX_CLOSED_TRANSFERS:
            self._closed_transfers.popitem(last=False)

    # ---- the thread

    def _run(self) -> None:
        sources: list[Answerer] = []
        while not self._stopping:
            wait(sources, (self._listener.fileno(), self._wakeup.fileno()), spin=0.0)
            sources += self._listener.take_connections()
            for source in list(sources):
                try:
                    for incoming in source.poll():
                        self._take(source, incoming)
                except ConnectionLost as lost:
                    sources.remove(source)
                    self._leave(source, lost)
        for source in sources:
            source.close()

    def _take(self, source: Answerer, incoming: Incoming) -> None:
        """Keep a piece. Raises DamagedMessage for one that does not fit to those before it."""
        memory, size = self._memory, len(incoming.request)
        header = parse(bytes(incoming.request[:HEADER_BYTES]), size, memory, self._block_size)
        # A copy, because the transport uses the memory of the request again.
        data = np.frombuffer(incoming.request[HEADER_BYTES:], np.uint8).copy()
        with self._lock:
            if header.transfer not in self._closed_transfers:
                self._keep(source, header, data)
        # Also for a dropped transfer: the sender waits for every piece before it reuses memory.
        incoming.publish(ONLY_ROW)
        if header.is_last:
            self._report(messages.KVReceived(header.transfer))

    def _keep(self, source: Answerer, header: PieceHeader, data: Bytes) -> None:
        no_blocks = np.zeros(self._memory.num_layers, np.int64)
        image = self._images.setdefault(header.transfer, _Image(source, no_blocks))
        layers, end = slice(header.layers.start, header.layers.stop), header.first_block + header.num_blocks
        if image.source is not source or image.tokens or (image.blocks[layers] != header.first_block).any():
            raise DamagedMessage(f"a piece of KV at the wrong place: {header}")
        image.blocks[layers] = end
        if header.is_last and (image.blocks != end).any():
            raise DamagedMessage(f"the last piece of KV came before others: {header}")
        image.pieces.append((header, data))
        image.tokens = header.tokens

    def _leave(self, source: Answerer, error: ConnectionLost) -> None:
        """Forget the unfinished transfers of a connection that ended. What is complete can be used."""
        if isinstance(error, DamagedMessage):
            LOG.warning("dropped a prefill worker: %s", error)
        source.close()
        with self._lock:
            unfinished_transfers = [
                transfer
                for transfer, image in self._images.items()
                if image.source is source and not image.tokens
            ]
            for transfer in unfinished_transfers:
                del self._images[transfer]
