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

import numpy as np
import torch

from moesaic.collectives.group import Group
from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.metrics import GroupStats
from moesaic.kernels.batch import AttentionBatch
from moesaic.kvcache.memory import LayerMemory
from moesaic.models.block import Block
from moesaic.models.model import Model
from moesaic.runtime.group.arrays import pack, to_device, to_host, unpack
from moesaic.runtime.group.shared_images import next_message
from moesaic.runtime.step.stages import until_output_projection

_LAYER = struct.Struct("<q")
"""The beginning of a message to the other ranks. The step follows, unless it is that of the last message."""
NAME = "shared attention"
"""The name of this layout, for display."""


class SharedAttention:
    """On the first rank: takes the place of `until_output_projection` in `BlockStages`."""

    def __init__(self, group: Group, why: Callable[[ConnectionLost], MoesaicError]) -> None:
        """why: the error to raise where a rank is gone. The group is closed when this object is deleted."""
        self._group, self._why = group, why
        self._sent: AttentionBatch | None = None
        """The step that the other ranks have."""
        weakref.finalize(self, group.close)

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
        group = self._group
        try:
            step = b"" if attention is self._sent else pack(attention.batch)
            group.announce(_LAYER.pack(layer) + step)
            self._sent = attention
            group.all_gather(to_host(hidden))
            partial = until_output_projection(block, layer, hidden, positions, attention, memory)
            total = group.reduce_scatter(to_host(partial), _to_first(len(hidden), group.size))
        except ConnectionLost as lost:
            group.close()
            raise self._why(lost) from None
        except BaseException:
            group.close()
            raise
        return to_device(total, hidden.device)

    def stats(self) -> GroupStats:
        """What the first rank has sent."""
        traffic = self._group.traffic
        return GroupStats(
            reduce_scatter_bytes=traffic.reduce_scatter,
            all_gather_bytes=traffic.all_gather,
            metadata_bytes=traffic.metadata,
        )


class AttentionRank:
    """On any other rank: attends with its own heads to the rows that the first rank sends."""

    def __init__(
        self, model: Model, memory: LayerMemory, device: torch.device, block_size: int, group: Group
    ) -> None:
        self._model, self._memory, self._device = model, memory, device
        self._block_size, self._group = block_size, group

    def follow(self) -> None:
        """Attend until the first rank is gone. Raises ConnectionLost then, or for a damaged message."""
        group, attention, spec = self._group, None, self._model.spec
        layers = spec.num_layers + spec.predicting
        nothing = np.empty((0, spec.hidden_size), np.float32)
        with torch.inference_mode():
            while True:
                layer, step = _parsed(next_message(group, self._memory), layers)
                if step:
                    attention = AttentionBatch.build(unpack(step), self._block_size, self._device)
                rows = to_device(group.all_gather(nothing), self._device)
                if attention is None or attention.batch.num_rows != len(rows):
                    raise ConnectionLost(f"{len(rows)} rows of an unknown step")
                positions = to_device(attention.batch.positions, self._device)
                block = self._model.block(layer)
                partial = until_output_projection(block, layer, rows, positions, attention, self._memory)
                group.reduce_scatter(to_host(partial), _to_first(len(rows), group.size))


def _parsed(message: bytes, layers: int) -> tuple[int, bytes]:
    """The layer, and the bytes of the step if it is a new one."""
    if len(message) < _LAYER.size:
        raise ConnectionLost(f"a layer's message of {len(message)} bytes")
    layer: int = _LAYER.unpack_from(message)[0]
    if not 0 <= layer < layers:
        raise ConnectionLost(f"rows for layer {layer} of {layers}")
    return layer, message[_LAYER.size :]


def _to_first(rows: int, ranks: int) -> list[int]:
    """Sizes of a reduce-scatter whose sum goes to the first rank."""
    return [rows, *[0] * (ranks - 1)]
