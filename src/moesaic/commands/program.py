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
    own_program, shell_program = Path(sys.executable).parent / NAME, shutil.which(NAME)
    if not own_program.exists() or (
        shell_program is not None and Path(shell_program).resolve() == own_program.resolve()
    ):
        return NAME
    directory = Path.cwd()  # a relative path is shorter to type
    if own_program.parent == directory:
        return f"./{NAME}"
    return str(own_program.relative_to(directory) if own_program.is_relative_to(directory) else own_program)
