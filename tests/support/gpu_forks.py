"""`python -m tests.support.gpu_forks`: as `forked_workers`, with each fork on the device of `gpu_sanitizer`.

Workers, their ranks and expert servers share memory of the device by files (`gpu_shared_memory`).
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support import gpu_graphs  # noqa: F401  and with it Triton, before the forks
from tests.support.forked_workers import Forking, programs_of, serve
from tests.support.gpu_server_process import taken_device

NAME = "tests.support.gpu_forks"


@contextmanager
def forks() -> Iterator[None]:
    """Inside, processes of a cluster whose kernels are the reference's are on the device."""
    forking = Forking(NAME)
    try:
        with forking.quick():
            yield
    finally:
        forking.end()


def main() -> int:
    """Returns the exit code of a fork."""
    programs = programs_of(sys.argv[2:])
    wanted = serve(socket.socket(fileno=int(sys.argv[1])))
    with taken_device():
        return programs[wanted]()


if __name__ == "__main__":
    raise SystemExit(main())
