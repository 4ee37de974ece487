"""How a process joins a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from moesaic.config import Device, KernelName, LogLevel

RoleName = str
"""attention-worker, prefill-worker, expert-server or ranks."""
OnJoined = Callable[[str], None]
"""A function that is called once the process has joined, with the cluster's path of the checkpoint."""


@dataclass(frozen=True)
class JoinOptions:
    """How a process joins a cluster, without the secret."""

    cluster: str
    """tcp:HOST:PORT on which the cluster accepts processes. Several with commas between are tried in turn."""
    role: RoleName = "expert-server"
    listen: str | None = None
    """tcp:HOST:PORT on which processes of other hosts reach this one.

    None: any port of this host's address that the cluster connection uses.
    """
    model: str | None = None
    """Path of the checkpoint on this host. None: the same path as on the host of `moesaic serve`."""
    threads: int | None = None
    """Compute threads. None: one for each core."""
    kernels: KernelName | None = None
    """Kernels to use. None: those of the cluster."""
    device: Device | None = None
    """Where it computes. None: as the cluster."""
    capacity: float | None = None
    """Weight of a server's share of the experts, relative to the other servers. None: its threads."""
    ticket: str = ""
    """The ticket that a launcher gave the process (`messages.Enlist`). Empty when nobody launched it."""
    log_level: LogLevel = "info"

    @property
    def addresses(self) -> list[str]:
        """The addresses of `cluster`."""
        return self.cluster.split(",")

    def to_json(self) -> str:
        """The options as JSON, for the command line of a process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JoinOptions:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))
