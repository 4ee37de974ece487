"""A program in a terminal of its own, as a person uses it."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from types import TracebackType
from typing import Self

SECONDS = 60.0
"""Limit of a wait, which only something stuck reaches."""
_START = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """Runs a command whose terminal this process types into and reads."""

    def __init__(self, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "50"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
        )
        os.close(theirs)
        self._seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        """Press these keys. "\\x03" is Ctrl-C, "\\x04" Ctrl-D."""
        os.write(self._ours, text.encode())

    def press_until(self, keys: str, pattern: str) -> None:
        """Press keys, and again every two seconds until the screen shows `pattern`, as people do.

        Python hears no Ctrl-C that comes between the prompt of its `input` and the wait for the first key.
        """
        for _ in range(int(SECONDS / 2)):
            self.type(keys)
            try:
                self.wait_for(pattern, 2.0)
                return
            except TimeoutError:
                pass
        self.wait_for(pattern)

    def wait_for(self, pattern: str, seconds: float = SECONDS) -> str:
        """Wait until the screen shows `pattern`. Returns what came since the last call.

        seconds: maximum time in which nothing comes. After it a TimeoutError is raised.
        """
        while (found := re.search(pattern, self._seen)) is None:
            if not select.select([self._ours], [], [], seconds)[0]:
                raise TimeoutError(f"{pattern!r} did not come: {self._seen!r}")
            try:
                self._seen += os.read(self._ours, 65536).decode()
            except OSError as error:  # the program has ended
                raise AssertionError(f"{pattern!r} did not come: {self._seen!r}") from error
            self._seen = _ESCAPES.sub("", self._seen).replace("\r\n", "\n")
        shown, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return shown

    def wait(self) -> int:
        """Read until the program ends. Returns its exit code."""
        while select.select([self._ours], [], [], SECONDS)[0]:
            try:
                self._seen += os.read(self._ours, 65536).decode()
            except OSError:
                break
        return self.process.wait(SECONDS)
