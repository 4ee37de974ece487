"""The settings of `moesaic hardware measure`, from which its command line is generated."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from moesaic.config import Device, check_threads


@dataclass(frozen=True)
class MeasureHardware:
    """Measure this machine for plans."""

    _: KW_ONLY
    output_file: Path | None = None
    """File for the figures (.toml). None: the figures are only printed."""
    path: Path = Path()
    """A large file to read, such as a shard of a checkpoint, or a directory on the disk to measure. In a
    directory the largest *.safetensors is read, or a file of 1 GiB is written and deleted."""
    threads: int | None = None
    """Number of compute threads. None: one per core."""
    device: Device = "auto"
    """Memory levels to measure. cuda: GPU memory and RAM; cpu: RAM and disk; auto: cuda if there is a GPU."""
    name: str | None = None
    """Name of the machine, for people. None: the name of its processor."""

    def __post_init__(self) -> None:
        check_threads(self.threads)
