"""Starts `python -m moesaic.cluster.joining` and reads the events that it prints.

Such a process ends with its parent, even in the middle of a step. With `keep` it stays when its connection
ends, with the weights that it has loaded, and joins again when it is asked to.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moesaic.cluster.joining.options import JoinOptions, OnJoined
from moesaic.config import worker_environment
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.runtime.process_end import describe_exit, wait_for_killed
from moesaic.transport.authentication import PeerRefused, RefusedByCluster

_KINDS: dict[str, type[ConnectionLost]] = {
    "lost": ConnectionLost,
    "refused": PeerRefused,
    "sent away": RefusedByCluster,
}


def print_event(event: str, text: str, stays: bool = False) -> None:
    """Print an event for the parent: "joined" with the model, "wrong" or one of `_KINDS` with the reason.

    stays: the process does not end now, but waits until it is asked to join again."""
    sys.stdout.write(json.dumps([event, text, stays]) + "\n")
    sys.stdout.flush()


def event_name(error: ConnectionLost) -> str:
    """The event for this error."""
    return next(kind for kind in reversed(_KINDS) if isinstance(error, _KINDS[kind]))


@dataclass
class Child:
    """A process that joins a cluster."""

    process: subprocess.Popen[bytes]
    is_waiting: bool = False
    """It has lost its connection, and waits until it is asked to join again."""
    model: Path | None = None
    """The checkpoint that it maps. None: it has not joined, and serves what the cluster does."""

    def rejoin(self) -> None:
        """Ask it to join again. If it has ended meanwhile, `wait` says so."""
        assert self.process.stdin is not None
        self.is_waiting = False
        with contextlib.suppress(BrokenPipeError):
            os.write(self.process.stdin.fileno(), b"\n")

    def wait(self, on_joined: OnJoined) -> int:
        """Wait for its end, or until it has lost its connection. Returns 0 once the cluster has shut it down.

        on_joined: called when it has joined. Raises what `joining.server.serve_once` raises.
        """
        assert self.process.stdout is not None
        event = text = ""
        for line in self.process.stdout:
            event, text, self.is_waiting = json.loads(line)
            if event == "joined":
                self.model = self.model or Path(text)
                on_joined(text)
            if self.is_waiting:
                raise _KINDS[event](text)
        code = self.process.wait()
        if event == "wrong":
            raise ConfigError(text)
        if event in _KINDS:
            raise _KINDS[event](text)
        if code:
            verb = "was " if code < 0 else ""
            raise ConnectionLost(f"the process {self.process.pid} {verb}{describe_exit(code, self.model)}")
        return 0

    def close(self) -> None:
        """Closes the pipes to the process, which has ended."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def end(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.kill()
        wait_for_killed(self.process, "the process")
        self.close()


def start(
    joining: JoinOptions,
    secret: bytes,
    devices: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    keep: bool = False,
) -> Child:
    """Start the process. devices: the GPUs that it sees; empty: those of this process. environment: its
    variables; None: those of this process. keep: it stays when its connection ends."""
    command = [sys.executable, "-m", "moesaic.cluster.joining", "--options", joining.to_json()]
    process = subprocess.Popen(
        [*command, *(["--keep"] if keep else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=worker_environment(environment, devices),
        process_group=0,  # Ctrl-C reaches the parent only, which ends this process
    )
    assert process.stdin is not None
    os.write(process.stdin.fileno(), secret.hex().encode() + b"\n")
    return Child(process, model=Path(joining.model) if joining.model else None)


class KeptChild:
    """`serve_once` for one process of any role: each call finds the weights that the last one has loaded.

    A context manager, which ends the process.
    """

    def __init__(self) -> None:
        self._child: Child | None = None

    def __enter__(self) -> KeptChild:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def __call__(self, joining: JoinOptions, secret: bytes, on_joined: OnJoined) -> int:
        """Like `joining.server.serve_once`, in a child process. It is the last one if that has stayed."""
        if self._child is None:
            self._child = start(joining, secret, keep=True)
        else:
            self._child.rejoin()
        try:
            return self._child.wait(on_joined)
        finally:
            if not self._child.is_waiting:
                self._end()

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()
