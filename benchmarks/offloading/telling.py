"""What a contender's process says while it runs, as JSON lines. Imported by peers too: no library here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SELF = Path("/proc/self")
Token = tuple[int, int]
"""(prompt's number, its next token)"""


class Telling:
    """Reports a run to the parent. It is made before anything slow is imported. `begin` says that loading is
    over."""

    def __init__(self) -> None:
        from protocol import private_stdout  # it takes the scripts' folder from the path of this process

        self._answers = private_stdout()
        self.order: dict[str, Any] = json.loads(sys.stdin.readline())
        """The order: model, prompts, new, threads, and the settings that one contender alone knows."""
        self._begun, self._read = 0.0, 0

    def begin(self, **known: Any) -> None:
        """Start the clock. known: settings that were chosen here, for the report."""
        self._say("begin", known=known)
        self._read = read_bytes() or 0
        self._begun = time.perf_counter()

    def step(self, new: Iterable[Token]) -> None:
        """Report new tokens."""
        self._say("step", seconds=time.perf_counter() - self._begun, new=list(new), **self._taken())

    def end(self, **measured: Any) -> None:
        """Report that all tokens have been made. measured: what this contender alone can measure."""
        seconds = time.perf_counter() - self._begun
        self._say("end", seconds=seconds, measured=measured, **self._taken())

    def refuse(self, why: str) -> None:
        """Report in one line why the job cannot be run."""
        self._say("refused", why=why)

    def _taken(self) -> dict[str, int | None]:
        read = read_bytes()
        return {"read": None if read is None else read - self._read, "resident": resident()}

    def _say(self, event: str, **rest: Any) -> None:
        print(json.dumps({"event": event, **rest}), file=self._answers, flush=True)


def read_bytes() -> int | None:
    """What this process had the disk read so far, mapped files included; None where nobody counts it."""
    return _number(SELF / "io", "read_bytes:")


def resident() -> int | None:
    """The most memory that this process had resident, mapped files included. Bytes."""
    kibibytes = _number(SELF / "status", "VmHWM:")
    return None if kibibytes is None else kibibytes * 1024


def _number(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), None)
