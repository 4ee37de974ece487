"""Tells one checkpoint from another, from its files alone and without torch.

The fingerprint has three parts: `config.json`, the tensors' names, types and shapes, and samples of their
bytes. Every tensor is sampled, and all samples together have at most 64 MiB. So a checkpoint of up to that
size is read completely, and a change of a few numbers in a larger one can be missed. `ExpertDigests` misses
nothing: it reads every byte of an expert.

Both are kept in the user's cache folder under the device, inode, size and times of the file that was read. A
file that is written again has other times, so it is read again. No program can set one of them: that of the
last change of the inode.

Question: How is one checkpoint told from another?
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from moesaic.config.environment import cache_folder
from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.models.files import read_config
from moesaic.models.gguf.header import is_gguf
from moesaic.models.headers import INDEX, Headers, Place

SAMPLED = 64 << 20
"""Maximum bytes of all samples."""
PARTS = ("config.json", "names, types or shapes of tensors", "bytes of tensors")
"""What the parts of a fingerprint stand for."""
NOT_COMPARED = ("_name_or_path", "transformers_version")
"""Keys of config.json that change nothing."""
ORIGIN = "compressed_from"
"""Key in `quantization_config` of a compressed checkpoint: the fingerprint of the one it was made from."""
PIECE = 1 << 20
"""Bytes that are read at once."""
KEPT = 16 << 20
"""Only what needs more bytes than this to be read is kept in the cache folder."""
_FINGERPRINT = re.compile(r"[0-9a-f]{16}(\.[0-9a-f]{16}){2}")


def compute_fingerprint(path: Path) -> str:
    """The fingerprint of the checkpoint in a directory: three words, one for each of PARTS.

    Raises CheckpointError for files that are missing or damaged.
    """
    return _compute(path, stamp(path), _state(path))


def difference(first: str, second: str) -> str:
    """Which parts of two fingerprints differ, in words for people. Empty if none does."""
    pairs = zip(PARTS, first.split("."), second.split("."), strict=True)
    return ", ".join(part for part, first_word, second_word in pairs if first_word != second_word)


def origin(path: Path) -> str:
    """The fingerprint that placements and profiles know the checkpoint by.

    A compressed checkpoint computes the same bits as the one that it was made from, so it has that one's.
    """
    quantization = read_config(path).get("quantization_config")
    fingerprint = quantization.get(ORIGIN) if isinstance(quantization, dict) else None
    return fingerprint if isinstance(fingerprint, str) else compute_fingerprint(path)


def stamp(path: Path) -> str:
    """A word that changes when a file of the checkpoint is replaced or written again.

    It reads no file, so it only means something on one machine. Raises CheckpointError if a file is missing.
    """
    return _hash(f"{file.name} {_identity(_stat(file))}" for file in list_files(path))


def list_versions(path: Path) -> list[str]:
    """Name, size and time of the last change of each file, in its order. They survive a copy that keeps
    times. Raises CheckpointError if a file is missing."""
    states = [(file.name, _stat(file)) for file in list_files(path)]
    return [f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in states]


def check_unchanged(path: Path, expected_stamp: str) -> None:
    """Raise CheckpointError if the files no longer have this stamp."""
    if stamp(path) != expected_stamp:
        raise _change_error(path)


@contextlib.contextmanager
def guard_unchanged(path: Path, expected_stamp: str) -> Iterator[None]:
    """A context in which files are loaded, which must have this stamp before and after it."""
    check_unchanged(path, expected_stamp)
    yield
    check_unchanged(path, expected_stamp)


class ExpertDigests:
    """The digests of a checkpoint's routed experts: SHA-256 of the types, shapes and bytes of the matrices.

    They are those of the files that were there when this object was created. Raises CheckpointError where a
    matrix cannot be read, or must be read from a file that has changed since then.
    """

    def __init__(self, path: Path, layout: ExpertLayout) -> None:
        self._headers = Headers(path)
        self._layout = layout
        self._file_stats = {file: _stat(file) for file in self._headers.files}
        self._digests: dict[Path, dict[str, str]] = {}
        """File -> tensor -> digest."""
        self._new: set[Path] = set()

    def digest_of(self, layer: int, expert: int) -> str:
        """The digest of one expert, as 64 hexadecimal digits."""
        places = [
            found
            for name, *shape in self._layout.tensors(layer, expert)
            for found in self._headers.places(name, *shape).items()
        ]
        return _hash(f"{place.dtype} {place.shape} {self._tensor(name, place)}" for name, place in places)

    def save(self) -> None:
        """Keep the digests that were computed since the last call in the cache folder."""
        for file in self._new:
            if self._file_stats[file].st_size > KEPT:
                write_cache(_key(self._file_stats[file]), self._digests[file])
        self._new.clear()

    def _tensor(self, name: str, place: Place) -> str:
        file = place.file
        if file not in self._digests:
            self._digests[file] = read_cache(_key(self._file_stats[file]))
        digests = self._digests[file]
        if name not in digests:
            digest = _digest(file, [(place.offset, place.size)])
            if _identity(_stat(file)) != _identity(self._file_stats[file]):
                raise _change_error(file)
            digests[name] = digest
            self._new.add(file)
        return digests[name]


class DigestQueue:
    """Experts that wait for their digests, each of which is computed once."""

    def __init__(self, path: Path, layout: ExpertLayout) -> None:
        self._digests = ExpertDigests(path, layout)
        self._waiting: deque[tuple[int, int]] = deque()
        self._added_experts: set[tuple[int, int]] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, experts: Mapping[int, Iterable[int]]) -> None:
        """experts: layer -> ids. Those that were added before are left out."""
        pairs = {(layer, expert) for layer, ids in experts.items() for expert in ids}
        self._waiting.extend(sorted(pairs - self._added_experts))
        self._added_experts |= pairs

    def compute_next(self) -> dict[int, dict[int, str]]:
        """The digests of the next experts, layer -> expert -> digest: of as many as take about 0.1 s."""
        digests: dict[int, dict[int, str]] = {}
        end = time.monotonic() + 0.1
        while self._waiting and time.monotonic() < end:
            layer, expert = self._waiting.popleft()
            digests.setdefault(layer, {})[expert] = self._digests.digest_of(layer, expert)
        if not self._waiting:
            self._digests.save()
        return digests


@cache
def _compute(path: Path, first_stamp: str, state: str) -> str:
    entry = read_cache(state)
    if not _FINGERPRINT.fullmatch(entry.get("fingerprint", "")):
        config = {key: value for key, value in read_config(path).items() if key not in NOT_COMPARED}
        tensors = Headers(path).list_tensors()
        names = (f"{name} {place.dtype} {place.shape}" for name, place in tensors.items())
        max_bytes = SAMPLED // max(1, len(tensors))
        samples = (
            f"{name} {_digest(place.file, _samples(place, max_bytes))}" for name, place in tensors.items()
        )
        parts = _hash([json.dumps(config, sort_keys=True)]), _hash(names), _hash(samples)
        entry = {"fingerprint": ".".join(part[:16] for part in parts)}
        # A file that changed in between would give a fingerprint that no checkpoint has.
        check_unchanged(path, first_stamp)
        num_sampled_bytes = sum(min(max_bytes, place.size) for place in tensors.values())
        if num_sampled_bytes > KEPT and _state(path) == state:
            write_cache(state, entry)
    return entry["fingerprint"]


def _samples(place: Place, max_bytes: int) -> list[tuple[int, int]]:
    """(offset, size) of the parts of a tensor that are sampled, together at most `max_bytes` bytes.

    They are all of a small tensor, else its begin, middle and end.
    """
    if place.size <= max_bytes:
        return [(place.offset, place.size)]
    size = max_bytes // 3
    return [(place.offset + start, size) for start in (0, (place.size - size) // 2, place.size - size)]


def _digest(file: Path, spans: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    try:
        with file.open("rb", buffering=0) as stream:
            for offset, size in spans:
                for begin in range(offset, offset + size, PIECE):
                    length = min(PIECE, offset + size - begin)
                    piece = os.pread(stream.fileno(), length, begin)
                    if len(piece) < length:
                        raise CheckpointError(f"{file}: truncated since its header was read")
                    digest.update(piece)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    return digest.hexdigest()


def _hash(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


# ---- the states of files


def list_files(path: Path) -> list[Path]:
    """The files that a fingerprint is of. Raises CheckpointError if one of them cannot be read."""
    config = [] if is_gguf(path) else [path / "config.json"]
    return [*config, *Headers(path).files]


def list_weight_files(path: Path) -> list[Path]:
    """The files with tensors. Raises CheckpointError as `list_files`."""
    return [file for file in Headers(path).files if file.name != INDEX]


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise CheckpointError(f"{file}: this file is missing") from error


def _identity(file_stat: os.stat_result) -> str:
    """A word that stays the same when a file only gets another mode, owner or hard link."""
    return f"{file_stat.st_dev}-{file_stat.st_ino}-{file_stat.st_size}-{file_stat.st_mtime_ns}"


def _key(file_stat: os.stat_result) -> str:
    """The name in the cache folder of what is known of a file."""
    return f"{_identity(file_stat)}-{file_stat.st_ctime_ns}"


def _state(path: Path) -> str:
    """The same of all files of a checkpoint together."""
    return _hash(f"{file.name} {_key(_stat(file))}" for file in list_files(path))


def _change_error(path: Path) -> CheckpointError:
    problem = "the files changed since they were first read; restart to serve the new ones"
    return CheckpointError(f"{path}: {problem}")


# ---- the cache folder


def _file_of(key: str) -> Path:
    return cache_folder() / "digests" / f"{key}.json"


def read_cache(key: str) -> dict[str, str]:
    """What was kept under this name. Empty if nothing was, or nothing that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError, ConfigError):  # ConfigError: no home
        entry = json.loads(_file_of(key).read_text("utf-8"))
        if isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values()):
            return entry
    return {}


def write_cache(key: str, value: dict[str, str]) -> None:
    """Keep it under this name. Without a folder that can be written it is found anew each time."""
    with contextlib.suppress(OSError, ConfigError):
        file = _file_of(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(value), "utf-8")
            # Replaced in one step, since other processes may read the same entry now.
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
