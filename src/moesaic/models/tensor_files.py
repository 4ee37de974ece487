"""The files with the tensors of a checkpoint, mapped: safetensors files, and GGUF files in the same terms."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from moesaic.core.errors import CheckpointError
from moesaic.models.config import shorten
from moesaic.models.files import INDEX, INDEX_BYTES, SINGLE, describe_missing_weights, read_json
from moesaic.models.gguf.header import Tensor, is_gguf
from moesaic.models.gguf.model import Model
from moesaic.models.pages import prefer_huge

_NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Slice(Protocol):
    """A tensor that is not read yet."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class TensorFile(Protocol):
    """A mapped file with tensors, in the terms of the safetensors library."""

    def keys(self) -> Iterable[str]: ...
    def get_slice(self, name: str) -> Slice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


def shards(path: Path) -> dict[str, Path]:
    """Returns tensor -> its file, for all tensors of the checkpoint at `path`."""
    if is_gguf(path):
        return {name: stored_tensor.file for name, stored_tensor in Model(path).tensors.items()}
    if (path / INDEX).is_file():
        table = read_json(path / INDEX, INDEX_BYTES).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise CheckpointError(f"{path / INDEX}: weight_map is missing or empty")
        for shard in {str(shard) for shard in table.values()}:
            if not shard.isprintable():
                raise CheckpointError(
                    f"{path / INDEX}: weight_map: got {shorten(shard)}; allowed: names of files"
                )
        if (path / SINGLE).is_file() and SINGLE not in map(str, table.values()):
            raise CheckpointError(
                f"{path}: holds {SINGLE} beside {INDEX} of other files; allowed: one of the two. Remove the "
                "one that is out of date"
            )
        # Only the last part of a path, so that an index cannot name a file outside of its directory.
        return {str(name): path / Path(str(shard)).name for name, shard in table.items()}
    if (path / SINGLE).is_file():
        return dict.fromkeys(_safetensors(path / SINGLE).keys(), path / SINGLE)
    problem = describe_missing_weights([file.name for file in path.glob("*")])
    raise CheckpointError(f"{path}: {problem or f'holds neither {SINGLE} nor {INDEX}'}")


def open_tensor_file(path: Path, file: Path, huge: bool) -> TensorFile:
    """Opens one file of the checkpoint at `path`.

    huge: ask for huge pages before any tensor is read.
    """
    if is_gguf(path):
        file_tensors = {
            name: stored_tensor.tensor
            for name, stored_tensor in Model(path).tensors.items()
            if stored_tensor.file == file
        }
        return GgufFile(file, file_tensors, huge)
    tensors: TensorFile = _safetensors(file)
    if huge:
        _prefer_huge_pages(tensors, file)
    return tensors


class GgufFile:
    """A GGUF file by the names of our tensors. Quantised tensors are uint8: their rows are bytes."""

    def __init__(self, file: Path, tensors: Mapping[str, Tensor], huge: bool) -> None:
        self._tensors = tensors
        try:
            with file.open("rb") as data:
                mapping = mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be mapped ({error})") from error
        self._bytes = _as_tensor(mapping)
        if any(tensor.offset + tensor.size > len(self._bytes) for tensor in tensors.values()):
            raise CheckpointError(f"{file}: truncated since its header was read")
        if huge:
            prefer_huge(self._bytes.data_ptr(), len(self._bytes))

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_slice(self, name: str) -> Slice:
        return _GgufSlice(self._tensors[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        data = self._bytes[tensor.offset : tensor.offset + tensor.size]
        if tensor.kind in _NUMBERS:
            return data.view(_NUMBERS[tensor.kind]).view(tensor.shape)
        return data.view(*tensor.shape[:-1], -1)


@dataclass(frozen=True)
class _GgufSlice:
    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return self.tensor.kind


def _as_tensor(mapping: mmap.mmap) -> torch.Tensor:
    """The bytes of a mapped file, which nobody may write to. torch has no tensors that say so."""
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    array = (ctypes.c_uint8 * len(mapping)).from_address(address)
    array.__dict__["mapped"] = mapping  # stays mapped as long as a tensor uses it
    return torch.frombuffer(array, dtype=torch.uint8)


def _prefer_huge_pages(tensors: Any, file: Path) -> None:
    """Asks for huge pages, before any tensor is read."""
    # The library does not tell where its mapping begins. Tensors follow the header, so the first one is near.
    names = tensors.offset_keys()
    if names:
        with file.open("rb") as header:
            size = file.stat().st_size - 8 - int.from_bytes(header.read(8), "little")
        prefer_huge(tensors.get_tensor(names[0]).data_ptr(), size)


def _safetensors(file: Path) -> Any:
    if not file.is_file():
        raise CheckpointError(f"{file}: this shard is missing")
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or corrupt safetensors file ({error})") from error
    except RuntimeError as error:  # torch maps the file so that it counts as memory
        problem = "larger than this machine can map; allowed: a checkpoint in several files"
        raise CheckpointError(f"{file}: {problem} ({error})") from error
