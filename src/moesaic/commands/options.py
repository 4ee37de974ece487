"""The settings of `moesaic scale` and `moesaic join`, from which their command lines are generated."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from moesaic.config import KernelName, check_threads
from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class Scale:
    """Change the number of processes of a running server."""

    base_url: str = "http://127.0.0.1:8000"
    """URL of the server."""
    api_key: str | None = None
    """Key that is sent as `Authorization: Bearer KEY`. None: the value of MOESAIC_API_KEY."""
    expert_servers: int | None = None
    """New number of expert servers. None: unchanged."""
    attention_workers: int | None = None
    """New number of attention workers. None: unchanged."""

    def __post_init__(self) -> None:
        for flag, number in (
            ("--expert-servers", self.expert_servers),
            ("--attention-workers", self.attention_workers),
        ):
            if number is not None and number < 1:
                raise ConfigError.field(flag, number, "an integer of at least 1")


@dataclass(frozen=True)
class Join:
    """Run an expert server that joins a running cluster."""

    address: str
    """HOST:PORT, the --cluster-address of the cluster."""
    _: KW_ONLY
    secret_file: str
    """A copy of the cluster's --cluster-secret-file, with mode 600."""
    role: Literal["expert-server"] = "expert-server"
    """Role of this process in the cluster."""
    listen: str | None = None
    """HOST:PORT at which attention workers reach this server. None: a free port of the address that the
    cluster sees."""
    model: str | None = None
    """Directory of the checkpoint on this machine. None: the same path as on the cluster's machine."""
    threads: int | None = None
    """Number of compute threads. None: one per core."""
    capacity: float | None = None
    """Relative share of the experts and of the load that this server gets. The cluster's own servers have
    their --expert-capacities, or else their number of threads. None: --threads."""
    kernels: KernelName | None = None
    """Kernels that compute the experts. None: those of the cluster. Answers have the same bits only if all
    servers use the native kernels of one instruction set."""

    def __post_init__(self) -> None:
        check_threads(self.threads)
        if self.capacity is not None and not 0 < self.capacity < math.inf:
            raise ConfigError.field("--capacity", self.capacity, "a positive number")
