"""The home directory of this user, which `~` stands for, and which some users do not have."""

from __future__ import annotations

from pathlib import Path

from moesaic.core.errors import ConfigError


def expand_home(path: str | Path) -> Path:
    """`path` with a home directory in place of `~` at its front.

    Raises ConfigError if nobody knows that directory, as for the numbered user of a container.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        name = Path(path).parts[0]
        raise ConfigError(f"{path}: {name} has no home directory; give a path without ~") from error
