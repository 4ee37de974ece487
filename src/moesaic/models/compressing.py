"""Rewrites a checkpoint with compressed routed experts. `kernels/compressed_layout.py` describes the
compression.

Names, shards and all other tensors stay as they are. A compressed matrix has dtype U8 [rows, row_bytes].
Experts of a fused tensor are written one by one, in the same shard.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import ROWS, ExpertLayout
from moesaic.core.weight_types import COMPRESSED_DTYPE, QUANT_METHOD, row_bytes
from moesaic.kernels import compressed_layout
from moesaic.kernels.table import REFERENCE
from moesaic.models import fingerprint, fused_tensors
from moesaic.models.checkpoint import INDEX, SINGLE, Progress
from moesaic.models.files import INDEX_BYTES, read_json
from moesaic.models.headers import COMPRESSED_ROWS, Headers
from moesaic.models.hub import PATTERNS
from moesaic.models.registry import expert_layout, is_quantised, read_spec

PIECE = 2**21
"""Bytes that a thread compresses at once, or one row if that is larger. It uses about ten times as much."""
ALIGNED = 64
"""Tensors begin at a multiple of this many bytes in their file."""
Bytes = bytes | memoryview


@dataclass(frozen=True)
class Sizes:
    """Sizes of all tensors together."""

    bytes_before: int
    bytes_after: int
    matrices: int
    """Number of compressed matrices."""

    @property
    def share(self) -> float:
        """Size after compression as a fraction of the size before."""
        return self.bytes_after / self.bytes_before


@dataclass(frozen=True)
class _Tensor:
    name: str
    file: Path
    begin: int
    """Offset of its first byte in the file."""
    size: int
    """Size in bytes."""
    dtype: str
    shape: list[int]

    @property
    def width(self) -> float:
        """Bytes per number; infinite for an empty tensor."""
        return self.size / math.prod(self.shape) if self.size else math.inf

    @property
    def new_size(self) -> int:
        """Size in bytes in the new file."""
        return self.size

    @property
    def entry(self) -> dict[str, Any]:
        """The entry in the new file's header, without the offsets."""
        return {"dtype": self.dtype, "shape": self.shape}

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yields offset within the tensor and size of each piece."""
        step = self._unit * max(1, PIECE // self._unit)
        for offset in range(0, self.size, step):
            yield offset, min(step, self.size - offset)

    def read(self, offset: int, size: int) -> Bytes:
        """Returns a piece as it is stored in the new file."""
        with self.file.open("rb") as file:
            file.seek(self.begin + offset)
            data = file.read(size)
        if len(data) < size:
            raise CheckpointError(f"{self.file}: tensor {self.name}: the file ends within it")
        return data

    @property
    def _unit(self) -> int:
        """Size in bytes of the unit that pieces do not split."""
        return 1


class _Matrix(_Tensor):
    """A matrix of a routed expert, bf16 [rows, columns]."""

    @property
    def new_size(self) -> int:
        return math.prod(self.entry["shape"])

    @property
    def entry(self) -> dict[str, Any]:
        rows, columns = self.shape
        return {"dtype": COMPRESSED_ROWS, "shape": [rows, row_bytes(COMPRESSED_DTYPE, columns)]}

    def read(self, offset: int, size: int) -> Bytes:
        bits = np.frombuffer(super().read(offset, size), dtype="<u2").reshape(-1, self.shape[1])
        try:
            compressed_rows = compressed_layout.compress(bits)
        except compressed_layout.Incompressible as error:
            raise CheckpointError(f"{self.file}: tensor {self.name}: {error}") from error
        # The original may be deleted after this, so every matrix is read back before it is written.
        if not np.array_equal(compressed_layout.decompress(compressed_rows, self.shape[1]), bits):
            raise AssertionError(f"tensor {self.name} would come back with other bits")
        return compressed_rows.data

    @property
    def _unit(self) -> int:
        return 2 * self.shape[1]


@dataclass(frozen=True)
class _Shard:
    name: str
    tensors: list[_Tensor]
    """The tensors in the order of the new file. Each begins at a multiple of the size of its numbers."""
    metadata: dict[str, str]

    @property
    def header(self) -> bytes:
        """The header of the new file, with its length in front."""
        entries: dict[str, Any] = {"__metadata__": self.metadata} if self.metadata else {}
        offset = 0
        for tensor in self.tensors:
            entries[tensor.name] = {**tensor.entry, "data_offsets": [offset, offset + tensor.new_size]}
            offset += tensor.new_size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNED)
        return len(text).to_bytes(8, "little") + text


def compress(path: Path, directory: Path, threads: int, progress: Progress) -> Sizes:
    """Writes the model in `path` to `directory`, which must not exist or must be empty.

    After an error nothing is in `directory`. Each matrix is decompressed again and compared. progress: called
    with bytes of `path` done, and total bytes. Raises CheckpointError for a model without routed experts, for
    one that is already compressed, and for a matrix that is not bf16 or cannot be compressed. Raises OSError
    if a file cannot be read or written.
    """
    config = read_json(path / "config.json")
    shards = _shards(path, _layout(path, config))
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    sizes = Sizes(
        bytes_before=sum(tensor.size for tensor in tensors),
        bytes_after=sum(tensor.new_size for tensor in tensors),
        matrices=sum(isinstance(tensor, _Matrix) for tensor in tensors),
    )
    # Renamed at the end: a directory with this name is complete, whatever ended this process.
    temporary = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    temporary.mkdir()
    try:
        bytes_done = 0
        for shard in shards:
            with (temporary / shard.name).open("wb") as file:
                file.write(shard.header)
                with closing(_in_order(shard.tensors, threads)) as pieces:
                    for size, data in pieces:
                        file.write(data)
                        bytes_done += size
                        progress(bytes_done, sizes.bytes_before)
        _write_beside(path, temporary, config, shards)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sizes


def _layout(path: Path, config: dict[str, Any]) -> ExpertLayout:
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD:
        raise CheckpointError(f"{path}: the experts of this model are compressed already")
    if is_quantised(config):
        raise CheckpointError(
            f"{path}: this model is quantised; allowed: experts in bf16. The compressed form takes 12 bits a "
            "number, more than quantised experts do, so they would only grow"
        )
    if not read_spec(path).moe_layers:
        raise CheckpointError(f"{path}: this model has no routed experts to compress")
    layout = expert_layout(path, REFERENCE)
    if layout.form != ROWS:
        raise CheckpointError(f"{path}: the experts of this model are stored in columns; allowed: in rows")
    return layout


def _shards(path: Path, layout: ExpertLayout) -> list[_Shard]:
    """Returns the files of a checkpoint. Their headers were checked when the layout was read."""
    files = [SINGLE]
    if (path / INDEX).is_file():
        files = sorted(
            {Path(name).name for name in read_json(path / INDEX, INDEX_BYTES)["weight_map"].values()}
        )
    shapes = {
        name: shape
        for layer in layout.layers
        for expert in range(layout.num_experts)
        for name, *shape in layout.tensors(layer, expert)
    }
    names = Headers(path).list_tensors().keys()
    parts = [(name, fused_tensors.find_fused_part(name, names.__contains__)) for name in shapes]
    fused_parts: dict[str, dict[str, fused_tensors.FusedPart]] = {}
    for name, part in parts:
        if part is not None:
            fused_parts.setdefault(part.tensor, {})[name] = part
    shards = [_shard(path / file, shapes, fused_parts) for file in files]
    for name in sorted(shapes.keys() - {tensor.name for shard in shards for tensor in shard.tensors}):
        raise CheckpointError(f"{path}: tensor {name} is missing")
    return shards


def _shard(
    file: Path, shapes: dict[str, list[int]], fused_parts: dict[str, dict[str, fused_tensors.FusedPart]]
) -> _Shard:
    """shapes: names of the experts' matrices -> their shapes. fused_parts: fused tensors -> matrices in
    them."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        entries = json.loads(stream.read(length))
    metadata = entries.pop("__metadata__", None) or {}
    tensors: list[_Tensor] = []
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if name in shapes and (dtype != "BF16" or shape != shapes[name]):
            got = f"got {dtype} {shape}; allowed: BF16 {shapes[name]}"
            raise CheckpointError(f"{file}: tensor {name}: {got}")
        if name in fused_parts:
            tensors += _matrices(
                _Tensor(name, file, 8 + length + begin, end - begin, dtype, shape), shapes, fused_parts[name]
            )
            continue
        kind = _Matrix if name in shapes else _Tensor
        tensors.append(kind(name, file, 8 + length + begin, end - begin, dtype, shape))
    # Matrices are bytes and go first. Then widths fall, so that each offset is a multiple of the next width.
    tensors.sort(key=lambda tensor: (not isinstance(tensor, _Matrix), -tensor.width))
    return _Shard(file.name, tensors, metadata)


def _matrices(
    fused_tensor: _Tensor, shapes: dict[str, list[int]], fused_parts: dict[str, fused_tensors.FusedPart]
) -> Iterator[_Matrix]:
    """The matrices of a fused tensor, as tensors of their own in the new file."""
    if fused_tensor.dtype != "BF16":
        raise CheckpointError(
            f"{fused_tensor.file}: tensor {fused_tensor.name}: got {fused_tensor.dtype}; allowed: BF16"
        )
    for name, part in fused_parts.items():
        rows, columns = shapes[name]
        begin = fused_tensor.begin + 2 * part.first(rows, columns)
        yield _Matrix(name, fused_tensor.file, begin, 2 * rows * columns, fused_tensor.dtype, [rows, columns])


def _in_order(tensors: Iterable[_Tensor], threads: int) -> Generator[tuple[int, Bytes]]:
    """Yields each piece's size in the old file and its bytes in the new file, in order.

    Threads prepare the next pieces meanwhile.
    """
    waiting: deque[tuple[int, Future[Bytes]]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for tensor in tensors:
            for offset, size in tensor.pieces():
                waiting.append((size, pool.submit(tensor.read, offset, size)))
                # Enough pieces to keep every thread busy, and few enough to bound the memory.
                if len(waiting) > 2 * threads:
                    read, future = waiting.popleft()
                    yield read, future.result()
        for read, future in waiting:
            yield read, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _write_beside(path: Path, directory: Path, config: dict[str, Any], shards: Sequence[_Shard]) -> None:
    """Writes the small files beside these shards."""
    kinds = [pattern for pattern in PATTERNS if not pattern.endswith(".safetensors")]
    for file in sorted({file for kind in kinds for file in path.glob(kind) if file.is_file()}):
        shutil.copyfile(file, directory / file.name)
    config = {
        **config,
        "quantization_config": {
            "quant_method": QUANT_METHOD,
            fingerprint.ORIGIN: fingerprint.compute_fingerprint(path),
        },
    }
    _write_json(directory / "config.json", config)
    if (path / INDEX).is_file():
        index = read_json(path / INDEX, INDEX_BYTES)
        total = sum(tensor.new_size for shard in shards for tensor in shard.tensors)
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": total}
        index["weight_map"] = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
        _write_json(directory / INDEX, index)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
