"""Records which functions of the package run. Every Python of the copied tree starts it, also a child's.

While tests are measured, each function of the package begins with a lookup in `entered`. A lookup that fails
adds the key. In the process of pytest `plugin` takes the keys after each test. Any other process writes them
to a file, with the test file on whose behalf it runs.
This module stands in the copy's site-packages, so it imports nothing of `scripts`.
"""

from __future__ import annotations

import builtins
import os
from pathlib import Path

NAME = "__entered__"
FOLDER = Path(__file__).with_name("recorded")
"""It exists while tests are measured."""
OTHERS = "others"
"""Name of the file with lines `TEST FILE <tab> KEY` of every process that is not pytest's. The test file is
empty where a function runs and no test does: during imports."""


class Entered(dict[str, None]):
    """The keys of the functions that ran since `take` was called."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """A process begins. What its parent noted is not its own."""
        self.clear()
        self.taken = False
        """Whether tests run in this process, and somebody takes what they enter."""

    def __missing__(self, key: str) -> None:
        self[key] = None
        if not self.taken:
            test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
            try:
                with (FOLDER / OTHERS).open("a") as file:
                    file.write(f"{test}\t{key}\n")
            except OSError:
                pass  # a process whose limits forbid it; what it enters is not known

    def take(self) -> set[str]:
        keys = set(self)
        self.clear()
        return keys


entered = Entered()


def start() -> None:
    """Let functions record themselves, if tests are measured."""
    if FOLDER.is_dir():
        setattr(builtins, NAME, entered)
        os.register_at_fork(after_in_child=entered.begin)
