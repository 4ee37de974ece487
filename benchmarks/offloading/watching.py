"""One run of one contender: a process in a memory group, heard until it ends or its time is over."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from offloading.groups import Group

FOLDER = Path(__file__).parent.parent


@dataclass
class Outcome:
    """What a run reported."""

    prompts: int
    new: int
    """Number of tokens that are wanted of each prompt."""
    ended: str = ""
    """How the run ended: done, time limit, out of memory, refused, or died."""
    why: str = ""
    """For the last three, the reason in one line."""
    begun: bool = False
    seconds: float = 0.0
    """Seconds from the start of the clock to the last report."""
    first: float | None = None
    """Seconds until each prompt had a token. None: some prompts have none."""
    at_first: int = 0
    """Number of tokens at that time."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """The tokens of each prompt."""
    read: int | None = None
    """Bytes read from the disk."""
    resident: int | None = None
    """Maximum resident bytes."""
    charged: int | None = None
    """Bytes that the group had at most, page cache included."""
    known: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)

    def hear(self, said: dict[str, Any]) -> None:
        """Handle one line of `telling`."""
        event = said["event"]
        if event == "begin":
            self.begun, self.known = True, said["known"]
        elif event == "refused":
            self.ended, self.why = event, said["why"]
        else:
            self.seconds, self.read, self.resident = said["seconds"], said["read"], said["resident"]
            for prompt, token in said.get("new", ()):
                self.tokens.setdefault(prompt, []).append(token)
            if self.first is None and len(self.tokens) == self.prompts:
                self.first, self.at_first = self.seconds, self.generated
            if event == "end":
                self.ended, self.measured = "done", said["measured"]

    @property
    def generated(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def prefill_seconds(self) -> float | None:
        """As the contender counts it, or until each prompt had a token."""
        return self.measured.get("prefill_seconds", self.first)

    @property
    def decode_seconds(self) -> float | None:
        return None if self.prefill_seconds is None else self.seconds - self.prefill_seconds

    @property
    def throughput(self) -> float:
        """Generated tokens / (prefill + decode seconds), of what was reached."""
        return self.generated / self.seconds if self.seconds else 0.0

    @property
    def projected(self) -> float | None:
        """Throughput of the whole job, had it gone on as it did; None: there was no decode step to go by.

        Example: 2 prompts, 5 tokens wanted of each; the first came at 4 s, the third at 6 s ->
        10 tokens in 4 + 4 * 1 s = 1.25 a second.
        """
        if self.ended == "done":
            return self.throughput
        decoded, wanted = self.generated - self.at_first, self.prompts * self.new
        if self.first is None or decoded == 0:
            return None
        return wanted / (self.first + (self.seconds - self.first) * (wanted - self.at_first) / decoded)


def watch(
    command: list[str],
    environment: dict[str, str],
    order: dict[str, Any],
    group: Group | None,
    limit: float,
    tell: Callable[[int, int], None],
) -> Outcome:
    """Start a contender, hand it its order, hear it out, and end it. limit: seconds, loading apart."""
    outcome = Outcome(len(order["prompts"]), order["new"])
    with tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(
            group.entering(command) if group else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            cwd=FOLDER,
            env=os.environ | environment,
        )
        try:
            _hand(process, order)
            _listen(process, outcome, limit, tell)
        finally:
            process.kill()
            process.wait()
        outcome.charged = group.peak() if group else None
        if not outcome.ended:
            outcome.ended = "out of memory" if group is not None and group.killed() else "died"
            outcome.why = outcome.why or _last_line(messages)
    return outcome


def _hand(process: subprocess.Popen[str], order: dict[str, Any]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # one that died has printed why
        process.stdin.write(json.dumps(order) + "\n")


def _listen(
    process: subprocess.Popen[str], outcome: Outcome, limit: float, tell: Callable[[int, int], None]
) -> None:
    """Listen until the run has ended or its time is over."""
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    deadline = time.monotonic() + limit
    while not outcome.ended:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            outcome.ended = "time limit"
            outcome.why = "" if outcome.begun else "while it loaded"
            break
        if line is None:
            break
        begun = outcome.begun
        outcome.hear(json.loads(line))
        if outcome.begun and not begun:
            deadline = time.monotonic() + limit
        tell(outcome.generated, outcome.prompts * outcome.new)
    process.kill()
    reader.join()
    process.stdout.close()


def _read(stdout: Iterable[str], lines: queue.Queue[str | None]) -> None:
    for line in stdout:
        lines.put(line)
    lines.put(None)


def _last_line(messages: IO[str]) -> str:
    messages.seek(0)
    written = [line.strip() for line in messages.read().splitlines() if line.strip()]
    return written[-1] if written else "it said nothing"


def drop_cache(paths: Iterable[Path]) -> None:
    """Take the pages of these files out of the page cache; folders: of all files in them."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                _drop(file)


def _drop(file: Path) -> None:
    opened = os.open(file, os.O_RDONLY)
    try:
        os.fsync(opened)  # pages that are not on the disk yet would stay
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(opened)
