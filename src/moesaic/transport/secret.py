"""The file with a cluster's secret."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from moesaic.core.errors import ConfigError


def create_secret(file: Path) -> bytes:
    """The cluster's secret. If the file does not exist it is made, readable only for this user."""
    with contextlib.suppress(FileExistsError, FileNotFoundError), file.open("x") as fresh:
        file.chmod(0o600)
        fresh.write(secrets.token_hex(32) + "\n")
    return read_secret(file, "--cluster-secret-file")


def read_secret(file: Path, flag: str) -> bytes:
    """The cluster's secret. Raises ConfigError for a file that is missing, too short, or readable by
    others."""
    try:
        text, mode = file.read_bytes().strip(), file.stat().st_mode & 0o777
    except OSError as error:
        raise ConfigError(f"{flag}: {file}: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError.field(flag, f"{file} with mode {mode:o}", f"mode 600 (chmod 600 {file})")
    if len(text) < 16:
        raise ConfigError.field(flag, f"{file} with {len(text)} bytes", "at least 16 bytes")
    return text
