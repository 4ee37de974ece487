"""The settings of `moesaic hardware measure`; the command line is generated from here."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from moesaic.config import Device, check_threads


@dataclass(frozen=True)
class MeasureHardware:
    """Measure this machine for plans."""

    _: KW_ONLY
    output_file: Path | None = None
    """Where the hardware file is written (.toml); None: it is printed only."""
    path: Path = Path()
    """A large file to read, such as a shard of a checkpoint, or a directory on the disk to measure: its
    largest *.safetensors is read, or a file of 1 GiB is written there and deleted."""
    threads: int | None = None
    """Threads that compute; None: one per core."""
    device: Device = "auto"
    """cuda: GPU memory over RAM; cpu: RAM over the disk; auto: cuda where there is one."""
    name: str | None = None
    """Of the machine, for people; None: its processor's."""

    def __post_init__(self) -> None:
        check_threads(self.threads)
