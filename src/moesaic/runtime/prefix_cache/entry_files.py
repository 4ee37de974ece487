"""The files of stored blocks: one file each, in a directory that several processes may share.

A file appears under its name when it is whole, since it is written under another name and then renamed. It
begins with its own name and a checksum. So what is half written, damaged or of another content is never read
as an entry. A file is not written again, and only the owner can read it.

Question: What do the files of `--prefix-cache-dir` contain, and how are they written?
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import struct
import time
import zlib
from pathlib import Path

from moesaic.core.errors import ConfigError
from moesaic.models.kvcache.images import Bytes
from moesaic.policy.scheduling.stored_prefixes import StoredEntry, choose_expired

LOG = logging.getLogger(__name__)
FOLDER = "moesaic-kv"
"""Name of the folder inside of the given directory."""
HEADER = struct.Struct("<8s32sQI")
"""mark of the format, name, bytes of the content, CRC-32 of all of these and of the content"""
MARK = b"moeskv01"
SCAN_SHARE = 64
"""The directory is looked through after one part in so many of the limit was written."""
WRITERS = 4
"""So many processes may write as much meanwhile, or all ranks of a group. All of it fits into the limit."""
ABANDONED_SECONDS = 60.0
"""A temporary file of this age belongs to a process that was killed."""
_NAME = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.\d+")


class EntryFiles:
    """The entries of a directory, by digest. One thread writes; the other methods are for any thread."""

    def __init__(self, directory: str, limit: int, ranks: int = 1) -> None:
        """limit: maximum bytes of all files together. ranks: processes of this worker, which all write.

        Raises ConfigError if the directory cannot be used.
        """
        self._folder, self._limit = _make_folder(directory), limit
        self._num_writers = max(WRITERS, ranks)
        self._until_scan = 0
        """Bytes that may be written before the directory is looked through."""
        self._temporary_suffix = f".{int.from_bytes(os.urandom(8))}"

    def contains(self, digest: bytes) -> bool:
        """Whether there is a file of this name. It may be damaged."""
        return self._path(digest).exists()

    def has_file(self, digest: bytes, content: Bytes) -> bool:
        """Whether there is an ordinary file of this name, as long as one with this content."""
        try:
            state = self._path(digest).lstat()
        except OSError:
            return False
        return stat.S_ISREG(state.st_mode) and state.st_size == HEADER.size + len(content)

    def read(self, digest: bytes, content: Bytes) -> bool | None:
        """Read an entry into `content`, [bytes of a block].

        Returns False if there is no such entry, and None if there was a damaged one. It is removed.
        Raises OSError where the disk fails.
        """
        path, header = self._path(digest), bytearray(HEADER.size)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            return False
        try:
            num_bytes = HEADER.size + len(content)
            fits = _is_file(descriptor, num_bytes) and _read_all(descriptor, [header, content.data])
        finally:
            os.close(descriptor)
        if fits and bytes(header) == _header(digest, content):
            return True
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def write(self, digest: bytes, content: Bytes) -> list[bytes]:
        """Write an entry, after others were removed to keep the limit. Returns the digests of those.

        Raises OSError where the disk is full or fails. Then nothing is left of the entry.
        """
        num_bytes = HEADER.size + len(content)
        if num_bytes > self._limit:
            return []
        old_digests = self._make_room(num_bytes) if self._until_scan < num_bytes else []
        path = self._path(digest)
        temporary = path.with_name(f".{path.name}{self._temporary_suffix}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o600)
            try:
                _write_all(descriptor, [memoryview(_header(digest, content)), content.data])
            finally:
                os.close(descriptor)
            temporary.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._until_scan -= num_bytes
        return old_digests

    def touch(self, digests: list[bytes]) -> None:
        """Record that the first blocks of a sequence are used now. The last one gives way first."""
        now = time.time_ns()
        for depth, digest in enumerate(digests):
            last_use = now - 1000 * depth
            with contextlib.suppress(OSError):
                os.utime(self._path(digest), ns=(last_use, last_use), follow_symlinks=False)

    def _path(self, digest: bytes) -> Path:
        return self._folder / digest.hex()

    def _make_room(self, num_bytes: int) -> list[bytes]:
        """Remove what is needed to write so many bytes. Returns the digests of what was removed."""
        old_digests = []
        share = self._limit // SCAN_SHARE
        for entry in choose_expired(self._scan(), self._limit, max(num_bytes, self._num_writers * share)):
            with contextlib.suppress(OSError):
                (self._folder / entry.name).unlink()
            old_digests.append(bytes.fromhex(entry.name))
        self._until_scan = max(num_bytes, share)
        return old_digests

    def _scan(self) -> list[StoredEntry]:
        """All entries. Temporary files of killed processes are removed."""
        entries, oldest = [], time.time() - ABANDONED_SECONDS
        for item in os.scandir(self._folder):
            with contextlib.suppress(OSError):
                state = item.stat(follow_symlinks=False)
                if _NAME.fullmatch(item.name):
                    entries.append(StoredEntry(state.st_mtime_ns, state.st_size, item.name))
                elif _TEMPORARY.fullmatch(item.name) and state.st_mtime < oldest:
                    Path(item.path).unlink()
        return entries


def _make_folder(directory: str) -> Path:
    """The folder of the entries, which only its owner can read. Raises ConfigError in one line."""
    folder = Path(directory).expanduser() / FOLDER
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError as error:
        problem = f"a directory that can be written ({error.strerror}: {error.filename})"
        raise ConfigError.field("--prefix-cache-dir", directory, problem) from error
    is_private = state.st_uid == os.geteuid() and not stat.S_IMODE(state.st_mode) & 0o077
    if not stat.S_ISDIR(state.st_mode) or not is_private:
        problem = f"a directory whose {FOLDER} is this user's, with mode 700, since it holds prompts"
        raise ConfigError.field("--prefix-cache-dir", directory, problem)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError.field("--prefix-cache-dir", directory, "a directory that can be written")
    return folder


def _header(digest: bytes, content: Bytes) -> bytes:
    head = HEADER.pack(MARK, digest, len(content), 0)
    return HEADER.pack(MARK, digest, len(content), zlib.crc32(content.data, zlib.crc32(head)))


def _is_file(descriptor: int, num_bytes: int) -> bool:
    """Whether this is an ordinary file of so many bytes."""
    state = os.fstat(descriptor)
    return stat.S_ISREG(state.st_mode) and state.st_size == num_bytes


def _read_all(descriptor: int, buffers: list[bytearray | memoryview]) -> bool:
    """Fill the buffers. Returns False where the file ends before."""
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            num_read = os.readv(descriptor, [view])
            if not num_read:
                return False
            view = view[num_read:]
    return True


def _write_all(descriptor: int, buffers: list[memoryview]) -> None:
    for buffer in buffers:
        view = buffer
        while view:
            view = view[os.write(descriptor, view) :]
