"""The experts of a server that has more of them than memory: some are there, the others are read for rows.

Its process imports torch, whose libraries take memory beside the experts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import ExpertLayout
from moesaic.core.metrics import ResidencyStats
from moesaic.core.tokens import IntArray
from moesaic.experts.backend import CallPairs
from moesaic.kernels import table
from moesaic.offload.pool import ExpertPool


class StreamedBackend:
    """An ExpertBackend. `take` and `keep` read nothing, and may run in another thread than `run`.

    Raises the errors of ExpertPool.
    """

    def __init__(
        self, path: Path, layout: ExpertLayout, kernels: str, threads: int, fast_memory: int
    ) -> None:
        """fast_memory: maximum bytes of experts in memory."""
        self.device_name = ""
        self._kernels = table.pick("cpu", kernels)
        self._kernels.set_threads(threads, False)
        self.name = self._kernels.name
        self._path, self._layout = path, layout
        self._pool = ExpertPool(path, layout, fast_memory)
        self._resident: dict[int, frozenset[int]] = dict.fromkeys(layout.layers, frozenset())
        self._changing = threading.Lock()

    @property
    def resident_experts(self) -> dict[int, list[int]]:
        return {layer: sorted(experts) for layer, experts in self._resident.items() if experts}

    def residency(self) -> ResidencyStats:
        """What runs so far found in memory, and what they read."""
        return self._pool.stats

    def load(self, experts_by_layer: Mapping[int, Iterable[int]]) -> None:
        new = {layer: frozenset(experts) for layer, experts in experts_by_layer.items()}
        for layer, experts in new.items():
            if layer not in self._resident:
                raise CheckpointError(f"{self._path}: layer {layer} has no routed experts")
            for expert in experts:
                if not 0 <= expert < self._layout.num_experts:
                    allowed_range = f"0 to {self._layout.num_experts - 1}"
                    raise CheckpointError(f"experts: got {expert}; allowed: {allowed_range}")
        with self._changing:
            self._resident = {
                layer: held | new.get(layer, frozenset()) for layer, held in self._resident.items()
            }

    def keep_only(self, experts_by_layer: Mapping[int, Iterable[int]]) -> None:
        with self._changing:
            self._resident = {
                layer: held & frozenset(experts_by_layer.get(layer, ()))
                for layer, held in self._resident.items()
            }

    def run(self, layer: int, parts: Sequence[CallPairs]) -> None:
        experts: IntArray = np.concatenate([part.experts for part in parts])
        distinct_experts = np.unique(experts).tolist()
        for expert in distinct_experts:
            if expert not in self._resident[layer]:
                raise KeyError(f"expert {expert} is not held here")
        rows = np.concatenate([part.hidden[part.rows] for part in parts])
        self._pool.learn(layer, experts)
        answer = np.empty(rows.shape, dtype=np.float32)
        # A run may need more experts than memory has places for.
        places = self._pool.count_places(layer)
        for begin in range(0, len(distinct_experts), places):
            expert_group = distinct_experts[begin : begin + places]
            pairs = np.flatnonzero(np.isin(experts, expert_group))
            answer[pairs] = self._answer(layer, expert_group, rows[pairs], experts[pairs])
        begin = 0
        for part in parts:
            part.results[part.result_rows] = answer[begin : begin + len(part.result_rows)]
            begin += len(part.result_rows)

    def _answer(self, layer: int, expert_group: list[int], rows: np.ndarray, experts: IntArray) -> np.ndarray:
        """[p, h] answers of pairs whose experts are among `expert_group`."""
        weights = self._pool.load_experts(layer, expert_group)
        with torch.inference_mode():
            ids = torch.from_numpy(experts)[:, None]
            answers = self._kernels.experts(weights, torch.from_numpy(rows), ids)[:, 0]
            return answers.numpy()
