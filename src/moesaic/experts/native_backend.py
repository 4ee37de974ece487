"""The experts of a server on the compiled kernels, read from the checkpoint. Its process needs no torch."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from moesaic.core.experts import ExpertLayout
from moesaic.core.weight_types import expert_code
from moesaic.experts.backend import CallPairs
from moesaic.experts.store import Store
from moesaic.kernels.native import plain


class NativeBackend:
    """An ExpertBackend on the compiled kernels. `take` and `keep` may run in another thread than `run`."""

    def __init__(
        self, path: Path, layout: ExpertLayout, kernels: str, threads: int, use_mmap: bool = True
    ) -> None:
        self.device_name = ""
        self.name = f"native ({plain.use(None if kernels == 'auto' else kernels)})"
        plain.set_threads(threads, pin=False)
        self._store = Store(path, layout, use_mmap)
        self._reading = threading.Lock()
        """Locked while the kernel reads weights, which must not be dropped meanwhile."""
        self._size = layout.hidden, layout.width
        self._dtype_codes = {layer: expert_code(layout.dtype_of(layer)) for layer in layout.layers}
        self._activation = layout.activation

    @property
    def resident_experts(self) -> dict[int, list[int]]:
        return self._store.resident_experts

    def load(self, experts_by_layer: Mapping[int, Iterable[int]]) -> None:
        self._store.load(experts_by_layer)

    def keep_only(self, experts_by_layer: Mapping[int, Iterable[int]]) -> None:
        with self._reading:
            self._store.keep_only(experts_by_layer)

    def run(self, layer: int, parts: Sequence[CallPairs]) -> None:
        calls = [(part.hidden, part.rows, part.experts, part.results, part.result_rows) for part in parts]
        with self._reading:
            dtype_code = self._dtype_codes[layer]
            plain.experts(self._store.table(layer), self._size, dtype_code, calls, self._activation)
