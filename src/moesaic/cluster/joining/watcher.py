"""Starts a process that joins a cluster, for a launcher on another host, and says how the process ended."""

from __future__ import annotations

from pathlib import Path

from moesaic.cluster.joining import child, enlisting
from moesaic.cluster.joining.options import JoinOptions
from moesaic.config import actor_environment
from moesaic.core.errors import ConfigError, MoesaicError
from moesaic.core.home import expand_home
from moesaic.transport.secret import read_secret


class ProcessWatcher:
    """The watcher of one process. `wait` blocks, and another thread may call `kill` meanwhile.

    The process ends with this one, since its standard input ends then.
    """

    def __init__(self) -> None:
        self._child: child.Child | None = None

    def start(self, joining: JoinOptions, secret_file: str) -> str | None:
        """Starts the process. Returns None, or why it cannot run on this host, in one line for people.

        joining: has a model. secret_file: ~ stands for the home of this host's user.
        """
        try:
            enlisting.check_path(Path(joining.model or ""))
            secret = _secret(Path(secret_file))
        except ConfigError as error:
            return str(error)
        self._child = child.start(joining, secret, environment=actor_environment())
        return None

    def wait(self) -> str:
        """Waits until the process has ended. Returns how it ended, in words for people."""
        if self._child is None:
            return "it was not started"
        try:
            self._child.wait(lambda model: None)
        except MoesaicError as error:
            return str(error)
        finally:
            self._child.close()
        return f"process {self._child.process.pid} ended"

    def kill(self) -> None:
        """Kills the process, also a frozen one."""
        if self._child is not None:
            self._child.process.kill()


def _secret(file: Path) -> bytes:
    """The cluster's secret. Raises ConfigError for a file that cannot be used, with what to do."""
    try:
        return read_secret(expand_home(file), "--cluster-secret-file")
    except ConfigError as error:
        hint = "every node needs a copy of one file, with mode 600; `moesaic cluster init` makes it"
        raise ConfigError(f"{error}; {hint}") from error
