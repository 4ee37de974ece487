"""Memory that processes on the device of `gpu_sanitizer` share: a file of /dev/shm in place of a GPU's.

`sharing` takes the place of that of `kernels.device_sharing`. Its tensors look at the same bytes in every
process. What one of them does on the device shows in the others once it is done, as late as there.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.errors import ConfigError, DamagedMessage
from moesaic.kernels.device_sharing import BLOCK
from tests.support.gpu_sanitizer import STREAM, OnDevice

MAGIC = b"a file of the tests:"
FREED = 0x7B
"""What is in memory that was freed: a late reader finds neither zeros nor what was there."""


class FileMemory:
    """SharedMemory in a file, which the exporting process removes."""

    def __init__(self, path: Path, size: int, exported: bool) -> None:
        self._path, self._exported, self._closed = path, exported, False
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if exported else 0), 0o600)
        try:
            if exported:
                os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.name = MAGIC + f"{os.getpid()}:{size}:{path}".encode() if exported else b""
        self.bytes = np.frombuffer(self._map, np.uint8)
        """What is in the memory now. The device has its own view of it."""
        self.last = b""
        """What was in it when it was freed."""
        if exported:
            self.bytes[:] = FREED
        self.tensor: torch.Tensor = OnDevice(torch.from_numpy(self.bytes))

    def close(self) -> None:
        """Late writers of a file that is gone hit nothing, unlike on a GPU: tests look at `closed`."""
        if self._closed:
            return
        self._closed = True
        STREAM.drain()
        if self._exported:
            self.last = self.bytes.tobytes()
            self.bytes[:] = FREED
            self._path.unlink()

    @property
    def closed(self) -> bool:
        return self._closed


class HostMemory:
    """SharedMemory that is the host's own."""

    name = b""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.tensor: torch.Tensor = OnDevice(torch.from_numpy(memory))

    def close(self) -> None:
        STREAM.drain()


class FileSharing:
    """DeviceSharing with files. `exported` and `opened` list what was made so far."""

    def __init__(self) -> None:
        self.exported: list[FileMemory] = []
        self.opened: list[FileMemory] = []
        self._count = itertools.count()
        self._folder = Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())

    def export(self, size: int) -> FileMemory:
        path = self._folder / f"moesaic-test-{secrets.token_hex(8)}-{next(self._count)}"
        self.exported.append(FileMemory(path, -(-size // BLOCK) * BLOCK, True))
        return self.exported[-1]

    def open(self, name: bytes) -> FileMemory:
        if not name.startswith(MAGIC):
            raise DamagedMessage(f"{len(name)} bytes do not name memory of a GPU")
        process, size, path = name.removeprefix(MAGIC).decode().split(":", 2)
        if int(process) == os.getpid():
            raise ConfigError("--transport cuda_ipc: a process cannot open memory that it exported itself")
        self.opened.append(FileMemory(Path(path), int(size), False))
        return self.opened[-1]

    def map_host(self, memory: npt.NDArray[np.uint8]) -> HostMemory:
        return HostMemory(memory)

    def remove(self) -> None:
        """Remove the files that are left. What a killed process leaves lies in /dev/shm."""
        for memory in self.exported:
            memory.close()


@contextlib.contextmanager
def shared_memory() -> Iterator[FileSharing]:
    """Within it processes on the device share memory by files. Gives their FileSharing."""
    files = FileSharing()
    with (
        mock.patch("moesaic.kernels.device_sharing.sharing", return_value=files),
        mock.patch("moesaic.kernels.device_sharing.check_installed"),
    ):
        try:
            yield files
        finally:
            files.remove()
