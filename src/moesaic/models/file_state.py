"""What the file system says of a file, and what it means when that changes while the file is in use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileState:
    """What `stat` says of a file at some moment."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    """When anything of the inode changed, also its mode, owner or number of links."""

    @classmethod
    def from_stat(cls, status: os.stat_result) -> FileState:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def has_contents_of(self, former_state: FileState) -> bool:
        """Whether this is the same inode, and nobody has written to it since by ordinary means.

        A program can write and set the time of the last write back. Then only `changed_ns` differs.
        """
        return (self.device, self.inode, self.size, self.modified_ns) == (
            former_state.device,
            former_state.inode,
            former_state.size,
            former_state.modified_ns,
        )


def read_state(file: Path) -> FileState | None:
    """The state of the file of this name; None if there is none, or if it cannot be looked at."""
    try:
        return FileState.from_stat(file.stat())
    except OSError:
        return None
