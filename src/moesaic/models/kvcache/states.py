"""The states of linear attention of every layer that has one: seats and pages (`kernels.states`).

The scheduler decides which sequence has which seat and page (`policy/scheduling/stateblocks.py`).
"""

from __future__ import annotations

import numpy as np
import torch

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.states import CHUNK, LayerStates, StateSizes
from moesaic.models.block import Block, Projections
from moesaic.models.kvcache.images import ByteLines, Bytes
from moesaic.models.kvcache.paged_kv import zeros


class StateCache:
    """States of `num_layers` layers, in float32."""

    def __init__(
        self, sizes: StateSizes, num_layers: int, seats: int, snapshots: int, device: torch.device
    ) -> None:
        """seats: sequences that run at once. snapshots: pages that may be kept of prefixes."""
        pages = 1 + seats + snapshots
        shapes = (
            (pages, sizes.value_heads, sizes.key_width, sizes.value_width),
            (pages, sizes.taps - 1, sizes.channels),
            (seats, sizes.key_heads, CHUNK, sizes.key_width),
            (seats, sizes.value_heads, CHUNK, sizes.value_width),
            (seats, sizes.value_heads, CHUNK),
            (seats, sizes.ring, sizes.channels),
        )
        parts = (zeros((num_layers, *shape), torch.float32, device, allocate_now=False) for shape in shapes)
        self._layers = tuple(LayerStates(sizes, *tensors) for tensors in zip(*parts, strict=True))
        self._pages = ByteLines(
            [tensor for layer in self._layers for tensor in (layer.pages, layer.page_tails)]
        )
        self._seats = ByteLines(
            [tensor for at in self._layers for tensor in (at.keys, at.updates, at.decays, at.tails)]
        )

    def layer(self, layer: int) -> LayerStates:
        """The states of one layer, counted among those with states."""
        return self._layers[layer]

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence over all layers: a page and a seat."""
        return self._pages.num_bytes + self._seats.num_bytes

    def copy_states(self, page: int, seat: int) -> Bytes:
        """Returns [state_bytes] the contents of a page and a seat."""
        return np.concatenate([self._pages.copy(np.array([page])), self._seats.copy(np.array([seat]))])

    def put_states(self, page: int, seat: int, data: Bytes) -> None:
        """Writes what `copy_states` returned to a page and a seat."""
        self._pages.put(np.array([page]), data[: self._pages.num_bytes])
        self._seats.put(np.array([seat]), data[self._pages.num_bytes :])

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layers."""
        return self._pages.num_bytes

    def copy_page(self, page: int) -> Bytes:
        """Returns [page_bytes] the state at a multiple of STATE_CHUNK."""
        return self._pages.copy_line(page)

    def put_page(self, page: int, data: Bytes) -> None:
        """Writes what `copy_page` returned."""
        self._pages.put_line(page, data)

    def attend(self, layer: int, block: Block, rows: Projections, batch: AttentionBatch) -> torch.Tensor:
        """Lets the block attend to its states, and changes them. Returns [n, Hv * dv]."""
        return block.recurrence(rows, self._layers[layer], batch)


def state_bytes(sizes: StateSizes | None, num_layers: int) -> tuple[int, int]:
    """Bytes of a page, and of a seat without its page, over all layers with states; 0 without any."""
    if sizes is None:
        return 0, 0
    return 4 * num_layers * sizes.page_numbers, 4 * num_layers * sizes.seat_numbers
