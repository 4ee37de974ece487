"""The output file: a journal that is whole up to its last line at every moment.

A line is appended with one write. If that fails half way the piece is cut off again; if the process
dies half way the next one cuts it off. Lines reach the page cache at once, so that they survive the
death of the process, and the disk every few seconds, which is what a power cut can cost.
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

from moesaic.batch.lines import ID_PREFIX, Key
from moesaic.core.errors import ConfigError, MoesaicError

SYNC_SECONDS = 5.0

_FLAG = "--output-file"
_START = b'{"id": "' + ID_PREFIX.encode()
"""How every line begins: what is torn off is deleted only if it looks like ours."""


class OutputError(MoesaicError):
    """Results cannot be written any more; those written so far are whole."""


@dataclass
class Done:
    """What an output file already holds."""

    keys: set[Key] = field(default_factory=set)
    failed: int = 0
    """How many of them are errors."""
    models: set[str] = field(default_factory=set)
    """Who answered."""


class Output:
    """`path`, opened and locked until the end of the `with` block. clock: seconds, for the syncs.

    Raises ConfigError when it is no regular file, when another process writes it, or when it cannot
    be opened.
    """

    def __init__(self, path: Path, clock: Callable[[], float], sync_seconds: float = SYNC_SECONDS) -> None:
        self.path = path
        self._clock = clock
        self._sync_seconds = sync_seconds
        self._fd = _open_locked(path)
        self._size = os.fstat(self._fd).st_size
        self._synced = clock()

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

    def recover(self) -> Done:
        """Read what is there and cut off a torn last line. ConfigError when it is not ours."""
        done = Done()
        whole = 0
        for number, raw in enumerate(self._read(), start=1):
            if not raw.endswith(b"\n"):
                self._cut_torn(number, raw, whole)
                break
            whole += len(raw)
            _take(done, raw, f"{_FLAG}: {self.path} line {number}")
        self._size = whole
        return done

    def append(self, line: bytes) -> None:
        """Write one line, whole or not at all. OutputError when the disk is full or broken."""
        try:
            self._write(line)
        except OSError as error:
            self._cut_back()
            raise self._failed(error) from error
        self._size += len(line)
        if self._clock() - self._synced >= self._sync_seconds:
            self.sync()

    def sync(self) -> None:
        """Onto the disk itself."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed(error) from error
        self._synced = self._clock()

    def _write(self, line: bytes) -> None:
        """All of it; a full disk takes a piece first and says so at the next one."""
        left = memoryview(line)
        while left:
            left = left[os.write(self._fd, left) :]

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            pass  # the disk is broken; the next run cuts the piece off

    def _read(self) -> Iterator[bytes]:
        os.lseek(self._fd, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self._fd), "rb") as file:
            yield from file

    def _cut_torn(self, number: int, raw: bytes, whole: int) -> None:
        ours = _START.startswith(raw[: len(_START)]) or not raw.strip(b"\0")
        if not ours:
            raise ConfigError(f"{_FLAG}: {self.path} line {number} is no result of run-batch")
        os.ftruncate(self._fd, whole)

    def _failed(self, error: OSError) -> OutputError:
        return OutputError(f"{_FLAG}: {self.path}: {error.strerror}; the same command goes on from here")


def answered(path: Path) -> set[Key]:
    """The lines that an output file has results of, whatever else is in it: a glance that changes nothing."""
    try:
        raw = path.read_bytes() if path.is_file() else b""
    except OSError:
        return set()
    results = (_parsed(line) for line in raw.splitlines())
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
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sync_directory(path.parent)
    except BlockingIOError as error:
        raise ConfigError(f"{_FLAG}: {path}: another run-batch is writing it") from error
    except OSError as error:
        raise ConfigError(f"{_FLAG}: {path}: {error.strerror}") from error


def _sync_directory(path: Path) -> None:
    """Make a new file's name as lasting as its content."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _take(done: Done, raw: bytes, place: str) -> None:
    """One whole line of an earlier run."""
    result = _parsed(raw)
    key = None if result is None else _key(result)
    if result is None or key is None:
        raise ConfigError(f"{place} is no result of run-batch")
    if key in done.keys:
        raise ConfigError(f"{place} is a second result of {key!r}")
    done.keys.add(key)
    done.failed += result.get("error") is not None
    match result:
        case {"response": {"body": {"model": str(model)}}}:
            done.models.add(model)


def _parsed(raw: bytes) -> dict[str, Any] | None:
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
