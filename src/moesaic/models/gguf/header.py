"""Reads the headers of GGUF files: metadata, and where each tensor is. Every length is checked.

A file is the word GGUF, a version, the numbers of tensors and of metadata, then both, then the tensors at
multiples of `general.alignment` (ggml, docs/gguf.md). A model may be split over several files, whose names
end in -00001-of-00003.gguf. The first one has the metadata of the model.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.core.errors import CheckpointError
from moesaic.models.config import shorten
from moesaic.models.gguf.blocks import ALLOWED, NAMES, row_bytes

SUFFIX = ".gguf"
VERSIONS = (2, 3)
"""Versions of the format that are read."""
MOST_AXES = 4
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a type of metadata -> its letter in `struct`."""
_TEXT, _ARRAY = 8, 9
_DAMAGED = "truncated or corrupt"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file."""

    kind: str
    """The type of the tensor: one of blocks.ALLOWED."""
    shape: tuple[int, ...]
    """The last axis is a row."""
    offset: int
    """Offset of the tensor's first byte in the file."""
    size: int
    """Size of the tensor in bytes."""


@dataclass(frozen=True, slots=True)
class Texts:
    """A list of texts in the metadata, such as a vocabulary. It is read only where it is needed."""

    begin: int
    """Offset of the first text in the file."""
    end: int
    count: int


@dataclass(frozen=True)
class Header:
    """The header of one file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """The tensors by their names in the file."""


def is_gguf(path: Path) -> bool:
    """Whether a model at `path` is a GGUF file, by its name. A directory is none."""
    return path.suffix == SUFFIX and not path.is_dir()


def files(path: Path) -> list[Path]:
    """The files of the model whose first file is `path`. Raises CheckpointError if some are missing."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    name, number, count = match.groups()
    if int(number) != 1:
        raise CheckpointError(
            f"{path}: got part {int(number)}; allowed: the first, {name}-00001-of-{count}{SUFFIX}"
        )
    paths = [
        path.with_name(f"{name}-{path_number:05}-of-{count}{SUFFIX}")
        for path_number in range(1, int(count) + 1)
    ]
    missing = next((path_number for path_number in paths if not path_number.is_file()), None)
    if missing is not None:
        raise CheckpointError(
            f"{missing}: this file is missing, one of {int(count)} that the model is split over"
        )
    return paths


def read(file: Path) -> Header:
    """Reads the header of one file. Raises CheckpointError in one line for a file that is damaged."""
    try:
        status = file.stat()
        return _read(file, status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error


def read_texts(file: Path, texts: Texts) -> list[str]:
    """Reads a list of texts. Raises CheckpointError for one that is not UTF-8."""
    data, strings, offset = _bytes(file, texts.begin, texts.end), [], 0
    try:
        for _ in range(texts.count):
            size = int.from_bytes(data[offset : offset + 8], "little")
            strings.append(data[offset + 8 : offset + 8 + size].decode())
            offset += 8 + size
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: {_DAMAGED}: a text that is not UTF-8 in a list of texts") from error
    return strings


def _bytes(file: Path, begin: int, end: int) -> bytes:
    try:
        with file.open("rb") as stream:
            stream.seek(begin)
            data = stream.read(end - begin)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    if len(data) < end - begin:
        raise CheckpointError(f"{file}: truncated since its header was read")
    return data


def length(beginning: bytes, size: int) -> int:
    """How many bytes the header of a file takes, whose first bytes are `beginning`. size: of the whole file.

    If the header is longer than `beginning`, the answer is the least that it can take, and more than
    `beginning` has. Raises ValueError for a file that is damaged, as `read` does.
    """
    cursor = _Cursor(beginning, size)
    try:
        _header(cursor)
    except _Longer as error:
        return error.least
    return cursor.offset


# The stamp is a part of the cache's key, so that a file that was written again is read again.
@lru_cache(maxsize=64)
def _read(file: Path, *_stamp: int) -> Header:
    with file.open("rb") as stream:
        if not file.stat().st_size:
            raise CheckpointError(f"{file}: not a GGUF file (it is empty)")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            try:
                return _header(_Cursor(mapping, len(mapping)))
            except (struct.error, ValueError) as error:
                raise CheckpointError(f"{file}: {error}") from error


class _Longer(Exception):
    """The header does not end in the bytes that are here. least: how many bytes of the file it takes."""

    def __init__(self, least: int) -> None:
        self.least = least


class _Cursor:
    """Reads a file from its beginning. Raises ValueError at the file's end, and _Longer at that of `data`."""

    def __init__(self, data: mmap.mmap | bytes, size: int) -> None:
        """data: the file, or its beginning. size: bytes of the whole file."""
        self.data = data
        self.size = size
        self.offset = 0

    def take(self, size: int) -> bytes:
        if size > self.size - self.offset:
            raise ValueError(f"{_DAMAGED}: {size} bytes at {self.offset} of {self.size}")
        if size > len(self.data) - self.offset:
            raise _Longer(self.offset + size)
        data = self.data[self.offset : self.offset + size]
        self.offset += size
        return data

    def number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0]

    def text(self) -> str:
        data = self.take(self.number("Q"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{_DAMAGED}: a text that is not UTF-8 before byte {self.offset}") from error

    def texts(self, count: int) -> Texts:
        """Skips that many texts."""
        begin, offset, available = self.offset, self.offset, len(self.data)
        # A text takes eight bytes or more. A damaged file may name any count, over which nothing should loop.
        if 8 * count > self.size - begin:
            raise ValueError(f"{_DAMAGED}: a list of {count} texts at byte {begin} of {self.size}")
        for _ in range(count):
            end = offset + 8
            if end <= available:
                end += int.from_bytes(self.data[offset:end], "little")
            if end > self.size:
                raise ValueError(f"{_DAMAGED}: a list of {count} texts at byte {begin} of {self.size}")
            if end > available:
                raise _Longer(end)
            offset = end
        self.offset = offset
        return Texts(begin, offset, count)

    def value(self, kind: int) -> Any:
        """A value of metadata: a number, a text, a list of numbers, or where a list of texts is."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"{_DAMAGED}: metadata of type {kind} at byte {self.offset}")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            letter = _SCALARS[inner]
            return np.frombuffer(self.take(count * struct.calcsize(f"<{letter}")), f"<{letter}").tolist()
        if inner != _TEXT:
            raise ValueError(f"{_DAMAGED}: a list of type {inner} at byte {self.offset}")
        return self.texts(count)


def _header(cursor: _Cursor) -> Header:
    if cursor.data[:8] == b"version ":
        raise ValueError("this is a Git LFS pointer, not the file itself: run git lfs pull there")
    if cursor.data[:4] != b"GGUF":
        raise ValueError(f"not a GGUF file (it begins with {cursor.data[:4]!r})")
    cursor.offset = 4
    version = cursor.number("I")
    if version not in VERSIONS:
        is_big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        got = "big-endian numbers" if is_big_endian else f"GGUF version {version}"
        raise ValueError(f"got {got}; allowed: version {', '.join(map(str, VERSIONS))}, little-endian")
    tensors, count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    # Lengths come from the file. Each is checked against the file's size before anything of it is read.
    for _ in range(count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    entries = [_entry(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise ValueError(f"general.alignment: got {shorten(repr(alignment))}; allowed: a multiple of 8")
    begin = -(-cursor.offset // alignment) * alignment
    tensors_by_name: dict[str, Tensor] = {}
    for name, kind, shape, offset in entries:
        if name in tensors_by_name:
            raise ValueError(f"{_DAMAGED}: two tensors {shorten(name)}")
        tensors_by_name[name] = _build_tensor(name, kind, shape, begin + offset, cursor.size, alignment)
    return Header(metadata, tensors_by_name)


def _entry(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Name, type, shape and offset of a tensor."""
    name, axes = cursor.text(), cursor.number("I")
    if not 1 <= axes <= MOST_AXES:
        raise ValueError(f"{_DAMAGED}: tensor {shorten(name)} has {axes} axes; allowed: 1 to {MOST_AXES}")
    shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]
    kind, offset = cursor.number("I"), cursor.number("Q")
    return name, kind, shape, offset


def _build_tensor(
    name: str, number: int, shape: tuple[int, ...], offset: int, end: int, alignment: int
) -> Tensor:
    kind = NAMES.get(number, f"number {number}")
    if kind not in ALLOWED:
        raise ValueError(f"tensor {shorten(name)}: got type {kind}; allowed: {', '.join(ALLOWED)}")
    try:
        size = row_bytes(kind, shape[-1]) * math.prod(shape[:-1])
    except ValueError as error:
        raise ValueError(f"tensor {shorten(name)}: got {error}") from error
    if offset % alignment or offset + size > end:
        raise ValueError(f"{_DAMAGED}: tensor {shorten(name)} has {size} bytes at {offset} of {end}")
    return Tensor(kind, shape, offset, size)
