"""A machine that nobody measured, by the figures of its data sheets.

Question: How fast will a model be on a CPU that I do not have?
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import GIB, Hardware, Level, Link, Processor, from_tables

CHANNEL_BYTES = 8
"""Bytes that a channel of 64 bits carries in a transfer."""
OPERATIONS = {"avx512_vnni": 50.0, "apple": 50.0, "avx2": 25.0, "neon_i8mm": 25.0, "neon": 12.5}
"""Instruction set -> operations of a core in a cycle, in products of quantised weights with many rows.

The first is what the kernels avx512_int8 reach in prefill on an EPYC: 249 tokens/s of 1.5 Gflop on two cores
of 3.7 GHz (docs/lab, blocks as files have them). Vectors of AVX2 are half as wide, those of NEON a quarter.
An instruction of i8mm does two of NEON's others. Apple's cores have four units for it, where others have two.
"""
PLAIN_SHARE = 0.42
"""Share of OPERATIONS that unquantised weights reach: the kernels avx512 beside avx512_int8, in that run."""
INTEGERS, NUMBERS = ("cores", "sockets", "threads"), ("channels", "mt_per_s", "memory_gib", "disk_gb_per_s")
"""Keys of the table [sheet]. The others are name, ghz and isa."""


@dataclass(frozen=True)
class Rules:
    """How figures of data sheets become those of a machine. `benchmarks/published_runs.py` checks them."""

    read_share: float = 0.8
    """Share of a memory's peak at which large matrices are read. In docs/lab it is 79 to 84 % of a plain
    read."""
    core_read: float = 16.5e9
    """Bytes/s that one core reads at most: two cores of the EPYC of docs/lab read 33 GB/s."""
    wait: float = 2.4e-6
    """Seconds for each thread in which a task's threads wait for each other. A layer has about 30 operations,
    after each of which every thread counts in one shared number (80 ns), and three tasks."""


FIRST_RULES = Rules(0.72, math.inf, 0.0)
"""The rules before they were compared with any published run: the middle of what llama.cpp and moesaic reach
of a plain read in docs/lab (60 to 84 %), and no waiting."""


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
    memory_gib: float
    """Memory that is free for a model."""
    sockets: int = 1
    threads: int | None = None
    """Threads that compute. None: one for each core."""
    disk_gb_per_s: float | None = None
    """None: experts stay in memory, and a disk is read at 1 GB/s."""

    @property
    def peak(self) -> float:
        """Bytes/s that all channels of all sockets carry."""
        return self.sockets * self.channels * CHANNEL_BYTES * self.mt_per_s * 1e6

    @property
    def active_cores(self) -> int:
        """Cores that compute."""
        cores = self.sockets * self.cores
        return cores if self.threads is None else min(cores, self.threads)


def predict_machine(sheet: DataSheet, is_quantised: bool = True, rules: Rules | None = None) -> Hardware:
    """The machine as plans price it. is_quantised: of the weights."""
    rules = rules or Rules()
    cores, disk = sheet.active_cores, 1e9 * (sheet.disk_gb_per_s or 1.0)
    flops = cores * 1e9 * sum(sheet.ghz) / 2 * OPERATIONS[sheet.isa] * (1.0 if is_quantised else PLAIN_SHARE)
    bandwidth = min(rules.read_share * sheet.peak, rules.core_read * cores)
    processor = Processor(flops, overlap=0.0, launch=rules.wait * (sheet.threads or cores))
    memory = Level("RAM", sheet.memory_gib * GIB, bandwidth, processor, usable=1.0)
    storage = Level("disk", 1e15, disk, None)
    return Hardware(sheet.name, memory, storage, Link(disk, disk), "data sheets, not measured")


def read_machine(tables: Mapping[str, Any]) -> Hardware:
    """A machine from the tables of a hardware file: those of `hardware.from_tables`, or a data sheet.

        [sheet]    name, cores, ghz = [base, boost], isa, channels, mt_per_s, memory_gib,
                   sockets = 1, threads = all cores, disk_gb_per_s = 1

    Raises ConfigError naming the key.
    """
    if "sheet" not in tables:
        return from_tables(tables)
    table = tables["sheet"]
    if not isinstance(table, Mapping) or len(tables) > 1:
        raise ConfigError("hardware file: [sheet] is a table, and the only one of its file")
    known_keys = ("name", "ghz", "isa", *INTEGERS, *NUMBERS)
    unknown_keys = sorted(set(table) - set(known_keys))
    if unknown_keys:
        raise ConfigError.field("hardware file: sheet", unknown_keys[0], ", ".join(known_keys))
    for key in ("cores", "ghz", "isa", "channels", "mt_per_s", "memory_gib"):
        if key not in table:
            raise ConfigError(f"hardware file: sheet.{key} is missing")
    values: dict[str, Any] = {key: _number(key, table[key]) for key in (*INTEGERS, *NUMBERS) if key in table}
    isa, clocks = table["isa"], table["ghz"]
    if isa not in OPERATIONS:
        raise ConfigError.field("hardware file: sheet.isa", isa, ", ".join(OPERATIONS))
    if not isinstance(clocks, list) or len(clocks) != 2:
        raise ConfigError.field("hardware file: sheet.ghz", clocks, "[base clock, maximum boost clock]")
    ghz = _number("ghz", clocks[0]), _number("ghz", clocks[1])
    name = str(table.get("name", "a data sheet"))
    return predict_machine(DataSheet(name=name, ghz=ghz, isa=isa, **values))


def _number(key: str, value: object) -> float:
    kinds = (int,) if key in INTEGERS else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        allowed_values = "an integer of at least 1" if key in INTEGERS else "a number above 0"
        raise ConfigError.field(f"hardware file: sheet.{key}", value, allowed_values)
    return value
