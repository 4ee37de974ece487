"""The settings of `moesaic compress`, from which its command line is generated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class Compress:
    """Write a checkpoint whose routed experts take 12 bits per number, without loss."""

    model: str
    """A Hugging Face directory, a hub id, or demo. Its experts must be stored in bf16."""
    directory: Path
    """Directory of the compressed checkpoint. It must not exist yet, or be empty."""

    def __post_init__(self) -> None:
        path = self.target
        taken = any(path.iterdir()) if path.is_dir() else path.exists()
        if taken or not path.parent.is_dir():
            allowed = "a directory that does not exist yet or is empty, in an existing one"
            raise ConfigError.field("DIRECTORY", str(self.directory), allowed)

    @property
    def target(self) -> Path:
        """The absolute directory, with ~ and links resolved."""
        return self.directory.expanduser().resolve()
