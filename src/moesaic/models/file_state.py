"""What the file system says of a file, and what it means when that changes while the file is in use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moesaic.core.errors import CheckpointError


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


class OpenFile:
    """A file that this process has open: whether it is as it was when this object was created."""

    def __init__(self, file: Path, descriptor: int) -> None:
        """descriptor: stays the caller's."""
        self._file, self._descriptor = file, descriptor
        self.state = FileState.from_stat(os.fstat(descriptor))

    def read_change(self) -> FileState | None:
        """The state now, if it is another one. Raises OSError as `os.fstat`."""
        status, state = os.fstat(self._descriptor), self.state
        # Device and inode of an open file stay the same. This runs for every read, so no object is made.
        if (status.st_ctime_ns, status.st_mtime_ns, status.st_size) == (
            state.changed_ns,
            state.modified_ns,
            state.size,
        ):
            return None
        return FileState.from_stat(status)

    def check(self) -> None:
        """Raise CheckpointError if somebody has written to the file since then."""
        state = self.read_change()
        if state is not None and not state.has_contents_of(self.state):
            raise CheckpointError(self.describe_change(state))

    def describe_change(self, state: FileState) -> str:
        """What has happened to a file that has this state now, in words for people."""
        change = f"it has {state.size} bytes instead of {self.state.size}"
        if state.size == self.state.size:
            change = "it was written over in place"
        return f"{self._file}: this file changed while it was served: {change}"
