"""A machine that nobody measured, by the figures of its data sheets.

Question: How fast will a model be on a CPU that I do not have?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import GIB, Hardware, Level, Link, Processor

OPERATIONS = {"avx512_vnni": 50.0, "avx2": 25.0, "neon": 12.5}
"""Instruction set -> operations of a core in a cycle, in products of quantised weights with many rows.

The first is what the kernels avx512_int8 reach in prefill on an EPYC (docs/lab, blocks as files have them: 249
tokens/s of 1.5 Gflop on two cores of 3.7 GHz). The others have vectors of a half and of a quarter.
"""
PLAIN_SHARE = 0.42
"""Share of OPERATIONS that unquantised weights reach: the kernels avx512 beside avx512_int8, in the same run."""
READ_SHARE = 0.72
"""Share of a memory's peak at which weights are read: the middle of the 60 to 84 % of a plain read that
llama.cpp and moesaic reach on the machines of docs/lab."""
CHANNEL_BYTES = 8
"""Bytes that a channel of 64 bits carries in a transfer."""


@dataclass(frozen=True)
class DataSheet:
    """What data sheets say of a machine, and what its owner says of its memory."""

    name: str
    cores: int
    """Physical cores of a socket."""
    ghz: tuple[float, float]
    """Base clock and maximum boost clock."""
    isa: str
    """The best instruction set of OPERATIONS."""
    channels: float
    """Channels of memory of a socket, each 64 bits wide, that have modules."""
    mt_per_s: float
    """Millions of transfers of a channel in a second, such as 4800 for DDR5-4800."""
    memory_gib: float = 1024.0
    sockets: int = 1
    threads: int | None = None
    """Threads that compute. None: one for each core."""
    disk: float | None = None
    """GB/s at which a disk is read. None: nothing is on a disk."""

    @property
    def peak(self) -> float:
        """Bytes/s that all channels of all sockets carry."""
        return self.sockets * self.channels * CHANNEL_BYTES * self.mt_per_s * 1e6


def predict_machine(sheet: DataSheet, is_quantised: bool = True) -> Hardware:
    """The machine as plans price it. is_quantised: of the weights."""
    disk = 1e9 * (sheet.disk or 1.0)
    flops = _used_cores(sheet) * 1e9 * sum(sheet.ghz) / 2 * OPERATIONS[sheet.isa]
    processor = Processor(flops * (1.0 if is_quantised else PLAIN_SHARE), overlap=0.0)
    memory = Level("RAM", sheet.memory_gib * GIB, READ_SHARE * sheet.peak, processor, usable=1.0)
    storage = Level("disk", 1e15, disk, None)
    return Hardware(sheet.name, memory, storage, Link(disk, disk), "data sheets")


def _used_cores(sheet: DataSheet) -> int:
    cores = sheet.sockets * sheet.cores
    return cores if sheet.threads is None else min(cores, sheet.threads)
