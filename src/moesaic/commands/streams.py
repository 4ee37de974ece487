"""Standard streams that nobody reads."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def replace_closed() -> None:
    """Started with `>&-`: no socket of ours may take stdout's number, and libraries expect a file."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            replace(name)


def replace(name: str) -> None:
    """From now on nobody reads it."""
    setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  open until the end
