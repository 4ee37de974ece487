"""The directory of the new checkpoint. It can be continued after its writer was killed.

While it is written it has no config.json, so that no program takes it for a checkpoint. A file appears under
its name when it is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from moesaic.core.errors import ConfigError
from moesaic.jobs.quantizing.formats import Tensor
from moesaic.models.files import INDEX, read_json
from moesaic.models.hub import PATTERNS

RECORD = "quantize.json"
"""How the checkpoint was made. A directory with this file is one of ours."""
WORK = "quantize.work"
"""Folder of what is needed to continue."""
CONFIG = "config.json"
ALIGNMENT = 64
"""Tensors begin at a multiple of this many bytes in their file."""
Settings = Mapping[str, Any]


class ShardFile:
    """A safetensors file that is being written. Its tensors may come in any order."""

    def __init__(self, file: IO[bytes], tensors: Sequence[Tensor]) -> None:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in tensors:
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": [offset, offset + tensor.size],
            }
            offset += tensor.size
        header = json.dumps(entries, separators=(",", ":")).encode()
        # Eight bytes with the header's length come before the header.
        header += b" " * (-(8 + len(header)) % ALIGNMENT)
        file.write(len(header).to_bytes(8, "little") + header)
        self._file, self._begin = file, file.tell()
        self._left = {
            tensor.name: (entries[tensor.name]["data_offsets"][0], tensor.size) for tensor in tensors
        }
        file.truncate(self._begin + offset)

    def put(self, name: str, data: bytes) -> None:
        """Write a whole tensor."""
        offset, size = self._left.pop(name)
        assert len(data) == size, name
        self._write(offset, data)

    def copy(self, name: str, file: Path, begin: int, piece: int = 1 << 22) -> Generator[int]:
        """Copy a tensor from another file, where it begins at `begin`. Yields bytes copied."""
        offset, left = self._left.pop(name)
        with file.open("rb") as source:
            source.seek(begin)
            while left:
                data = source.read(min(left, piece))
                if not data:
                    raise ConfigError(f"{file}: tensor {name}: the file ends within it")
                self._write(offset, data)
                offset, left = offset + len(data), left - len(data)
                yield len(data)

    def check_complete(self) -> None:
        """That every tensor was written."""
        assert not self._left, f"not written: {sorted(self._left)[:3]}"

    def _write(self, offset: int, data: bytes) -> None:
        self._file.seek(self._begin + offset)
        self._file.write(data)


class Directory:
    """A directory that one process writes, as a context."""

    def __init__(self, path: Path, settings: Settings) -> None:
        """settings: what decides about the bytes of the result, as JSON.

        Raises ConfigError for a directory that is not empty, unless it was begun with the same settings.
        """
        self.path = path
        self._settings = json.loads(json.dumps(settings))
        self._record = path / RECORD
        self._lock = -1
        if self._record.is_file():
            self._check(read_json(self._record).get("settings"))
        elif path.exists() and not (path.is_dir() and _is_empty(path)):
            allowed_values = "a directory that does not exist yet, is empty, or was begun by the same command"
            raise ConfigError.field("DIRECTORY", str(path), allowed_values)

    def __enter__(self) -> Directory:
        """Raises ConfigError if another process writes here now."""
        self.path.mkdir(exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            # The kernel releases this lock when the process ends, however it ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._record.is_file():
                self.note({})
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise ConfigError(f"DIRECTORY: {self.path}: another process is writing it") from None
            raise
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._lock)

    @property
    def is_finished(self) -> bool:
        """Whether the checkpoint is complete."""
        return (self.path / CONFIG).is_file()

    @property
    def work(self) -> Path:
        """The folder of what is needed to continue."""
        folder = self.path / WORK
        folder.mkdir(exist_ok=True)
        return folder

    def has_file(self, shard: str) -> bool:
        """Whether a file is complete."""
        return (self.path / shard).is_file()

    @contextmanager
    def writing(self, shard: str, tensors: Sequence[Tensor]) -> Generator[ShardFile]:
        """A context in which a file is written. It gets its name at the end."""
        temporary = self.work / shard
        with temporary.open("wb") as raw_file:
            file = ShardFile(raw_file, tensors)
            yield file
            file.check_complete()
            _flush(raw_file)
        temporary.rename(self.path / shard)

    def finish(self, source: Path, config: Mapping[str, Any], shards: Mapping[str, Sequence[Tensor]]) -> None:
        """Write the small files. The last one is config.json, which makes the directory a checkpoint.

        source: the checkpoint that it was made from. shards: file -> its tensors.
        """
        kinds = [pattern for pattern in PATTERNS if not pattern.endswith(".safetensors")]
        own_files = (CONFIG, INDEX, RECORD)
        for file in sorted({file for kind in kinds for file in source.glob(kind) if file.is_file()}):
            if file.name not in own_files:
                shutil.copyfile(file, self.path / file.name)
        total = sum(tensor.size for tensors in shards.values() for tensor in tensors)
        names = {tensor.name: shard for shard, tensors in shards.items() for tensor in tensors}
        self._write(INDEX, {"metadata": {"total_size": total}, "weight_map": names})
        self._write(CONFIG, config)
        self.clear()

    def clear(self) -> None:
        """Remove what was needed to continue."""
        shutil.rmtree(self.path / WORK, ignore_errors=True)

    def note(self, findings: Mapping[str, Any]) -> None:
        """Write the record anew: the settings, and what was found out."""
        self._write(RECORD, {"settings": self._settings, **findings})

    def read_note(self, name: str, default: Any) -> Any:
        """What the record has under a name."""
        return read_json(self._record).get(name, default)

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        temporary = self.path / f"{name}.new"
        with temporary.open("wb") as file:
            file.write((json.dumps(value, indent=2) + "\n").encode())
            _flush(file)
        temporary.rename(self.path / name)

    def _check(self, recorded_settings: Any) -> None:
        """Raises ConfigError naming the first setting that differs."""
        recorded_settings = recorded_settings if isinstance(recorded_settings, dict) else {}
        for name, value in self._settings.items():
            if recorded_settings.get(name) != value:
                now = f"{recorded_settings.get(name)!r}, now {value!r}"
                allowed_values = "the same settings, or another directory"
                raise ConfigError(
                    f"DIRECTORY: {self.path} was begun with {name} {now}; allowed: {allowed_values}"
                )


def _is_empty(path: Path) -> bool:
    """Whether nothing is in a directory, except for what a process left that was killed at its start."""
    return all(file.name == f"{RECORD}.new" for file in path.iterdir())


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
