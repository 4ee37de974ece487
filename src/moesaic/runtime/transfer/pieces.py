"""The pieces in which the KV of a request is sent, and the class of a worker that sends and receives none.

A piece has consecutive blocks of consecutive layers of one request, and the last one also its states. It is
the request of a call (`transport.calls`) whose answer is one empty row: the piece has arrived.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.core import messages
from moesaic.core.errors import DamagedMessage
from moesaic.core.metrics import TransferStats
from moesaic.core.request import Request
from moesaic.models.kvcache.images import CopiedMemory
from moesaic.policy.scheduling.schedulers.actions import Restore, StepPlan

_HEADER = struct.Struct("<QQQQQQ")
"""transfer, first layer, number of layers, first block, number of blocks, tokens of the whole transfer in its
last piece, else 0"""


@dataclass(frozen=True)
class PieceHeader:
    """Describes the blocks, layers and states of one piece."""

    transfer: int
    first_layer: int
    """Counted among the layers with keys and values."""
    num_layers: int
    first_block: int
    """The first block of the piece, counted from the request's first one."""
    num_blocks: int
    tokens: int
    """Tokens whose KV was sent over all pieces, in the last piece. Else 0. The states follow the blocks of
    the last piece."""

    @property
    def is_last(self) -> bool:
        return self.tokens > 0

    def pack(self) -> bytes:
        layers = self.first_layer, self.num_layers
        return _HEADER.pack(self.transfer, *layers, self.first_block, self.num_blocks, self.tokens)

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    def num_bytes(self, memory: CopiedMemory) -> int:
        """Bytes of the piece behind its header."""
        states = memory.state_bytes if self.is_last else 0
        return self.num_layers * self.num_blocks * memory.layer_bytes + states


HEADER_BYTES = _HEADER.size


def parse(data: bytes, size: int, memory: CopiedMemory, block_size: int) -> PieceHeader:
    """The header of a piece of `size` bytes. Raises DamagedMessage if they do not fit together."""
    if len(data) < HEADER_BYTES:
        raise DamagedMessage(f"a piece of KV of {size} bytes")
    header = PieceHeader(*_HEADER.unpack(data))
    end = header.first_block + header.num_blocks
    # The tokens of a transfer end inside its last block.
    full = not header.is_last or (end - 1) * block_size < header.tokens <= end * block_size
    has_known_layers = header.layers.stop <= memory.num_layers and bool(header.layers) == bool(
        memory.num_layers
    )
    if not (has_known_layers and full and size == HEADER_BYTES + header.num_bytes(memory)):
        raise DamagedMessage(f"a damaged piece of KV: {header} in {size} bytes")
    return header


class Transfers:
    """What a worker does with the KV of other workers. This one, for most workers, does nothing."""

    def expect(self, message: messages.Submit) -> None:
        """Requests arrived. Called before they reach the scheduler."""

    def count_received_tokens(self, requests: Sequence[Request]) -> dict[int, int]:
        """Request -> its tokens whose KV was received. Requests without any are left out."""
        return {}

    def restore(self, action: Restore) -> None:
        """Write what was received into the cache."""

    def begin(self, plan: StepPlan) -> None:
        """The rows of `plan` are computed from now on, until the next call of this method."""

    def on_step_computed(self, plan: StepPlan) -> None:
        """The KV of a step's rows is in the cache, in every layer."""

    def forget(self, request_ids: Sequence[int]) -> None:
        """These requests ended or were cancelled. Unknown ids are ignored."""

    def drop(self, transfers: Sequence[int]) -> None:
        """Forget these transfers: see `messages.DropKV`."""

    def stats(self) -> TransferStats:
        return TransferStats()

    def close(self) -> None:
        """End the connections. What was not sent is lost."""
