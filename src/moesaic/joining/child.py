"""Starts `python -m moesaic.joining` and reads the events that it prints.

Such a process ends when its connection or its parent ends, even in the middle of a step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.config import worker_environment
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.joining.options import JoinOptions, OnJoined
from moesaic.transport.authentication import Refused, SentAway

_KINDS: dict[str, type[ConnectionLost]] = {"lost": ConnectionLost, "refused": Refused, "sent away": SentAway}


def tell(event: str, text: str) -> None:
    """Print an event for the parent: "joined" with the model, "wrong" or one of `_KINDS` with the reason."""
    sys.stdout.write(json.dumps([event, text]) + "\n")
    sys.stdout.flush()


def kind_of(error: ConnectionLost) -> str:
    """The event for this error."""
    return next(kind for kind in reversed(_KINDS) if isinstance(error, _KINDS[kind]))


@dataclass
class Child:
    """A process that joins a cluster once."""

    process: subprocess.Popen[bytes]

    def wait(self, on_joined: OnJoined) -> int:
        """Wait for its end. Returns 0 once the cluster has shut it down.

        on_joined: called when it has joined. Raises what `server.serve_once` raises.
        """
        assert self.process.stdout is not None
        event = text = ""
        for line in self.process.stdout:
            event, text = json.loads(line)
            if event == "joined":
                on_joined(text)
        code = self.process.wait()
        if event == "wrong":
            raise ConfigError(text)
        if event in _KINDS:
            raise _KINDS[event](text)
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            raise ConnectionLost(f"the process {self.process.pid} {how}")
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
        self.process.wait()


def start(
    joining: JoinOptions,
    secret: bytes,
    devices: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start the process. devices: the GPUs that it sees; empty: those of this process. environment: its
    variables; None: those of this process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moesaic.joining", "--options", joining.to_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=worker_environment(environment, devices),
        process_group=0,
    )
    assert process.stdin is not None
    os.write(process.stdin.fileno(), secret.hex().encode() + b"\n")
    return Child(process)


def serve_once(joining: JoinOptions, secret: bytes, on_joined: OnJoined) -> int:
    """Like `server.serve_once`, for any role and in a child process."""
    child = start(joining, secret)
    try:
        return child.wait(on_joined)
    finally:
        child.end()
