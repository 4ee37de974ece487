"""The experts of a server computed with torch: the reference kernels, and GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from moesaic.core.experts import ExpertLayout
from moesaic.experts.backend import CallPairs
from moesaic.kernels import table
from moesaic.kernels.weights import ExpertWeights
from moesaic.models import registry


class TorchBackend:
    """An ExpertBackend on the kernels that `kernels.table` picks for a device."""

    def __init__(
        self,
        path: Path,
        layout: ExpertLayout,
        device: str,
        kernels: str,
        threads: int,
        mapped: bool = True,
    ) -> None:
        self._kernels = table.pick(device, kernels)
        self._kernels.set_threads(threads, False)
        self.name = self._kernels.name
        self._path, self._layout, self._device, self._mapped = path, layout, device, mapped
        none: tuple[torch.Tensor | None, ...] = (None,) * layout.num_experts
        self._weights = {layer: ExpertWeights(none, none, none) for layer in layout.prefixes}

    @property
    def held(self) -> dict[int, list[int]]:
        return {layer: list(weights.held) for layer, weights in self._weights.items() if weights.held}

    def take(self, wanted: Mapping[int, Iterable[int]]) -> None:
        new = {
            layer: sorted(set(experts) - set(self._weights[layer].held)) for layer, experts in wanted.items()
        }
        dtype = self._layout.dtype
        read = registry.load_experts(self._path, self._kernels, new, self._device, dtype, self._mapped)
        for layer, more in read.items():
            held = self._weights[layer]
            both = [
                tuple(old if new is None else new for old, new in zip(*parts, strict=True))
                for parts in ((held.gate, more.gate), (held.up, more.up), (held.down, more.down))
            ]
            self._weights[layer] = ExpertWeights(*both)

    def keep(self, wanted: Mapping[int, Iterable[int]]) -> None:
        for layer, weights in self._weights.items():
            kept = set(wanted.get(layer, ()))
            gate, up, down = (
                tuple(one if expert in kept else None for expert, one in enumerate(part))
                for part in (weights.gate, weights.up, weights.down)
            )
            self._weights[layer] = replace(weights, gate=gate, up=up, down=down)

    def run(self, layer: int, parts: Sequence[CallPairs]) -> None:
        rows = np.concatenate([part.hidden[part.rows] for part in parts])
        experts = np.concatenate([part.experts for part in parts])
        hidden = torch.from_numpy(rows).to(self._device)
        ids = torch.from_numpy(experts).to(self._device)[:, None]
        with torch.inference_mode():
            answer = self._kernels.experts(self._weights[layer], hidden, ids)[:, 0].cpu().numpy()
        begin = 0
        for part in parts:
            part.out[part.lines] = answer[begin : begin + len(part.lines)]
            begin += len(part.lines)
