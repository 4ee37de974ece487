"""A checkpoint written anew with its routed experts compressed; `kernels/compressed.py` says how.

Names, shards and all that is no expert's matrix stay as they are. A matrix is of dtype U8 [rows, row_bytes].
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import ExpertLayout
from moesaic.core.stored import COMPRESSED, QUANT_METHOD, row_bytes
from moesaic.kernels import compressed
from moesaic.kernels.table import REFERENCE
from moesaic.models.checkpoint import INDEX, SINGLE, Progress
from moesaic.models.files import PATTERNS, read_json
from moesaic.models.headers import COMPRESSED_ROWS
from moesaic.models.registry import expert_layout, read_spec

PIECE = 2**21
"""Bytes, or a row, that a thread takes at once. Each has about ten times that in use."""
ALIGNED = 64
"""Bytes that tensors begin at a multiple of in their file."""
Bytes = bytes | memoryview


@dataclass(frozen=True)
class Sizes:
    """Of all tensors together."""

    bytes_before: int
    bytes_after: int
    matrices: int
    """How many were compressed."""

    @property
    def share(self) -> float:
        """What is left, of 1."""
        return self.bytes_after / self.bytes_before


@dataclass(frozen=True)
class _Tensor:
    name: str
    file: Path
    begin: int
    """Of its first byte, from the beginning of the file."""
    size: int
    """Bytes."""
    dtype: str
    shape: list[int]

    @property
    def width(self) -> float:
        """Bytes of a number; infinite where there is none."""
        return self.size / math.prod(self.shape) if self.size else math.inf

    @property
    def written(self) -> int:
        """Bytes, in the new file."""
        return self.size

    @property
    def entry(self) -> dict[str, Any]:
        """What the new file's header says, but for the place."""
        return {"dtype": self.dtype, "shape": self.shape}

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First byte and size of each, counted from the tensor's beginning."""
        step = self._unit * max(1, PIECE // self._unit)
        for at in range(0, self.size, step):
            yield at, min(step, self.size - at)

    def read(self, at: int, size: int) -> Bytes:
        """A piece, as the new file has it."""
        with self.file.open("rb") as file:
            file.seek(self.begin + at)
            data = file.read(size)
        if len(data) < size:
            raise CheckpointError(f"{self.file}: tensor {self.name}: the file ends within it")
        return data

    @property
    def _unit(self) -> int:
        """Bytes that are not parted."""
        return 1


class _Matrix(_Tensor):
    """A routed expert's, bf16 [rows, columns]."""

    @property
    def written(self) -> int:
        return math.prod(self.entry["shape"])

    @property
    def entry(self) -> dict[str, Any]:
        rows, columns = self.shape
        return {"dtype": COMPRESSED_ROWS, "shape": [rows, row_bytes(COMPRESSED, columns)]}

    def read(self, at: int, size: int) -> Bytes:
        bits = np.frombuffer(super().read(at, size), dtype="<u2").reshape(-1, self.shape[1])
        try:
            stored = compressed.compress(bits)
        except compressed.Incompressible as error:
            raise CheckpointError(f"{self.file}: tensor {self.name}: {error}") from error
        if not np.array_equal(compressed.decompress(stored, self.shape[1]), bits):
            raise AssertionError(f"tensor {self.name} would come back with other bits")
        return stored.data

    @property
    def _unit(self) -> int:
        return 2 * self.shape[1]


@dataclass(frozen=True)
class _Shard:
    name: str
    tensors: list[_Tensor]
    """In the order of the new file: each begins at a multiple of what a number of it takes."""
    metadata: dict[str, str]

    @property
    def header(self) -> bytes:
        """Of the new file, with its length before it."""
        entries: dict[str, Any] = {"__metadata__": self.metadata} if self.metadata else {}
        at = 0
        for tensor in self.tensors:
            entries[tensor.name] = {**tensor.entry, "data_offsets": [at, at + tensor.written]}
            at += tensor.written
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNED)
        return len(text).to_bytes(8, "little") + text


def compress(path: Path, directory: Path, threads: int, progress: Progress) -> Sizes:
    """Write the model in `path` to `directory`, which does not exist or is empty: whole, or not at all.

    Each matrix is decompressed again and compared. progress: is told bytes of `path` done and in all.
    Raises CheckpointError for a model without routed experts, one that is compressed already, and a matrix
    that is not bf16 or cannot be compressed; OSError for what cannot be read or written.
    """
    config = read_json(path / "config.json")
    shards = _shards(path, _layout(path, config))
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    sizes = Sizes(
        bytes_before=sum(tensor.size for tensor in tensors),
        bytes_after=sum(tensor.written for tensor in tensors),
        matrices=sum(isinstance(tensor, _Matrix) for tensor in tensors),
    )
    unfinished = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    unfinished.mkdir()
    try:
        done = 0
        for shard in shards:
            with (unfinished / shard.name).open("wb") as file:
                file.write(shard.header)
                with closing(_in_order(shard.tensors, threads)) as pieces:
                    for size, written in pieces:
                        file.write(written)
                        done += size
                        progress(done, sizes.bytes_before)
        _write_beside(path, unfinished, config, sizes.bytes_after)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return sizes


def _layout(path: Path, config: dict[str, Any]) -> ExpertLayout:
    told = config.get("quantization_config")
    if isinstance(told, dict) and told.get("quant_method") == QUANT_METHOD:
        raise CheckpointError(f"{path}: the experts of this model are compressed already")
    if not read_spec(path).moe_layers:
        raise CheckpointError(f"{path}: this model has no routed experts to compress")
    return expert_layout(path, REFERENCE)


def _shards(path: Path, layout: ExpertLayout) -> list[_Shard]:
    """The files of a checkpoint, whose headers were found whole when it was opened for its layout."""
    files = [SINGLE]
    if (path / INDEX).is_file():
        files = sorted({Path(name).name for name in read_json(path / INDEX)["weight_map"].values()})
    wanted = {
        name: [rows, columns]
        for layer in layout.layers
        for expert in range(layout.num_experts)
        for name, rows, columns in layout.tensors(layer, expert)
    }
    shards = [_shard(path / file, wanted) for file in files]
    for name in sorted(wanted.keys() - {tensor.name for shard in shards for tensor in shard.tensors}):
        raise CheckpointError(f"{path}: tensor {name} is missing")
    return shards


def _shard(file: Path, wanted: dict[str, list[int]]) -> _Shard:
    """wanted: matrices of experts, and their shapes."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        entries = json.loads(opened.read(length))
    metadata = entries.pop("__metadata__", None) or {}
    tensors = []
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if name in wanted and (dtype != "BF16" or shape != wanted[name]):
            got = f"got {dtype} {shape}; allowed: BF16 {wanted[name]}"
            raise CheckpointError(f"{file}: tensor {name}: {got}")
        kind = _Matrix if name in wanted else _Tensor
        tensors.append(kind(name, file, 8 + length + begin, end - begin, dtype, shape))
    tensors.sort(key=lambda tensor: (not isinstance(tensor, _Matrix), -tensor.width))
    return _Shard(file.name, tensors, metadata)


def _in_order(tensors: Iterable[_Tensor], threads: int) -> Generator[tuple[int, Bytes]]:
    """Each piece's size in the old file and what the new one has, by threads that are a little ahead."""
    waiting: deque[tuple[int, Future[Bytes]]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for tensor in tensors:
            for at, size in tensor.pieces():
                waiting.append((size, pool.submit(tensor.read, at, size)))
                if len(waiting) > 2 * threads:
                    read, future = waiting.popleft()
                    yield read, future.result()
        for read, future in waiting:
            yield read, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _write_beside(path: Path, directory: Path, config: dict[str, Any], total: int) -> None:
    """The small files. total: bytes of all tensors."""
    kinds = [pattern for pattern in PATTERNS if not pattern.endswith(".safetensors")]
    for file in sorted({file for kind in kinds for file in path.glob(kind) if file.is_file()}):
        shutil.copyfile(file, directory / file.name)
    config = {**config, "quantization_config": {"quant_method": QUANT_METHOD}}
    _write_json(directory / "config.json", config)
    if (path / INDEX).is_file():
        index = read_json(path / INDEX)
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": total}
        _write_json(directory / INDEX, index)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
