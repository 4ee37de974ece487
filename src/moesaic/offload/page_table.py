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
        self._here = torch.zeros(parts, num_experts, dtype=torch.int64, pin_memory=True)
        self._there = torch.zeros(parts, num_experts, dtype=torch.int64, device=device)
        self._every: ExpertWeights | None = None
        self._held: Collection[int] = ()
        self._addresses = np.zeros((parts, num_experts), np.int64)
        self._pages: DeviceTable | None = None
        self._shown: ExpertWeights | None = None

    def show(self, every: ExpertWeights, held: frozenset[int]) -> ExpertWeights:
        """The experts `held`, with this table, which has them and no others from now on.

        every: all experts that have a place, whether they are there now or not. The device's copy is written
        only if something changed. By then the one before must have been made.
        """
        if self._shown is None or every is not self._every or held != self._held:
            if every is not self._every or self._pages is None:
                self._addresses[:] = every.addresses
                self._pages = every.table_over(self._there)
            mask = np.zeros(self._addresses.shape[1], bool)
            mask[list(held)] = True
            np.multiply(self._addresses, mask, out=self._here.numpy())
            self._there.copy_(self._here, non_blocking=True)
            self._every, self._held = every, held
            self._shown = replace(every.only(held), pages=self._pages)
        return self._shown
