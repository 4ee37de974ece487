"""Child processes on this machine. They are started as modules, so that `ps` shows what they are."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from moesaic.config import ExpertServerConfig, WorkerConfig, worker_environment
from moesaic.runtime.process_end import describe_exit, wait_for_killed
from moesaic.transport.stream import StreamConnection, stream_pair


@dataclass
class ChildProcess:
    """A running attention worker or expert server, and the connection to it."""

    process: subprocess.Popen[bytes]
    connection: StreamConnection
    name: str = "worker process"
    """Name for people."""
    model: Path | None = None
    """The checkpoint that it maps."""
    _end_description: str = ""
    """How it ended, once somebody has asked."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def describe_end(self) -> str:
        """How the process ended, in words for people. Called once the connection is lost."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return f"{self.name} {self.pid} closed its connection but still runs"
        self._end_description = self._end_description or describe_exit(code, self.model)
        return f"{self.name} {self.pid} {self._end_description}"

    def kill(self) -> None:
        """Kills the process now. Its connection reports the end."""
        if self.process.poll() is None:
            self.process.kill()

    def stop(self, timeout: float = 5.0) -> None:
        """Closes the connection, which ends the process. Kills it if that takes longer than `timeout`
        seconds."""
        self.connection.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            wait_for_killed(self.process, self.name)


def spawn_worker(config: WorkerConfig) -> ChildProcess:
    """Starts an attention worker. It loads in the background and sends Ready on the connection."""
    model = Path(config.model.model)
    return spawn_process("moesaic.runtime", config.to_json(), "worker process", model, config.devices)


def spawn_server(config: ExpertServerConfig) -> ChildProcess:
    """Starts an expert server. It waits for its first Hold, loads, and sends Holds on the connection."""
    return spawn_process(
        "moesaic.experts", config.to_json(), "expert server", Path(config.model), config.devices
    )


def spawn_process(
    module: str, config: str, name: str, model: Path, devices: tuple[str, ...] = ()
) -> ChildProcess:
    """Starts `python -m module` with `config`, JSON of its kind, and one end of a connection.

    `name` is what errors call the process; `model` is the checkpoint whose files its end is explained by.
    """
    parent_end, child_end = stream_pair()
    with child_end:
        command = [
            sys.executable,
            "-m",
            module,
            "--connection-fd",
            str(child_end.fileno()),
            "--config",
            config,
        ]
        # In a process group of its own, so that Ctrl-C only reaches the engine. It drains, then ends its
        # worker.
        process = subprocess.Popen(
            command,
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            env=worker_environment(devices=devices),
            process_group=0,
        )
    return ChildProcess(process, StreamConnection(parent_end), name, model)
