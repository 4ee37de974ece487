"""A group whose routed experts are on servers: its ranks share the attention and nothing else.

The first rank runs every stage of a step, and asks the servers, as a single process does. For each layer's
attention it sends the rows to the other ranks. Every rank attends with its own heads, and the first rank adds
up the partial sums of the output projection. The other ranks keep the keys, values and states of their heads,
and nothing between two layers: a step can stop anywhere, and steps can take turns.

Payload for B rows of S bytes on G ranks: (G - 1) B S to the other ranks and as much back, which is that of an
all-reduce.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable

import torch

from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.metrics import GroupStats
from moesaic.kernels.batch import AttentionBatch
from moesaic.kvcache.memory import LayerMemory
from moesaic.models.block import Block
from moesaic.models.model import Model
from moesaic.runtime.group.arrays import pack, to_device, unpack
from moesaic.runtime.group.rows import RowCollectives
from moesaic.runtime.group.shared_images import next_message
from moesaic.runtime.step.stages import until_output_projection

_LAYER = struct.Struct("<q")
"""The beginning of a message to the other ranks. The step follows, unless it is that of the last message."""
NAME = "shared attention"
"""The name of this layout, for display."""


class SharedAttention:
    """On the first rank: takes the place of `until_output_projection` in `BlockStages`."""

    def __init__(self, rows: RowCollectives, why: Callable[[ConnectionLost], MoesaicError]) -> None:
        """why: the error to raise where a rank is gone. The group is closed when this object is deleted."""
        self._rows, self._why = rows, why
        self._sent: AttentionBatch | None = None
        """The step that the other ranks have."""
        weakref.finalize(self, rows.close)

    def __call__(
        self,
        block: Block,
        layer: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        memory: LayerMemory,
    ) -> torch.Tensor:
        """Returns [n, h], summed over the heads of all ranks. It waits for the other ranks.

        After an error the group is closed, since the other ranks are in the middle of the layer.
        """
        rows, sizes = self._rows, _at_first(len(hidden), self._rows.group.size)
        try:
            step = b"" if attention is self._sent else pack(attention.batch)
            rows.group.announce(_LAYER.pack(layer) + step)
            self._sent = attention
            rows.all_gather(hidden, sizes)
            partial = until_output_projection(block, layer, hidden, positions, attention, memory)
            return rows.reduce_scatter(partial, sizes)
        except ConnectionLost as lost:
            rows.close()
            raise self._why(lost) from None
        except BaseException:
            rows.close()
            raise

    def stats(self) -> GroupStats:
        """What the first rank has sent."""
        traffic = self._rows.traffic
        return GroupStats(
            reduce_scatter_bytes=traffic.reduce_scatter,
            all_gather_bytes=traffic.all_gather,
            metadata_bytes=traffic.metadata,
        )


class AttentionRank:
    """On any other rank: attends with its own heads to the rows that the first rank sends."""

    def __init__(
        self, model: Model, memory: LayerMemory, device: torch.device, block_size: int, rows: RowCollectives
    ) -> None:
        self._model, self._memory, self._device = model, memory, device
        self._block_size, self._rows = block_size, rows

    def follow(self) -> None:
        """Attend until the first rank is gone. Raises ConnectionLost then, or for a damaged message."""
        rows, attention, spec = self._rows, None, self._model.spec
        layers = spec.num_layers + spec.predicting
        nothing = torch.empty(0, spec.hidden_size, device=self._device)
        with torch.inference_mode():
            while True:
                layer, step = _parsed(next_message(rows.group, self._memory), layers)
                if step:
                    attention = AttentionBatch.build(unpack(step), self._block_size, self._device)
                if attention is None:
                    raise ConnectionLost("rows of an unknown step")
                sizes = _at_first(attention.batch.num_rows, rows.group.size)
                hidden = rows.all_gather(nothing, sizes)
                positions = to_device(attention.batch.positions, self._device)
                block = self._model.block(layer)
                partial = until_output_projection(block, layer, hidden, positions, attention, self._memory)
                rows.reduce_scatter(partial, sizes)


def _parsed(message: bytes, layers: int) -> tuple[int, bytes]:
    """The layer, and the bytes of the step if it is a new one."""
    if len(message) < _LAYER.size:
        raise ConnectionLost(f"a layer's message of {len(message)} bytes")
    layer: int = _LAYER.unpack_from(message)[0]
    if not 0 <= layer < layers:
        raise ConnectionLost(f"rows for layer {layer} of {layers}")
    return layer, message[_LAYER.size :]


def _at_first(rows: int, ranks: int) -> list[int]:
    """Rows of each rank where the first one has all of them."""
    return [rows, *[0] * (ranks - 1)]
