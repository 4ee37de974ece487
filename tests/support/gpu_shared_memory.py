"""Memory that processes on the device of `gpu_sanitizer` share: a file in memory in place of a GPU's.

`sharing` takes the place of that of `gpu.ipc.device_sharing`. Its tensors look at the same bytes in every
process. What one of them does on the device shows in the others once it is done, as late as there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.errors import ConfigError, DamagedMessage
from moesaic.gpu.ipc.device_sharing import BLOCK
from tests.support.gpu_sanitizer import STREAM, OnDevice

MAGIC = b"a file of the tests:"
FREED = 0x7B
"""What is in memory that was freed: a late reader finds neither zeros nor what was there."""
FILE = "moesaic-test"


def mapped_by(process: int) -> set[int]:
    """The files that a process has open as memory of the device, by their inodes."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    parts = [line.split(maxsplit=5) for line in lines if f"/memfd:{FILE} " in line]
    return {int(part[4]) for part in parts}


class FileMemory:
    """SharedMemory in a file without a name, which goes with the last process that has it open."""

    def __init__(self, descriptor: int, size: int, exported: bool) -> None:
        """descriptor: of the file. It belongs to this object if the memory is exported."""
        self._descriptor, self._exported, self._closed = descriptor, exported, False
        where = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.name = MAGIC + f"{os.getpid()}:{size}:{where}".encode() if exported else b""
        self.bytes = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        """What is in the memory now. The device has its own view of it."""
        self.last = b""
        """What was in it when it was freed."""
        if exported:
            self.bytes[:] = FREED
        self.tensor: torch.Tensor = OnDevice(torch.from_numpy(self.bytes))

    def close(self) -> None:
        """Unlike on a GPU, late writers still write into the file: tests look at `closed`."""
        if self._closed:
            return
        self._closed = True
        STREAM.drain()
        if not self._exported:
            del self.tensor, self.bytes  # unmapped, unless somebody still looks at it
        else:
            self.last = self.bytes.tobytes()
            self.bytes[:] = FREED
            os.close(self._descriptor)

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

    def export(self, size: int) -> FileMemory:
        size = -(-size // BLOCK) * BLOCK
        descriptor = os.memfd_create(FILE)
        os.ftruncate(descriptor, size)
        self.exported.append(FileMemory(descriptor, size, True))
        return self.exported[-1]

    def open(self, name: bytes) -> FileMemory:
        if not name.startswith(MAGIC):
            raise DamagedMessage(f"{len(name)} bytes do not name memory of a GPU")
        process, size, where = name.removeprefix(MAGIC).decode().split(":", 2)
        if int(process) == os.getpid():
            raise ConfigError("--transport cuda_ipc: a process cannot open memory that it exported itself")
        try:
            descriptor = os.open(where, os.O_RDWR)
        except OSError:
            raise ConfigError("--transport cuda_ipc: the process that exported this has ended") from None
        try:
            self.opened.append(FileMemory(descriptor, int(size), False))
        finally:
            os.close(descriptor)
        return self.opened[-1]

    def map_host(self, memory: npt.NDArray[np.uint8]) -> HostMemory:
        return HostMemory(memory)

    def remove(self) -> None:
        """Close what is left."""
        for memory in self.exported:
            memory.close()


@contextlib.contextmanager
def shared_memory() -> Iterator[FileSharing]:
    """Within it processes on the device share memory by files. Gives their FileSharing."""
    files = FileSharing()
    with (
        mock.patch("moesaic.gpu.ipc.device_sharing.sharing", return_value=files),
        mock.patch("moesaic.gpu.ipc.device_sharing.check_installed"),
    ):
        try:
            yield files
        finally:
            files.remove()
