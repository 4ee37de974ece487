"""The output file: a journal that is complete up to its last line at every moment.

A line is appended with one write. If the write fails half way, the partial line is cut off at once; if the
process dies half way, the next run cuts it off. A line reaches the page cache at once, so it survives the
death of the process. It reaches the disk every few seconds, which is what a power failure can lose.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moesaic.core.errors import ConfigError, MoesaicError
from moesaic.jobs.batch.lines import ID_PREFIX, Key

SYNC_SECONDS = 5.0

_FLAG = "--output-file"
_START = b'{"id": "' + ID_PREFIX.encode()
"""The beginning of every line. A partial line is deleted only if it begins like this."""


class OutputError(MoesaicError):
    """Results can no longer be written. Those written so far are complete."""


@dataclass
class ExistingResults:
    """The results that an output file holds already."""

    keys: set[Key] = field(default_factory=set)
    num_failed: int = 0
    """Number of results that are errors."""
    models: set[str] = field(default_factory=set)
    """Models that answered."""


class Output:
    """The file at `path`, opened and locked until the end of the `with` block. clock: seconds, for the
    syncs.

    Raises ConfigError if it is not a regular file, if another process writes it, or if it cannot be opened.
    """

    def __init__(self, path: Path, clock: Callable[[], float], sync_seconds: float = SYNC_SECONDS) -> None:
        self.path = path
        self._clock = clock
        self._sync_seconds = sync_seconds
        self._fd = _open_locked(path)
        self._size = os.fstat(self._fd).st_size
        self._sync_time = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        try:
            if kind is None:
                self.sync()
        finally:
            os.close(self._fd)

    def recover(self) -> ExistingResults:
        """Read the existing results and cut off a partial last line. Raises ConfigError for another kind of
        file."""
        results = ExistingResults()
        num_bytes = 0
        for number, raw in enumerate(self._read(), start=1):
            if not raw.endswith(b"\n"):
                self._cut_torn(number, raw, num_bytes)
                break
            num_bytes += len(raw)
            _take(results, raw, f"{_FLAG}: {self.path} line {number}")
        self._size = num_bytes
        return results

    def append(self, line: bytes) -> None:
        """Write one line, completely or not at all. Raises OutputError if the disk is full or fails."""
        try:
            self._write(line)
        except OSError as error:
            self._cut_back()
            raise self._make_error(error) from error
        self._size += len(line)
        if self._clock() - self._sync_time >= self._sync_seconds:
            self.sync()

    def sync(self) -> None:
        """Write everything to the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._make_error(error) from error
        self._sync_time = self._clock()

    def _write(self, line: bytes) -> None:
        """Write the whole line. A full disk accepts a part first and reports the error at the next write."""
        remaining = memoryview(line)
        while remaining:
            remaining = remaining[os.write(self._fd, remaining) :]

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            pass  # the disk fails; the next run cuts the partial line off

    def _read(self) -> Iterator[bytes]:
        os.lseek(self._fd, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self._fd), "rb") as file:
            yield from file

    def _cut_torn(self, number: int, raw: bytes, num_bytes: int) -> None:
        is_result = _START.startswith(raw[: len(_START)]) or not raw.strip(b"\0")
        if not is_result:
            raise ConfigError(f"{_FLAG}: {self.path} line {number} is no result of run-batch")
        os.ftruncate(self._fd, num_bytes)

    def _make_error(self, error: OSError) -> OutputError:
        advice = "run the same command again to continue"
        return OutputError(f"{_FLAG}: {self.path}: {error.strerror}; {advice}")


def read_answered_keys(path: Path) -> set[Key]:
    """The lines that an output file has results of, without changing the file. Other content is ignored."""
    try:
        raw = path.read_bytes() if path.is_file() else b""
    except OSError:
        return set()
    results = (_parse(line) for line in raw.splitlines())
    return {key for key in map(_key, filter(None, results)) if key is not None}


def _open_locked(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"{_FLAG}: {path}: {error.strerror}") from error
    try:
        _lock(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(fd: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise ConfigError.field(_FLAG, str(path), "a regular file")
    try:
        # The kernel releases this lock when the process ends, however it ends.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sync_directory(path.parent)
    except BlockingIOError as error:
        raise ConfigError(f"{_FLAG}: {path}: another run-batch is writing it") from error
    except OSError as error:
        raise ConfigError(f"{_FLAG}: {path}: {error.strerror}") from error


def _sync_directory(path: Path) -> None:
    """Make the name of a new file as durable as its content."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _take(results: ExistingResults, raw: bytes, place: str) -> None:
    """Count one complete line of an earlier run."""
    result = _parse(raw)
    key = None if result is None else _key(result)
    if result is None or key is None:
        raise ConfigError(f"{place} is no result of run-batch")
    if key in results.keys:
        raise ConfigError(f"{place} is a second result of {key!r}")
    results.keys.add(key)
    results.num_failed += result.get("error") is not None
    match result:
        case {"response": {"body": {"model": str(model)}}}:
            results.models.add(model)


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) and str(value.get("id")).startswith(ID_PREFIX) else None


def _key(result: dict[str, Any]) -> Key | None:
    custom_id, error = result.get("custom_id"), result.get("error")
    if isinstance(custom_id, str):
        return custom_id
    line = error.get("line") if isinstance(error, dict) else None
    return line if isinstance(line, int) else None
