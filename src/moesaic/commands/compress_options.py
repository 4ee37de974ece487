"""The settings of `moesaic compress`; the command line is generated from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class Compress:
    """Write a checkpoint whose routed experts take 12 bits a number, without loss."""

    model: str
    """A directory, a hub id, or demo, with its experts in bf16."""
    directory: Path
    """Where the other checkpoint is written; it does not exist yet, or is empty."""

    def __post_init__(self) -> None:
        path = self.target
        taken = any(path.iterdir()) if path.is_dir() else path.exists()
        if taken or not path.parent.is_dir():
            allowed = "a directory that does not exist yet or is empty, in an existing one"
            raise ConfigError.field("DIRECTORY", str(self.directory), allowed)

    @property
    def target(self) -> Path:
        """The directory, whatever ~ and links stand for."""
        return self.directory.expanduser().resolve()
