"""The file that contains a cluster's secret.

Question: Who makes the secret of a cluster, and who may read its file?
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from moesaic.core.errors import ConfigError


def create_secret(file: Path) -> bytes:
    """Read the cluster's secret. A missing file is created first, readable by this user only.

    Raises ConfigError like `read_secret`, and if the file cannot be created.
    """
    flag = "--cluster-secret-file"
    try:
        write_new_secret(file)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"{flag}: {file}: {error.strerror}") from error
    return read_secret(file, flag)


def write_new_secret(file: Path) -> None:
    """Write a new secret of 32 random bytes, in hexadecimal, to a new file of mode 600.

    Raises OSError if the file exists or cannot be created.
    """
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as fresh:
        os.fchmod(fresh.fileno(), 0o600)
        fresh.write(secrets.token_hex(32) + "\n")


def read_secret(file: Path, flag: str) -> bytes:
    """Read the cluster's secret.

    Raises ConfigError for a file that is missing, too short, or accessible to other users.
    """
    try:
        text, file_status = file.read_bytes().strip(), file.stat()
    except OSError as error:
        raise ConfigError(f"{flag}: {file}: {error.strerror}") from error
    mode = file_status.st_mode & 0o777
    if not is_private(mode, file_status.st_uid, os.geteuid()):
        raise ConfigError.field(flag, f"{file} with mode {mode:o}", f"mode 600 (chmod 600 {file})")
    if len(text) < 16:
        raise ConfigError.field(flag, f"{file} with {len(text)} bytes", "at least 16 bytes")
    return text


def is_private(mode: int, owner: int, user: int) -> bool:
    """Whether a file with these permission bits holds a secret safely for `user`, a user id.

    Group and others must have no access, with one exception: the group may read a file of root, if the user
    is not root. Kubernetes mounts secrets so for a container with fsGroup, and systemd's LoadCredential shows
    the same bits where an access control list names the user. PostgreSQL has this rule for its private keys.
    """
    allowed_bits = 0o740 if owner == 0 != user else 0o700
    return mode & ~allowed_bits == 0
