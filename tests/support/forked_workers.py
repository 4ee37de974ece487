"""`python -m tests.support.forked_workers`: workers, their ranks and expert servers as forks of one process.

Each worker would take two seconds of CPU time to import torch, and a server a quarter of one for what it
needs. Everything else is as when `cluster.local` and `RankLauncher` start them: they are children of the
process that asked, in process groups of their own, and run the same `main`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from unittest.mock import patch

from moesaic.cluster import local
from moesaic.config import ExpertServerConfig, WorkerConfig, worker_environment
from moesaic.transport.stream import StreamConnection, stream_pair

LARGEST = 1 << 20
"""Bytes of a request: settings and environment."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER: whose parents end become children of the process that said so."""
WORKER, RANK, SERVER = "moesaic.runtime", "moesaic.runtime.group", "moesaic.experts"
PROGRAM = "tests.support.forked_workers"
ADOPTING = threading.Lock()
"""Held while this process is a subreaper."""


class ForkServer:
    """A process that has imported `modules` and forks. It starts when it is asked, or by `start`."""

    def __init__(self, *modules: str, program: str = PROGRAM) -> None:
        """program: the module that it runs."""
        self._modules, self._program = modules, program
        self._process: subprocess.Popen[bytes] | None = None
        self._asking: socket.socket | None = None

    def fork(
        self, module: str, words: Sequence[str], environment: Mapping[str, str], descriptors: list[int]
    ) -> int:
        """The id of a new process that runs `module` with these words of a command line.

        descriptors: standard input, output, error, and where there is one, the connection.
        """
        request = json.dumps([module, words, dict(environment), str(Path.cwd())]).encode()
        with ADOPTING:
            asking = self._asking or self._start()
            _subreaper(True)
            try:
                socket.send_fds(asking, [request], descriptors)
                return int(asking.recv(64))
            except BaseException:
                # A test that takes too long is interrupted here. Its answer must not go to the next call.
                if self._process is not None:
                    self._process.kill()
                self.end()
                self._asking = None
                raise
            finally:
                _subreaper(False)

    def start(self) -> None:
        """So that what it takes of the system is there before a test looks."""
        with ADOPTING:
            if self._asking is None:
                self._start()

    def end(self) -> None:
        if self._process is not None and self._asking is not None:
            self._asking.close()
            self._process.wait()

    def _start(self) -> socket.socket:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", self._program, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *self._modules], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                env=_environment(), process_group=0,
            )  # fmt: skip
        return self._asking


class Forking:
    """The processes that fork: one has torch, and one has what servers with native kernels import."""

    def __init__(self, program: str = PROGRAM) -> None:
        """program: what the one with torch runs; see `gpu_forks`."""
        self.torch = ForkServer(WORKER, RANK, SERVER, program=program)
        self.plain = ForkServer(SERVER)

    def start(self) -> None:
        self.torch.start()
        self.plain.start()

    def end(self) -> None:
        self.torch.end()
        self.plain.end()

    @contextmanager
    def quick(self) -> Iterator[None]:
        """Inside, processes start as forks; on Linux, which alone hands children over."""
        if sys.platform != "linux":
            yield
            return
        with (
            patch("moesaic.cluster.launcher.spawn_worker", self._spawn_worker),
            patch("moesaic.cluster.launcher.spawn_server", self._spawn_server),
            patch("moesaic.cluster.launch.spawn_worker", self._spawn_worker),
            patch("moesaic.runtime.group.launcher.spawn_rank", self._spawn_rank),
        ):
            yield

    def _spawn_worker(self, config: WorkerConfig) -> local.ChildProcess:
        """In place of that of `cluster.local`."""
        model = Path(config.model.model)
        return self._spawn(self.torch, WORKER, config.to_json(), "worker process", model, config.devices)

    def _spawn_server(self, config: ExpertServerConfig) -> local.ChildProcess:
        """In place of that of `cluster.local`. A server with native kernels does not import torch."""
        forks = self.torch if config.kernels == "reference" else self.plain
        model = Path(config.model)
        return self._spawn(forks, SERVER, config.to_json(), "expert server", model, config.devices)

    def _spawn(
        self, forks: ForkServer, module: str, config: str, name: str, model: Path, devices: tuple[str, ...]
    ) -> local.ChildProcess:
        ours, theirs = stream_pair()
        with theirs, Path(os.devnull).open("rb") as nothing:
            descriptors = [nothing.fileno(), 1, 2, theirs.fileno()]
            environment = worker_environment(devices=devices)
            pid = forks.fork(module, ["--config", config], environment, descriptors)
        return local.ChildProcess(_Adopted(pid), StreamConnection(ours), name, model)

    def _spawn_rank(self, config: WorkerConfig, rank: int) -> subprocess.Popen[bytes]:
        """In place of that of `group.launcher`, where the first rank is in this process."""
        reading, writing = _pipes()
        with reading[1], writing[0]:
            descriptors = [writing[0].fileno(), reading[1].fileno(), 2]
            pid = self.torch.fork(RANK, *_rank(config, rank), descriptors)
        return _Adopted(pid, writing[1], reading[0])


class _Adopted(subprocess.Popen[bytes]):
    """A child that somebody else started."""

    def __init__(self, pid: int, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> None:
        self.pid, self.args, self.returncode = pid, [], None
        self.stdin, self.stdout, self.stderr = stdin, stdout, None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


def _pipes() -> list[tuple[IO[bytes], IO[bytes]]]:
    """Two pipes: the ends to read and to write of each."""
    return [(os.fdopen(one, "rb"), os.fdopen(other, "wb")) for one, other in (os.pipe(), os.pipe())]


def _rank(config: WorkerConfig, rank: int) -> tuple[list[str], dict[str, str]]:
    """The words of a rank's command line, and its environment."""
    from moesaic.runtime.group import launcher  # and with it torch, which the plain process does not need

    words = ["--rank", str(rank), "--config", launcher.rank_config(config, rank).to_json()]
    return words, launcher.rank_environment(config, rank)


def _environment() -> dict[str, str]:
    """With the path of this process: the tests are no package that is installed."""
    paths = os.pathsep.join(dict.fromkeys([str(Path.cwd()), *(one for one in sys.path if one)]))
    return worker_environment() | {"PYTHONPATH": paths}


def _subreaper(on: bool) -> None:
    assert ctypes.CDLL(None).prctl(SUBREAPER, int(on), 0, 0, 0) == 0


# ---- inside the process that forks, and its forks


def serve(asking: socket.socket) -> str:
    """Answer requests until nobody is left to ask. Returns in each process that is wanted, with its command
    line, the module whose `main` it runs."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(asking, LARGEST, 4)
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
        asking.close()
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
            os.close(descriptor)
        module, words, environment, folder = json.loads(request)
        os.chdir(folder)
        _become(module, words, environment)
        if module != WORKER:
            sys.argv += [word for one in descriptors[3:] for word in ("--connection-fd", str(one))]
            return str(module)
        config = WorkerConfig.from_json(words[-1])
        became = _with_ranks(config.parallel.tensor_parallel_size - 1, descriptors[3])
        if became == WORKER:
            sys.argv += ["--connection-fd", str(descriptors[3])]
        return became


def _become(module: str, words: list[str], environment: dict[str, str]) -> None:
    """Take the name, the command line and the environment of a process that runs `module`."""
    os.setpgid(0, 0)
    Path("/proc/self/comm").write_text(module[-15:])
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *words]


def _with_ranks(others: int, connection: int) -> str:
    """Fork the other ranks of a worker before it has threads. Each waits until the worker starts it.

    Returns in each of the processes the module that it runs. connection: of the worker, closed in the others.
    """
    from moesaic.runtime.group import launcher

    waiting: list[subprocess.Popen[bytes]] = []
    for _ in range(others):
        reading, writing = _pipes()
        if pid := os.fork():
            reading[1].close()
            writing[0].close()
            waiting.append(_Adopted(pid, writing[1], reading[0]))
            continue
        os.dup2(writing[0].fileno(), 0)
        os.dup2(reading[1].fileno(), 1)
        for end in (*reading, *writing, *(one for rank in waiting for one in (rank.stdin, rank.stdout))):
            assert end is not None
            end.close()
        os.close(connection)
        _become(RANK, *_told())
        return RANK

    def spawn_rank(config: WorkerConfig, rank: int) -> subprocess.Popen[bytes]:
        """In place of that of `group.launcher`, in a worker."""
        process = waiting.pop(0)
        assert process.stdin is not None
        process.stdin.write(json.dumps(_rank(config, rank)).encode() + b"\n")
        return process

    launcher.spawn_rank = spawn_rank
    return WORKER


def _told() -> tuple[list[str], dict[str, str]]:
    """Read one line of the standard input and no byte more. Ends the process where the worker has ended."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            os._exit(0)
        line += byte
    words, environment = json.loads(line)
    return words, environment


def programs_of(modules: Sequence[str]) -> dict[str, Callable[[], int]]:
    """The `main` of each module, which is imported with all that it needs."""
    if WORKER in modules:
        importlib.import_module("moesaic.runtime.build")
    return {name: importlib.import_module(f"{name}.__main__").main for name in modules}


if __name__ == "__main__":
    programs = programs_of(sys.argv[2:])
    if WORKER in programs:
        importlib.import_module("tests.support.faulty_worker")
    wanted = serve(socket.socket(fileno=int(sys.argv[1])))
    if wanted == WORKER:
        sys.modules["tests.support.faulty_worker"].spoil()
    raise SystemExit(programs[wanted]())
