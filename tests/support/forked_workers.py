"""`python -m tests.support.forked_workers`: attention workers as forks of a process that has imported torch.

Each would take two seconds for that, and so would an expert server that computes with torch. Everything else
is as when `cluster.local` starts them: they are children of the process that asked, in process groups of
their own, and run the same `main`.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from moesaic.cluster import local
from moesaic.config import ExpertServerConfig, WorkerConfig, worker_environment
from moesaic.transport.stream import StreamConnection, stream_pair

LARGEST = 1 << 20
"""Bytes of a request: settings and environment."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER: whose parents end become children of the process that said so."""


class Forking:
    """The process that forks. It starts when the first worker is asked of it, or when `start` says so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asking: socket.socket | None = None

    def fork(self, request: bytes, descriptors: list[int]) -> int:
        """The id of a new process that runs what the request says."""
        with self._lock:
            asking = self._asking or self._start()
            _subreaper(True)
            socket.send_fds(asking, [request], descriptors)
            pid = int(asking.recv(64))
            _subreaper(False)
            return pid

    def start(self) -> None:
        """So that what it takes of the system is there before a test looks."""
        with self._lock:
            if self._asking is None:
                self._start()

    def end(self) -> None:
        if self._process is not None and self._asking is not None:
            self._asking.close()
            self._process.wait()

    def _start(self) -> socket.socket:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forked_workers", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_environment(), process_group=0,
            )  # fmt: skip
        return self._asking


@contextmanager
def process() -> Iterator[Forking]:
    """Inside, `launch` and supervisors start workers quickly; on Linux, which alone hands children over."""
    forking = Forking()
    if sys.platform != "linux":
        yield forking
        return

    def spawn(module: str, config: str, name: str, devices: tuple[str, ...]) -> local.ChildProcess:
        ours, theirs = stream_pair()
        request = json.dumps([module, config, worker_environment(devices=devices)]).encode()
        with theirs:
            pid = forking.fork(request, [theirs.fileno(), 1, 2])
        return local.ChildProcess(_Adopted(pid), StreamConnection(ours), name)

    def spawn_worker(config: WorkerConfig) -> local.ChildProcess:
        """In place of that of `cluster.local`."""
        return spawn("moesaic.runtime", config.to_json(), "worker process", config.devices)

    def spawn_server(config: ExpertServerConfig) -> local.ChildProcess:
        """In place of that of `cluster.local`. A server with native kernels does not import torch."""
        if config.kernels != "reference":
            return local.spawn_server(config)
        return spawn("moesaic.experts", config.to_json(), "expert server", config.devices)

    with (
        patch("moesaic.cluster.launcher.spawn_worker", spawn_worker),
        patch("moesaic.cluster.launcher.spawn_server", spawn_server),
        patch("moesaic.launch.spawn_worker", spawn_worker),
    ):
        yield forking
    forking.end()


class _Adopted(subprocess.Popen[bytes]):
    """A child that somebody else started."""

    def __init__(self, pid: int) -> None:
        self.pid, self.args, self.returncode = pid, [], None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


def _environment() -> dict[str, str]:
    """With the path of this process: the tests are no package that is installed."""
    paths = os.pathsep.join(dict.fromkeys([str(Path.cwd()), *(one for one in sys.path if one)]))
    return worker_environment() | {"PYTHONPATH": paths}


def _subreaper(on: bool) -> None:
    assert ctypes.CDLL(None).prctl(SUBREAPER, int(on), 0, 0, 0) == 0


def _serve(asking: socket.socket) -> str:
    """Answer requests until nobody is left to ask. Returns in each process that is wanted, with its command
    line, the module whose `main` it runs."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(asking, LARGEST, 3)
        if not request:
            raise SystemExit
        told, says = os.pipe()
        if between := os.fork():
            os.close(says)
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(between, 0)
            with os.fdopen(told, "rb") as pipe:
                asking.send(pipe.read())
            continue
        if worker := os.fork():
            os.write(says, str(worker).encode())
            os._exit(0)
        os.close(told)
        os.close(says)
        os.setpgid(0, 0)
        asking.close()
        for number, descriptor in enumerate(descriptors[1:], start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        module, config, environment = json.loads(request)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [module, "--connection-fd", str(descriptors[0]), "--config", config]
        return str(module)


if __name__ == "__main__":
    import moesaic.experts.__main__ as server
    import moesaic.runtime.__main__ as worker
    from moesaic.runtime import build  # noqa: F401
    from tests.support.faulty_worker import spoil

    programs = {"moesaic.runtime": worker.main, "moesaic.experts": server.main}
    main = programs[_serve(socket.socket(fileno=int(sys.argv[1])))]
    spoil()
    raise SystemExit(main())
