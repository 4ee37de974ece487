"""The file that contains a cluster's secret."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from moesaic.core.errors import ConfigError


def create_secret(file: Path) -> bytes:
    """Read the cluster's secret. A missing file is created first, readable by this user only."""
    with contextlib.suppress(FileExistsError, FileNotFoundError), file.open("x") as fresh:
        file.chmod(0o600)
        fresh.write(secrets.token_hex(32) + "\n")
    return read_secret(file, "--cluster-secret-file")


def read_secret(file: Path, flag: str) -> bytes:
    """Read the cluster's secret.

    Raises ConfigError for a file that is missing, too short, or accessible to other users.
    """
    try:
        text, mode = file.read_bytes().strip(), file.stat().st_mode & 0o777
    except OSError as error:
        raise ConfigError(f"{flag}: {file}: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError.field(flag, f"{file} with mode {mode:o}", f"mode 600 (chmod 600 {file})")
    if len(text) < 16:
        raise ConfigError.field(flag, f"{file} with {len(text)} bytes", "at least 16 bytes")
    return text
