"""The processes of a group: the first rank starts the others, and they end with it.

A group lives and dies as one. A rank that dies ends the group's rounds for the first one, and `when_lost`
tells its process, which then ends; when that dies, the others see the end of their standard input, in the
middle of a step too. A rank that gives no sign of life on its standard output is killed. Whoever watches the
first one starts another group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from moesaic.collectives.group import Group
from moesaic.collectives.one_shot import OneShotGroup
from moesaic.config import WorkerConfig, one_gpu, worker_environment
from moesaic.core.errors import ConfigError, ConnectionLost, MoesaicError
from moesaic.runtime.machine import allowed_cpus, cores
from moesaic.runtime.model_loading import gpus_of

try:
    from moesaic.transport.gathering import gather
except ImportError:  # installed without a compiler, or not on Linux
    SHARED_MEMORY = False
else:
    SHARED_MEMORY = True

ALIVE_SECONDS = 0.2
"""Between two signs of life."""
FROZEN_SECONDS = 5.0
"""Without one."""
END_SECONDS = 5.0
ALIVE = b"."
"""A sign of life; a rank that knows why it ends writes a line behind the last one."""
READY_SECONDS = 120.0
"""For the processes of a group to start and find each other; weights are read later."""


@dataclass(frozen=True)
class EndedRank:
    """A rank's process."""

    rank: int
    pid: int
    code: int
    said: str
    """Its last words, a line; empty: none."""

    @property
    def followed(self) -> bool:
        """Whether it ended since the group had."""
        return not self.said and self.code == 0

    @property
    def text(self) -> str:
        how = self.said or f"process {self.pid} ended with code {self.code}"
        return f"rank {self.rank} of the group is gone: {how}"


class RankLauncher:
    """The other ranks' processes, as the first one sees them."""

    def __init__(self, config: WorkerConfig) -> None:
        """Starts them. config: of the worker, with all of the group's cores and threads.

        Raises ConfigError where ranks cannot share memory.
        """
        self.size = config.parallel.tensor_parallel_size
        if not SHARED_MEMORY:
            allowed = "1: the compiled module moesaic.transport._shm is missing"
            raise ConfigError.field("--tensor-parallel-size", self.size, allowed)
        self._secret = secrets.token_bytes(32)
        self._folder = tempfile.TemporaryDirectory(prefix="moesaic-group-")
        self._path = str(Path(self._folder.name) / "socket")
        processes = [self._start(config, rank) for rank in range(1, self.size)]
        self._over, self._ended = threading.Event(), SimpleQueue[EndedRank]()
        self._gone: EndedRank | None = None
        self._ending = weakref.finalize(self, _end, processes, self._over)
        for rank, process in enumerate(processes, start=1):
            _in_thread(_watch, rank, process, self._ended)

    @contextlib.contextmanager
    def starting(self) -> Generator[None]:
        """Until the group is ready. An error ends the processes; `why` is that of a rank that is gone."""
        try:
            yield
        except ConnectionLost as lost:
            told = self.why(lost)
            self.close()
            raise told from None
        except BaseException:
            self.close()
            raise

    def why(self, lost: ConnectionLost) -> MoesaicError:
        """What to raise for a round that was lost: a ConfigError with the last words of the rank that ended,
        if it had any; else how its process ended; `lost` where all ended because the group did."""
        self._gone = self._gone or _why(self._ended, self.size - 1, END_SECONDS)
        if self._gone is None or self._gone.followed:
            return lost
        return ConfigError(self._gone.text) if self._gone.said else ConnectionLost(self._gone.text)

    def gather(self) -> Group:
        """This rank's end of the group, once all are there. Raises ConnectionLost if they are not."""
        peers = gather(self._path, self._secret, 0, self.size, seconds=READY_SECONDS)
        self._folder.cleanup()
        return OneShotGroup(peers)

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """`tell` hears in a thread, once, of a rank that ends before `close`: perhaps long before a round."""
        _in_thread(_tell, self._ended, self.size - 1, self._over, tell)

    def close(self) -> None:
        """End the processes, and wait for that."""
        self._ending()

    def _start(self, config: WorkerConfig, rank: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "moesaic.runtime.group",
            "--rank",
            str(rank),
            "--socket",
            self._path,
        ]
        process = subprocess.Popen(
            [*command, "--config", of_rank(config, rank).to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=worker_environment() | _gpu(config, rank),
            process_group=0,
        )
        assert process.stdin is not None
        process.stdin.write(self._secret.hex().encode() + b"\n")
        process.stdin.flush()
        return process


def _gpu(config: WorkerConfig, rank: int) -> dict[str, str]:
    """What a rank's environment says of the GPU that it takes. The first rank takes the first one."""
    gpus = gpus_of(config.model)
    return one_gpu(rank, gpus) if gpus else {}


def _in_thread(work: Callable[..., None], *given: object) -> None:
    threading.Thread(target=work, args=given, name="watching a rank", daemon=True).start()


def _tell(
    ended: SimpleQueue[EndedRank], others: int, over: threading.Event, tell: Callable[[str], None]
) -> None:
    why = _why(ended, others, None)
    if why is not None and not over.is_set():
        tell(why.text)


def _why(ended: SimpleQueue[EndedRank], others: int, seconds: float | None) -> EndedRank | None:
    """Of `others` ranks the one that the rest ended after; None where none ends in time."""
    found = None
    with contextlib.suppress(Empty):
        for _ in range(others):
            found = ended.get(timeout=seconds if found is None else END_SECONDS)
            if not found.followed:
                break
    return found


def _watch(rank: int, process: subprocess.Popen[bytes], ended: SimpleQueue[EndedRank]) -> None:
    """Until it ends. The first sign comes when Python has loaded the program."""
    assert process.stdout is not None
    said = b""  # once the signs of life are left out
    with process.stdout as signs:
        while read := os.read(signs.fileno(), 4096):
            said = (said + read).lstrip(ALIVE)
            if not select.select([signs], [], [], FROZEN_SECONDS)[0]:
                process.kill()
    line = said.partition(b"\n")[0].decode(errors="replace")
    ended.put(EndedRank(rank, process.pid, process.wait(), line))


def _end(processes: list[subprocess.Popen[bytes]], over: threading.Event) -> None:
    """They end when their standard input does."""
    over.set()
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already
            process.stdin.close()
    for process in processes:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def of_rank(config: WorkerConfig, rank: int) -> WorkerConfig:
    """What one rank of the group is told: its share of the worker's cores and threads."""
    size = config.parallel.tensor_parallel_size
    cpus = config.cpus or (tuple(allowed_cpus()) if config.model.pin_threads else ())
    mine = cpus[rank * len(cpus) // size : (rank + 1) * len(cpus) // size] if len(cpus) >= size else cpus
    threads = config.most_threads or len(cpus) or cores()
    return replace(config, cpus=mine, most_threads=max(1, threads // size))
