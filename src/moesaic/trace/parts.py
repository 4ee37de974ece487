"""The files that each process writes its part of a trace into, and how they are joined.

During the run, the folder FILE.parts holds a file for each process. Each of them opens in Perfetto too.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moesaic.core.errors import ConfigError

LOG = logging.getLogger(__name__)
PARTS = ".parts"
"""Suffix of the folder's name."""
ROLES = ("attention worker", "prefill worker", "expert server")
"""Roles, in the order of their rows."""
MAX_PROCESSES = 1 << 16
"""Maximum number of processes of a role whose rows are kept in order."""


def part_path(trace: str | None, process: str, incarnation: int = 1) -> str | None:
    """Returns the file for a process's part of the trace `trace`; None: there is no trace.

    Example: "t.json", "expert server 0", 2 -> "t.json.parts/expert-server-0.2.json"
    """
    if trace is None:
        return None
    return str(parts_folder(Path(trace)) / f"{process.replace(' ', '-')}.{incarnation}.json")


def trace_path(part: str | None) -> str | None:
    """Returns the trace of a part, as typed. Example: t.json.parts/expert-server-0.2.json -> t.json"""
    return None if part is None else str(Path(part).parent).removesuffix(PARTS)


def process_name(part: Path) -> str:
    """The process that wrote a part. Example: t.json.parts/expert-server-0.2.json -> "expert server 0"."""
    return part.name.partition(".")[0].replace("-", " ")


def row_order(process: str) -> int:
    """Position of a process's row: by role, then by number. Example: "attention worker 1" -> 1."""
    role, _, number = process.rpartition(" ")
    return MAX_PROCESSES * ROLES.index(role) + int(number)


def parts_folder(file: Path) -> Path:
    """Folder of the parts of the trace `file`."""
    return file.with_name(f"{file.name}{PARTS}")


def new_file(path: Path, mode: int) -> int:
    """Makes a file in place of one at `path`, which may be mapped elsewhere. Returns its descriptor.

    A process that has mapped a file would be killed by SIGBUS where the file became shorter. Raises OSError.
    """
    while True:
        path.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):  # another process has just made it
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


@contextmanager
def collecting(trace: str | None) -> Iterator[None]:
    """Joins the parts that the block's processes write, once the block and they have ended.

    A run that wrote nothing leaves no file. None: there is no trace. Raises ConfigError, before the block,
    if the file cannot be written.
    """
    if trace is None:
        yield
        return
    file = Path(trace)
    fresh = not file.exists()
    _prepare(trace, file)
    try:
        yield
    finally:
        try:
            join(file)
            if fresh and not file.stat().st_size:
                file.unlink()
        except OSError as error:
            LOG.warning("%s: %s; the parts of the trace are in %s", file, error.strerror, parts_folder(file))


def join(file: Path) -> None:
    """Joins all parts of the trace `file` into it as one JSON object, then removes them.

    If no process wrote a part, the file stays as it is.
    """
    parts = sorted(parts_folder(file).glob("*.json"))
    if parts:
        _write(file, parts)
    for part in parts:
        part.unlink()
    parts_folder(file).rmdir()


def events(part: Path) -> Iterator[str]:
    """Yields the events of a part, each as JSON. An incomplete last event is left out."""
    with part.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("},\n"):
                yield line.strip().removesuffix(",")


def _write(file: Path, parts: list[Path]) -> None:
    with file.open("w", encoding="utf-8") as output:
        output.write('{"displayTimeUnit":"ms","traceEvents":[')
        comma = "\n"  # JSON allows no comma after the last event, so each event but the first brings one
        for part in parts:
            for event in events(part):
                output.write(comma + event)
                comma = ",\n"
        output.write("\n]}\n")


def _prepare(trace: str, file: Path) -> None:
    """Makes an empty folder for the parts. Removes parts of a killed run."""
    try:
        file.open("a").close()
        folder = parts_folder(file)
        folder.mkdir(exist_ok=True)
        for old_part in folder.glob("*.json"):
            old_part.unlink()
    except OSError as error:
        raise ConfigError.field("--trace", trace, f"a file to write into ({error.strerror})") from error
