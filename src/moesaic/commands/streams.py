"""Replaces standard streams that are closed."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def replace_closed() -> None:
    """Replace standard streams that were closed at the start, as by `>&-`.

    Otherwise a socket could get stdout's file number. Libraries also expect a file.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            replace(name)


def replace(name: str) -> None:
    """Replace stream `name` by a file that discards everything."""
    setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  open until the end
