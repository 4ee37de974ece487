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
        self, path: Path, layout: ExpertLayout, kernels: str, threads: int, mapped: bool = True
    ) -> None:
        self.device_name = ""
        self.name = f"native ({plain.use(None if kernels == 'auto' else kernels)})"
        plain.set_threads(threads, pin=False)
        self._store = Store(path, layout, mapped)
        self._reading = threading.Lock()
        """Locked while the kernel reads weights, which must not be dropped meanwhile."""
        self._size = layout.hidden, layout.width
        self._stored = {layer: expert_code(layout.dtype_of(layer)) for layer in layout.layers}
        self._activation = layout.activation

    @property
    def held(self) -> dict[int, list[int]]:
        return self._store.held

    def take(self, wanted: Mapping[int, Iterable[int]]) -> None:
        self._store.take(wanted)

    def keep(self, wanted: Mapping[int, Iterable[int]]) -> None:
        with self._reading:
            self._store.keep(wanted)

    def run(self, layer: int, parts: Sequence[CallPairs]) -> None:
        found = [(part.hidden, part.rows, part.experts, part.out, part.lines) for part in parts]
        with self._reading:
            stored = self._stored[layer]
            plain.experts(self._store.table(layer), self._size, stored, found, self._activation)
