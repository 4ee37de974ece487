"""Where the experts of a layer lie in the memory of a GPU: a table that the grouped products read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch

from moesaic.kernels.weights import PARTS, DeviceTable, ExpertWeights


class PageTable:
    """For each expert of a layer the addresses of its matrices on the device, 0 while it is not there.

    An expert is computed from where it lies, so its matrices are never copied together. The kernels of a step
    read the table when they run. So it may only be changed in turn with them, on the same stream.
    """

    def __init__(self, num_experts: int, parts: int, device: torch.device) -> None:
        """parts: tensors of an expert, 3 or 6 of PARTS."""
        assert parts in (3, len(PARTS))
        self._host_table = torch.zeros(parts, num_experts, dtype=torch.int64, pin_memory=True)
        self._device_table = torch.zeros(parts, num_experts, dtype=torch.int64, device=device)
        self._placed_experts: ExpertWeights | None = None
        self._resident_experts: Collection[int] = ()
        self._addresses = np.zeros((parts, num_experts), np.int64)
        self._pages: DeviceTable | None = None
        self._weights: ExpertWeights | None = None

    def select_experts(
        self, placed_experts: ExpertWeights, resident_experts: frozenset[int]
    ) -> ExpertWeights:
        """The experts `resident_experts`, with this table, which has them and no others from now on.

        placed_experts: all experts that have a place, whether they are there now or not. The device's copy is written
        only if something changed. By then the one before must have been made.
        """
        if (
            self._weights is None
            or placed_experts is not self._placed_experts
            or resident_experts != self._resident_experts
        ):
            if placed_experts is not self._placed_experts or self._pages is None:
                self._addresses[:] = placed_experts.addresses
                self._pages = placed_experts.table_over(self._device_table)
            mask = np.zeros(self._addresses.shape[1], bool)
            mask[list(resident_experts)] = True
            np.multiply(self._addresses, mask, out=self._host_table.numpy())
            self._device_table.copy_(self._host_table, non_blocking=True)
            self._placed_experts, self._resident_experts = placed_experts, resident_experts
            self._weights = replace(placed_experts.select(resident_experts), page_table=self._pages)
        return self._weights
