"""A group whose routed experts are on servers: its ranks share the attention and nothing else.

The first rank runs every stage of a step, and asks the servers, as a single process does. For each layer's
attention it sends the rows to the other ranks. Every rank attends with its own heads, and the first rank adds
up the partial sums of the output projection. The other ranks keep the keys, values and states of their heads,
and nothing between two layers: a step can stop anywhere, and steps can take turns. What is recorded as CUDA
graphs is in `gpu/ranks/recorded_attention.py`.

Payload for B rows of S bytes on G ranks: (G - 1) B S to the other ranks and as much back, which is that of an
all-reduce.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from moesaic.core import gpu_parts
from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.metrics import GroupStats
from moesaic.kernels.batch import AttentionBatch
from moesaic.models.block import Block
from moesaic.models.kvcache.memory import LayerMemory
from moesaic.models.model import Model
from moesaic.runtime.group.announcer import Announcer, at_first
from moesaic.runtime.group.arrays import pack, to_device, unpack
from moesaic.runtime.group.rows import RowCollectives
from moesaic.runtime.group.shared_images import next_message
from moesaic.runtime.prefix_cache.part import OwnPart
from moesaic.runtime.step.stages import Exchanges, RecordedStages, until_output_projection
from moesaic.runtime.step.step_kind import Kind

_LAYER = struct.Struct("<q")
"""The beginning of a message to the other ranks. The step follows, unless it is that of the last message.
Messages about recordings begin with negative numbers."""
NAME = "shared attention"
"""The name of this layout, for display."""


class SharedAttention:
    """On the first rank: the `SharedHeads` of `BlockStages`."""

    def __init__(
        self,
        rows: RowCollectives,
        explain_loss: Callable[[ConnectionLost], MoesaicError],
        empty_rows: torch.Tensor,
    ) -> None:
        """explain_loss: the error to raise where a rank is gone. empty_rows: [0, h] on the device of the
        rows.

        The group is closed when this object is deleted.
        """
        self._rows, self._announcer = rows, Announcer(rows, explain_loss)
        self._sent_step: AttentionBatch | None = None
        """The step that the other ranks have. They have those of recordings beside it."""
        self._recordings, self._empty_rows = 0, empty_rows
        self._recording: RecordedStages | None = None
        """The attention of the step that is recorded now, or None."""
        weakref.finalize(self, rows.close)

    def stages(
        self,
        block: Block,
        layer: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        memory: LayerMemory,
    ) -> Exchanges:
        """Attend with all ranks. Returns [n, h], summed over all heads. It waits for the other ranks.

        After an error the group is closed, since the other ranks are in the middle of the layer.
        """
        arguments = block, layer, hidden, positions, attention, memory
        if self._recording is not None:
            return (yield from self._recording.stages(*arguments))
        return self._announcer.run(partial(self._attend, *arguments))

    @contextmanager
    def recording(self, kind: Kind) -> Iterator[RecordedStages]:
        """A context in which a step is recorded. The other ranks record too."""
        self._recordings += 1
        hidden = self._empty_rows.new_zeros(kind.rows, self._empty_rows.shape[1])
        recorded_attention = gpu_parts.recorded_attention()
        recording = recorded_attention(self._announcer, self._recordings, kind, hidden)
        self._recording = recording
        try:
            yield recording
        finally:
            self._recording = None

    def _attend(
        self,
        block: Block,
        layer: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        memory: LayerMemory,
    ) -> torch.Tensor:
        rows, sizes = self._rows, at_first(len(hidden), self._rows.group.size)
        # All layers of a step have the same batch, so it is sent with the first one only.
        step = b"" if attention is self._sent_step else pack(attention.batch)
        self._announcer.announce(layer, step=step)
        self._sent_step = attention
        rows.all_gather(hidden, sizes)
        addend = until_output_projection(block, layer, hidden, positions, attention, memory)
        return rows.reduce_scatter(addend, sizes)

    def stats(self) -> GroupStats:
        """What the first rank has sent."""
        traffic = self._rows.traffic
        return GroupStats(
            reduce_scatter_bytes=traffic.reduce_scatter,
            all_gather_bytes=traffic.all_gather,
            metadata_bytes=traffic.metadata,
        )


class StepRecordings(Protocol):
    """On any other rank: what it records and replays."""

    def is_recording_message(self, message: bytes) -> bool:
        """Whether a message of the first rank is about recordings."""
        ...

    def follow(self, message: bytes) -> None:
        """Do what such a message says. Raises ConnectionLost for a damaged one."""
        ...


class AttentionRank:
    """On any other rank: attends with its own heads to the rows that the first rank sends."""

    def __init__(
        self,
        model: Model,
        memory: LayerMemory,
        device: torch.device,
        block_size: int,
        rows: RowCollectives,
        recordings: StepRecordings | None = None,
    ) -> None:
        """recordings: None: nothing is recorded. The group is closed when this object is deleted."""
        self._model, self.memory, self._device = model, memory, device
        self._block_size, self._rows = block_size, rows
        self._recordings = recordings
        weakref.finalize(self, rows.close)

    def follow(self, prefixes: OwnPart | None = None) -> None:
        """Attend until the first rank is gone. Raises ConnectionLost then, or for a damaged message.

        prefixes: see `next_message`.
        """
        rows, attention, spec = self._rows, None, self._model.spec
        layers = spec.num_layers + spec.predicting
        empty_rows = torch.empty(0, spec.hidden_size, device=self._device)
        with torch.inference_mode():
            while True:
                message = next_message(rows.group, self.memory, prefixes)
                if self._recordings is not None and self._recordings.is_recording_message(message):
                    self._recordings.follow(message)
                    continue
                layer, step = _parse_message(message, layers)
                if step:
                    attention = AttentionBatch.build(unpack(step), self._block_size, self._device)
                if attention is None:
                    raise ConnectionLost("rows of an unknown step")
                sizes = at_first(attention.batch.num_rows, rows.group.size)
                hidden = rows.all_gather(empty_rows, sizes)
                positions = to_device(attention.batch.positions, self._device)
                block = self._model.block(layer)
                addend = until_output_projection(block, layer, hidden, positions, attention, self.memory)
                rows.reduce_scatter(addend, sizes)


def _parse_message(message: bytes, layers: int) -> tuple[int, bytes]:
    """The layer, and the bytes of the step if it is a new one."""
    if len(message) < _LAYER.size:
        raise ConnectionLost(f"a layer's message of {len(message)} bytes")
    layer: int = _LAYER.unpack_from(message)[0]
    if not 0 <= layer < layers:
        raise ConnectionLost(f"rows for layer {layer} of {layers}")
    return layer, message[_LAYER.size :]
