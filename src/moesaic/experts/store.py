"""The weights of an expert server, read from the mapped checkpoint by numpy alone.

A row that the checkpoint stores in the type it is computed from stays where it is: processes of one host
share its pages, and taking an expert in costs a look into the file's header. Other types are converted once.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import ExpertLayout

Bytes = npt.NDArray[np.uint8]
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PAGE = 4096
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2}
STORED = {"float32": "F32", "bfloat16": "BF16"}


class Store:
    """Expert weights by layer, as tables of addresses. `take` and `drop` change what is held."""

    def __init__(self, path: Path, layout: ExpertLayout) -> None:
        self.layout = layout
        self._checkpoint = _Mapped(path)
        self._tables = {
            layer: np.zeros((3, layout.num_experts), dtype=np.uint64) for layer in layout.prefixes
        }
        self._held: dict[tuple[int, int], list[Bytes]] = {}

    def table(self, layer: int) -> npt.NDArray[np.uint64]:
        """[3, E] addresses of gate, up and down; 0 where an expert is not held."""
        return self._tables[layer]

    @property
    def held(self) -> dict[int, list[int]]:
        """Layer -> the experts that are here, ascending."""
        held: dict[int, list[int]] = {}
        for layer, expert in sorted(self._held):
            held.setdefault(layer, []).append(expert)
        return held

    def take(self, wanted: Mapping[int, Iterable[int]]) -> None:
        """Hold these experts too, layer -> ids, their pages read in. CheckpointError for one that is not."""
        for layer, experts in wanted.items():
            if layer not in self.layout.prefixes:
                raise CheckpointError(f"{self._checkpoint.path}: layer {layer} has no routed experts")
            for expert in experts:
                if (layer, expert) not in self._held:
                    self._take(layer, expert)

    def keep(self, wanted: Mapping[int, Iterable[int]]) -> None:
        """Drop every other expert."""
        kept = {(layer, expert) for layer, experts in wanted.items() for expert in experts}
        for layer, expert in set(self._held) - kept:
            self._tables[layer][:, expert] = 0
            del self._held[layer, expert]

    def _take(self, layer: int, expert: int) -> None:
        if not 0 <= expert < self.layout.num_experts:
            raise CheckpointError(f"experts: got {expert}; allowed: 0 to {self.layout.num_experts - 1}")
        parts = [
            self._checkpoint.matrix(name, rows, columns, STORED[self.layout.dtype])
            for name, rows, columns in self.layout.tensors(layer, expert)
        ]
        self._held[layer, expert] = parts
        self._tables[layer][:, expert] = [part.ctypes.data for part in parts]


class _Mapped:
    """The safetensors files of one directory: eight bytes of length, a JSON header, then the tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._shards = self._index()
        self._files: dict[str, tuple[Bytes, dict[str, Any]]] = {}

    def matrix(self, name: str, rows: int, columns: int, stored: str) -> Bytes:
        """The bytes of a matrix in type `stored`: in place when the file has that type, else converted."""
        part, kind = self._find(name, rows, columns)
        if kind != stored:
            return _converted(part, kind, stored)
        part[::PAGE].max()  # touches every page: else the first requests would wait for each of them
        return part.copy() if part.ctypes.data % WIDTHS[kind] else part

    def _find(self, name: str, rows: int, columns: int) -> tuple[Bytes, str]:
        """The bytes of a matrix as they are, and their type."""
        shard = self._shards.get(name, INDEX) if self._shards else SINGLE
        file = self.path / shard
        data, header = (None, {}) if shard == INDEX else self._open(shard)
        entry = header.get(name)
        if data is None or not isinstance(entry, dict):
            raise CheckpointError(f"{file}: tensor {name} is missing")
        kind, shape = str(entry.get("dtype")), entry.get("shape")
        if kind not in WIDTHS or shape != [rows, columns]:
            allowed = f"{', '.join(WIDTHS)} [{rows}, {columns}]"
            raise CheckpointError(f"{file}: tensor {name}: got {kind} {shape}; allowed: {allowed}")
        span, size = entry.get("data_offsets"), rows * columns * WIDTHS[kind]
        if not _fits(span, size, len(data)):
            place = f"{size} bytes at {span} of {len(data)}"
            raise CheckpointError(f"{file}: truncated or corrupt: tensor {name} has {place}")
        return data[span[0] : span[1]], kind

    def _index(self) -> dict[str, str]:
        """Tensor -> file; empty where all are in one file."""
        file = self.path / INDEX
        if not file.is_file():
            return {}
        try:
            table = json.loads(file.read_bytes())["weight_map"]
            return {str(name): Path(shard).name for name, shard in table.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{file}: is no index of tensors ({error!r})") from error

    def _open(self, shard: str) -> tuple[Bytes, dict[str, Any]]:
        if shard not in self._files:
            try:
                with (self.path / shard).open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                data = np.frombuffer(mapped, dtype=np.uint8)
                length = int(data[:8].view("<u8")[0])
                self._files[shard] = data[8 + length :], dict(json.loads(bytes(data[8 : 8 + length])))
            except (OSError, ValueError, TypeError, RecursionError) as error:
                raise CheckpointError(f"{self.path / shard}: not a safetensors file ({error})") from error
        return self._files[shard]


def _fits(span: Any, size: int, length: int) -> TypeGuard[list[int]]:
    """Whether `span`, read from a file, is [begin, end] of `size` bytes among `length`."""
    whole = isinstance(span, list) and [type(at) for at in span] == [int, int]
    return whole and 0 <= span[0] <= span[1] <= length and span[1] - span[0] == size


def _converted(part: Bytes, kind: str, stored: str) -> Bytes:
    """A copy in another type, rounded to nearest even where it is narrower; what is no number stays none."""
    if kind == "BF16":
        wide = (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        wide = part.view(np.float16 if kind == "F16" else np.float32).astype(np.float32)
    if stored == "F32":
        return wide.view(np.uint8)
    bits = wide.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded[np.isnan(wide)] = 0x7FC0
    return rounded.astype(np.uint16).view(np.uint8)
