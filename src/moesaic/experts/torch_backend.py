"""The experts of a server computed with torch: the reference kernels, and GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from moesaic.core.experts import PARTS, ExpertLayout
from moesaic.experts.backend import CallPairs
from moesaic.kernels import table
from moesaic.kernels.moving import move_array
from moesaic.kernels.weights import ExpertWeights
from moesaic.models import registry


class TorchBackend:
    """An ExpertBackend on the kernels that `kernels.table` picks for a device. `take` and `keep` may run in
    another thread than `run`."""

    def __init__(
        self,
        path: Path,
        layout: ExpertLayout,
        device: str,
        kernels: str,
        threads: int,
        use_mmap: bool = True,
    ) -> None:
        self._kernels = table.pick(device, kernels)
        self._kernels.set_threads(threads, False)
        self.name = self._kernels.name
        self.device_name = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
        self._path, self._layout, self._device, self._use_mmap = path, layout, device, use_mmap
        no_experts = ExpertWeights.from_resident(
            layout.num_experts, {}, PARTS[layout.form], layout.activation
        )
        self._weights = dict.fromkeys(layout.prefixes, no_experts)

    @property
    def resident_experts(self) -> dict[int, list[int]]:
        return {
            layer: list(weights.resident_ids)
            for layer, weights in self._weights.items()
            if weights.resident_ids
        }

    def load(self, experts_by_layer: Mapping[int, Iterable[int]]) -> None:
        new = {
            layer: sorted(set(experts) - set(self._weights[layer].resident_ids))
            for layer, experts in experts_by_layer.items()
        }
        dtype = self._layout.dtype
        read = registry.load_experts(self._path, self._kernels, new, self._device, dtype, self._use_mmap)
        for layer, weights in read.items():
            self._weights[layer] = self._weights[layer].with_replacements(weights)

    def keep_only(self, experts_by_layer: Mapping[int, Iterable[int]]) -> None:
        for layer, weights in self._weights.items():
            self._weights[layer] = weights.select(set(experts_by_layer.get(layer, ())))

    def run(self, layer: int, parts: Sequence[CallPairs]) -> None:
        experts = np.concatenate([part.experts for part in parts])
        weights = self._weights[layer]  # once, as another thread may put others there meanwhile
        missing = np.setdiff1d(experts, weights.resident_ids)
        if len(missing):
            raise KeyError(f"expert {missing[0]} is not held here")
        with torch.inference_mode():
            hidden = self._rows(parts)
            ids = move_array(experts.astype(np.int64), self._device)[:, None]
            self._give(parts, self._kernels.experts(weights, hidden, ids)[:, 0])

    def _rows(self, parts: Sequence[CallPairs]) -> torch.Tensor:
        """[p, h] the rows of all pairs on the device. Rows that are there stay there."""
        rows = []
        for part in parts:
            if isinstance(part.hidden, torch.Tensor):
                rows.append(part.hidden.index_select(0, move_array(part.rows, self._device)))
            else:
                rows.append(move_array(part.hidden[part.rows], self._device))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _give(self, parts: Sequence[CallPairs], answer: torch.Tensor) -> None:
        """Write the answers [p, h] where they belong. Waits for the device if any belong to the host."""
        host_answer = None
        if not all(isinstance(part.results, torch.Tensor) for part in parts):
            host_answer = answer.cpu().numpy()
        begin = 0
        for part in parts:
            pairs = slice(begin, begin + len(part.result_rows))
            begin = pairs.stop
            if isinstance(part.results, torch.Tensor):
                part.results.index_copy_(0, move_array(part.result_rows, self._device), answer[pairs])
            else:
                assert host_answer is not None
                part.results[part.result_rows] = host_answer[pairs]
