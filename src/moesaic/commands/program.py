"""How the user can start this program again."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

NAME = "moesaic"


def program() -> str:
    """What to type for `moesaic`: its path, where the shell would find no such program or another one.

    After `make demo` that is .venv/bin/moesaic, since nobody has activated the environment.
    """
    own, found = Path(sys.executable).parent / NAME, shutil.which(NAME)
    if not own.exists() or (found is not None and Path(found).resolve() == own.resolve()):
        return NAME
    here = Path.cwd()
    if own.parent == here:
        return f"./{NAME}"
    return str(own.relative_to(here) if own.is_relative_to(here) else own)
