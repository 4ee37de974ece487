"""The settings of an expert server's process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from moesaic.config.values import HostTransport, KernelName, LogLevel, QueuePolicyName, Schedule
from moesaic.config.worker import QueueConfig
from moesaic.core.experts import Activation, ExpertLayout


@dataclass(frozen=True)
class ExpertServerConfig:
    """The settings of an expert server's process."""

    model: str
    """Directory of the checkpoint."""
    layout: ExpertLayout
    address: str
    """Address to listen on: unix:PATH, unix:@NAME (@ alone: any free name) or tcp:HOST:PORT (0: any free
    port)."""
    remote_address: str | None = None
    """tcp:HOST:PORT on which clients of other hosts reach it too. None: none do."""
    kernels: KernelName = "auto"
    mmap: bool = True
    """True: compute from the mapped checkpoint files. False: from copied weights."""
    fast_memory: int | None = None
    """Maximum bytes of experts in memory. The others are read from the checkpoint when rows need them. None:
    all experts of the server are in memory."""
    device: str = "cpu"
    threads: int = 1
    cpus: tuple[int, ...] = ()
    """Cores that this process may run on. Empty: any core."""
    devices: tuple[str, ...] = ()
    """GPUs that this process sees, by their names in CUDA_VISIBLE_DEVICES. Empty: those of its parent."""
    schedule: Schedule = "lockstep"
    queue_policy: QueuePolicyName = "defrag"
    queues: QueueConfig = QueueConfig()
    transport: HostTransport = "shm"
    """The transport to other servers of its host. nixl: clients of other hosts may use one-sided writes."""
    log_level: LogLevel = "info"
    trace: str | None = None
    """File for this process's part of a trace. None: no trace."""
    paced: str | None = None
    """File of modelled devices (`core.paced_devices`). None: this process takes the time that it takes."""
    policy_file: str | None = None
    """File of curves (`core.curves`). None: those of the device that computes."""
    checkpoint_stamp: str = ""
    """Stamp of the checkpoint's files (`models.fingerprint`), which must not change before they are loaded.
    Empty: as they are now."""
    joined: bool = False
    """True: the server joined from elsewhere, and proves to the supervisor which weights it holds."""

    def to_json(self) -> str:
        """The settings as JSON, for the command line of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ExpertServerConfig:
        """Settings from JSON: the inverse of `to_json`."""
        parts = json.loads(text)
        layout, queues = parts.pop("layout"), QueueConfig(**parts.pop("queues"))
        prefixes = {int(layer): prefix for layer, prefix in layout.pop("prefixes").items()}
        activation = Activation(**layout.pop("activation"))
        layer_dtypes = {int(layer): dtype for layer, dtype in layout.pop("layer_dtypes").items()}
        read = ExpertLayout(prefixes=prefixes, activation=activation, layer_dtypes=layer_dtypes, **layout)
        devices = tuple(parts.pop("devices"))
        return cls(layout=read, queues=queues, devices=devices, **parts)
