"""Checks that a file can be written, before the work whose result it is for."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from moesaic.core.errors import ConfigError


def require_writable(flag: str, path: Path | None) -> None:
    """Raises ConfigError naming `flag` if no file can be written at `path`. Leaves nothing behind.

    A file is made beside it and removed: rights alone do not say whether a file system is read-only or full.
    """
    if path is None:
        return
    try:
        with tempfile.NamedTemporaryFile(dir=path.absolute().parent) as probe:
            probe.write(b"x")
            probe.flush()
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(None, "Permission denied")
    except OSError as error:
        raise ConfigError.field(flag, str(path), f"a file to write into ({error.strerror})") from error
