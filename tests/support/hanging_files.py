"""A file system that shows a folder and stops answering, as a network file system whose server is gone.

It speaks FUSE with the kernel. A process that has asked for something then waits in a system call that not
even SIGKILL ends (state D), until the mount is gone.

    python -m tests.support.hanging_files FOLDER MOUNT_POINT HANG_FILE

While the file HANG_FILE exists, nothing is answered. It needs root and /dev/fuse.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
LOOKUP, FORGET, GETATTR, READLINK, OPEN, READ, STATFS, RELEASE, GETXATTR, FLUSH, INIT = (
    *(1, 2, 3, 5, 14, 15, 17, 18, 22, 25, 26),
)
OPENDIR, READDIR, RELEASEDIR, ACCESS, INTERRUPT, BATCH_FORGET = 27, 28, 29, 34, 36, 42
UNANSWERED = (FORGET, BATCH_FORGET, INTERRUPT)
ROOT = 1
BUFFER_BYTES = 1 << 20


class HangingFiles:
    """The files of one folder, which has no folders in it."""

    def __init__(self, folder: Path, mount_point: Path, hang_file: Path) -> None:
        """Raises OSError where nothing can be mounted."""
        self._hang_file = hang_file
        self._names = {ROOT: folder} | {ROOT + n: path for n, path in enumerate(sorted(folder.iterdir()), 1)}
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        flags = 1  # read-only
        if LIBC.mount(b"hanging", os.fsencode(mount_point), b"fuse", flags, options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def serve(self) -> None:
        """Answers until nothing is mounted any more."""
        while True:
            try:
                data = os.read(self._device, BUFFER_BYTES)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return
            _, operation, unique, node, *_ = IN_HEADER.unpack_from(data)
            if operation in UNANSWERED or (self._hang_file.exists() and operation != INIT):
                continue
            try:
                answer = self._answer(operation, node, data[IN_HEADER.size :])
                head = OUT_HEADER.pack(OUT_HEADER.size + len(answer), 0, unique)
            except OSError as error:
                head, answer = OUT_HEADER.pack(OUT_HEADER.size, -(error.errno or errno.EIO), unique), b""
            os.write(self._device, head + answer)

    def _answer(self, operation: int, node: int, body: bytes) -> bytes:
        """The answer to one request of the kernel. Raises OSError for those that fail."""
        match operation:
            case _ if operation == INIT:
                return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 17, 0, 12, 9, 1 << 17, 1, 32, 0, 0)
            case _ if operation == LOOKUP:
                name = body.rstrip(b"\0").decode()
                for number, path in self._names.items():
                    if number != ROOT and path.name == name:
                        return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + self._attributes(number)
                raise FileNotFoundError(errno.ENOENT, name)
            case _ if operation == GETATTR:
                return struct.pack("<QII", 0, 0, 0) + self._attributes(node)
            case _ if operation in (OPEN, OPENDIR):
                return struct.pack("<QII", node, 0, 0)
            case _ if operation == READ:
                _, offset, size = struct.unpack_from("<QQI", body)
                with self._names[node].open("rb") as file:
                    return os.pread(file.fileno(), size, offset)
            case _ if operation == READDIR:
                _, offset, size = struct.unpack_from("<QQI", body)
                return self._entries(offset)[:size]
            case _ if operation == STATFS:
                return struct.pack("<QQQQQIIII24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
            case _ if operation in (RELEASE, RELEASEDIR, ACCESS):
                return b""
        raise OSError(errno.ENOSYS, "not implemented")

    def _attributes(self, node: int) -> bytes:
        status = self._names[node].stat()
        times = (int(status.st_atime), int(status.st_mtime), int(status.st_ctime))
        parts = (status.st_atime_ns % 10**9, status.st_mtime_ns % 10**9, status.st_ctime_ns % 10**9)
        rest = (status.st_mode, status.st_nlink, 0, 0, 0, 4096, 0)
        return struct.pack("<QQQQQQIIIIIIIIII", node, status.st_size, status.st_blocks, *times, *parts, *rest)

    def _entries(self, offset: int) -> bytes:
        """Directory entries from number `offset` on."""
        entries = b""
        for number, path in list(self._names.items())[1:]:
            if number - ROOT > offset:
                name = path.name.encode()
                entry = struct.pack("<QQII", number, number - ROOT, len(name), 8) + name
                entries += entry.ljust(-(-len(entry) // 8) * 8, b"\0")
        return entries


def main() -> None:
    files = HangingFiles(*map(Path, sys.argv[1:4]))
    sys.stdout.write("mounted\n")
    sys.stdout.flush()
    files.serve()


if __name__ == "__main__":
    main()
