"""All that an expert server's process needs to know."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from moesaic.config.values import KernelName, QueuePolicyName, Schedule
from moesaic.config.worker import QueueConfig
from moesaic.core.experts import ExpertLayout


@dataclass(frozen=True)
class ExpertServerConfig:
    """All that an expert server's process needs to know."""

    model: str
    """A directory."""
    layout: ExpertLayout
    address: str
    """Where to listen: unix:PATH, unix:@NAME (@ alone: any free name) or tcp:HOST:PORT (0: any free port)."""
    kernels: KernelName = "auto"
    mmap: bool = True
    """Whether weights stay in the mapped files."""
    device: str = "cpu"
    threads: int = 1
    cpus: tuple[int, ...] = ()
    """Cores that this process is kept on; none: any."""
    schedule: Schedule = "lockstep"
    queue_policy: QueuePolicyName = "defrag"
    queues: QueueConfig = QueueConfig()
    trace: str | None = None
    """File for its part of a trace; None: nothing is written down."""

    def to_json(self) -> str:
        """For the command line of its process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ExpertServerConfig:
        """The inverse of `to_json`."""
        parts = json.loads(text)
        layout, queues = parts.pop("layout"), QueueConfig(**parts.pop("queues"))
        prefixes = {int(layer): prefix for layer, prefix in layout.pop("prefixes").items()}
        return cls(layout=ExpertLayout(prefixes=prefixes, **layout), queues=queues, **parts)
