"""The processes of a group: the first rank starts the others, and they end with it.

A group lives and dies as one. A rank that dies ends the group's rounds for the first one, whose process then
ends; when that dies, the others see the end of their standard input, in the middle of a step too. A rank that
gives no sign of life on its standard output is killed. Whoever watches the first one starts another group.
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
from dataclasses import replace
from pathlib import Path

from moesaic.collectives.group import Group
from moesaic.collectives.one_shot import OneShotGroup
from moesaic.config import WorkerConfig, worker_environment
from moesaic.runtime.machine import allowed_cpus, cores
from moesaic.transport.gathering import gather

ALIVE_SECONDS = 0.2
"""Between two signs of life."""
FROZEN_SECONDS = 5.0
"""Without one."""
END_SECONDS = 5.0
READY_SECONDS = 120.0
"""For the processes of a group to start and find each other; weights are read later."""


class Crew:
    """The other ranks' processes, as the first one sees them."""

    def __init__(self, config: WorkerConfig) -> None:
        """Starts them. config: of the worker, with all of the group's cores and threads."""
        self.size = config.group.size
        self._secret = secrets.token_bytes(32)
        self._folder = tempfile.TemporaryDirectory(prefix="moesaic-group-")
        self._path = str(Path(self._folder.name) / "socket")
        processes = [self._start(config, rank) for rank in range(1, self.size)]
        self._ending = weakref.finalize(self, _end, processes)
        for process in processes:
            threading.Thread(target=_watch, args=(process,), name="watching a rank", daemon=True).start()

    def gather(self) -> Group:
        """This rank's end of the group, once all are there. Raises ConnectionLost if they are not."""
        group = OneShotGroup(gather(self._path, self._secret, 0, self.size, seconds=READY_SECONDS))
        self._folder.cleanup()
        return group

    def close(self) -> None:
        """End the processes, and wait for that."""
        self._ending()

    def _start(self, config: WorkerConfig, rank: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "moesaic.runtime.tensor",
            "--rank",
            str(rank),
            "--socket",
            self._path,
        ]
        process = subprocess.Popen(
            [*command, "--config", of_rank(config, rank).to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=worker_environment(),
            process_group=0,
        )
        assert process.stdin is not None
        process.stdin.write(self._secret.hex().encode() + b"\n")
        process.stdin.flush()
        return process


def _watch(process: subprocess.Popen[bytes]) -> None:
    """Until it ends. The first sign comes when Python has loaded the program."""
    assert process.stdout is not None
    with process.stdout as signs:
        while os.read(signs.fileno(), 4096):
            if not select.select([signs], [], [], FROZEN_SECONDS)[0]:
                process.kill()


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """They end when their standard input does."""
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
    size = config.group.size
    cpus = config.cpus or (tuple(allowed_cpus()) if config.model.pin_threads else ())
    mine = cpus[rank * len(cpus) // size : (rank + 1) * len(cpus) // size] if len(cpus) >= size else cpus
    threads = config.most_threads or len(cpus) or cores()
    return replace(config, cpus=mine, most_threads=max(1, threads // size))
