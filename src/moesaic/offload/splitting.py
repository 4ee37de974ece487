"""Splits the experts that the rows of a layer chose between the processors of both levels, by price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from moesaic.core.offload import SplitPrices
from moesaic.offload.parts import MicroBatch
from moesaic.policy.offloading.splitting import experts_to_load


class Divides(Protocol):
    """Sends a micro-batch's pairs to two levels; implemented in offload.post_attention."""

    def divide(self, part: MicroBatch, expert_ids: torch.Tensor, fast_experts: Sequence[int]) -> None: ...


class Splitting:
    """Decides for one layer after another, when all of its gates have run."""

    def __init__(self, prices: SplitPrices, static: Mapping[int, frozenset[int]], divides: Divides) -> None:
        """static: layer -> experts that are on the fast level now."""
        self._prices, self._static, self._divides = prices, static, divides
        self.loaded_experts: list[int] = []
        """The experts of the last layer that the fast processor computes after they have been loaded."""

    def split(self, layer: int, parts: Sequence[MicroBatch], heat: Sequence[float]) -> None:
        """heat: [E] how often each expert was chosen lately."""
        gate_outputs = [part.gate_output for part in parts]
        ids = [
            part_ids.expert_ids.cpu()
            for part_ids in gate_outputs
            if part_ids is not None and part_ids.expert_ids is not None
        ]
        rows = np.bincount(torch.cat([part_ids.flatten() for part_ids in ids]).numpy(), minlength=len(heat))
        static_experts, chosen_experts = self._static[layer], np.flatnonzero(rows).tolist()
        missing = {expert: int(rows[expert]) for expert in chosen_experts if expert not in static_experts}
        static_counts = [int(rows[expert]) for expert in chosen_experts if expert in static_experts]
        self.loaded_experts = experts_to_load(self._prices, missing, static_counts, heat)
        # All micro-batches get the same division, since they share the experts that are loaded.
        for part, part_ids in zip(parts, ids, strict=True):
            self._divides.divide(part, part_ids, sorted(static_experts.union(self.loaded_experts)))
