"""The settings of `moesaic scale` and `moesaic join`; the command line is generated from here."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from moesaic.config import KernelName, check_threads
from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class Scale:
    """Have another number of processes behind a running server."""

    base_url: str = "http://127.0.0.1:8000"
    """Where the server is."""
    api_key: str | None = None
    """Sent as `Authorization: Bearer KEY`; None: MOESAIC_API_KEY."""
    expert_servers: int | None = None
    """How many there shall be; None: as many as there are."""
    attention_workers: int | None = None
    """How many there shall be; None: as many as there are."""

    def __post_init__(self) -> None:
        for flag, number in (
            ("--expert-servers", self.expert_servers),
            ("--attention-workers", self.attention_workers),
        ):
            if number is not None and number < 1:
                raise ConfigError.field(flag, number, "an integer of at least 1")


@dataclass(frozen=True)
class Join:
    """Be an expert server of a running cluster."""

    address: str
    """HOST:PORT, the --cluster-address of the cluster."""
    _: KW_ONLY
    secret_file: str
    """Copy of the cluster's --cluster-secret-file, with mode 600."""
    role: Literal["expert-server"] = "expert-server"
    """What to be."""
    listen: str | None = None
    """HOST:PORT where attention workers reach this server; None: a free port of the address that the cluster
    sees."""
    model: str | None = None
    """Directory of the checkpoint on this machine; None: the path that it has on the cluster's."""
    threads: int | None = None
    """Threads that compute; None: one per core."""
    capacity: float | None = None
    """This server's share of the experts and of the load: a weight beside those of the cluster's own servers,
    which are their threads or what --expert-capacities says. None: --threads."""
    kernels: KernelName | None = None
    """Implementation of the arithmetic; None: the cluster's. Answers have the same bits only where all
    servers use the native kernels of one instruction set."""

    def __post_init__(self) -> None:
        check_threads(self.threads)
        if self.capacity is not None and not 0 < self.capacity < math.inf:
            raise ConfigError.field("--capacity", self.capacity, "a positive number")
