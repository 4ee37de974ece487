"""Machines as data: levels of memory, the processors beside them, and the links between them.

A level may be GPU memory, RAM or a disk; a level without a processor only stores. GPU memory over RAM and RAM
over a disk are the same kind of record, and so the same plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moesaic.core.errors import ConfigError

GIB = 2.0**30


@dataclass(frozen=True)
class Processor:
    """What computes beside a level."""

    flops: float
    """Peak, flops/s of dense products in the model's own type."""
    prefill: float = 1.0
    """Share of the peak that long products reach."""


@dataclass(frozen=True)
class Level:
    """One memory. The levels of a machine are in order, fastest first."""

    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes/s at which the processor beside it reads it; for a disk, at which it is read."""
    processor: Processor | None
    usable: float = 0.9
    """Share of the memory that a plan may fill."""

    @property
    def room(self) -> float:
        """Bytes that a plan may fill."""
        return self.memory * self.usable


@dataclass(frozen=True)
class Link:
    """Joins a level to the next faster one. Both directions work at once."""

    down: float
    """Bytes/s from the slower level to the faster one."""
    up: float
    """Bytes/s back."""
    staging: float | None = None
    """Bytes/s of the copy into pinned memory that comes before a transfer down; None: no such copy."""


@dataclass(frozen=True)
class Hardware:
    """A fast level, a slow one, and the link between them."""

    name: str
    fast: Level
    slow: Level
    link: Link
    source: str = ""
    """Where the numbers come from."""

    def parallel(self, ranks: int) -> Hardware:
        """`ranks` fast levels used as one: memory, bandwidth and flops add up, link and slow level do not.

        MoE-Lightning, section 4.3. Raises ConfigError for fewer than 1.
        """
        if ranks < 1:
            raise ConfigError.field("--gpus", ranks, "an integer of at least 1")
        fast, processor = self.fast, self.fast.processor
        wide = None if processor is None else replace(processor, flops=ranks * processor.flops)
        fast = replace(fast, memory=ranks * fast.memory, bandwidth=ranks * fast.bandwidth, processor=wide)
        return replace(self, name=self.name if ranks == 1 else f"{ranks} x {self.name}", fast=fast)

    def with_slow(self, memory: float | None = None, bandwidth: float | None = None) -> Hardware:
        """Another slow level: bytes, and bytes/s. None keeps what is there."""
        slow = replace(
            self.slow,
            memory=self.slow.memory if memory is None else memory,
            bandwidth=self.slow.bandwidth if bandwidth is None else bandwidth,
        )
        return replace(self, slow=slow)

    def to_tables(self) -> dict[str, dict[str, float | str]]:
        """What a hardware file holds: `from_tables` reads it back."""
        tables: dict[str, dict[str, float | str]] = {"machine": {"name": self.name, "source": self.source}}
        for key, level in (("fast", self.fast), ("slow", self.slow)):
            tables[key] = {
                "name": level.name,
                "memory_gib": level.memory / GIB,
                "bandwidth_gib": level.bandwidth / GIB,
                "usable": level.usable,
            }
            if level.processor is not None:
                tables[key]["tflops"] = level.processor.flops / 1e12
                tables[key]["prefill_efficiency"] = level.processor.prefill
        tables["link"] = {"down_gib": self.link.down / GIB, "up_gib": self.link.up / GIB}
        if self.link.staging is not None:
            tables["link"]["staging_gib"] = self.link.staging / GIB
        return tables


def from_tables(tables: Mapping[str, Any]) -> Hardware:
    """A machine from the tables of a hardware file (TOML), in GiB, GiB/s and Tflops/s:

        [machine]  name, source
        [fast]     name, memory_gib, bandwidth_gib, tflops, usable = 0.9, prefill_efficiency = 1.0
        [slow]     the same; without tflops nothing computes there, as with a disk
        [link]     down_gib, up_gib = down_gib, staging_gib where transfers go through pinned memory

    Raises ConfigError naming the key.
    """
    unknown = sorted(set(tables) - {"machine", "fast", "slow", "link"})
    if unknown:
        raise ConfigError.field("hardware file", unknown[0], "machine, fast, slow, link")
    machine, link = _table(tables, "machine", {}), _table(tables, "link")
    _known("link", link, ("down_gib", "up_gib", "staging_gib"))
    down = _number(link, "link", "down_gib")
    fast = _level(tables, "fast")
    if fast.processor is None:
        raise ConfigError("hardware file: fast.tflops is missing: what computes on the fast level?")
    staging = _number(link, "link", "staging_gib") * GIB if "staging_gib" in link else None
    return Hardware(
        name=str(machine.get("name", "this machine")),
        fast=fast,
        slow=_level(tables, "slow"),
        link=Link(down * GIB, _number(link, "link", "up_gib", down) * GIB, staging),
        source=str(machine.get("source", "")),
    )


_LEVEL_KEYS = ("name", "memory_gib", "bandwidth_gib", "tflops", "usable", "prefill_efficiency")


def _level(tables: Mapping[str, Any], key: str) -> Level:
    table = _table(tables, key)
    _known(key, table, _LEVEL_KEYS)
    processor = None
    if "tflops" in table:
        efficiency = _number(table, key, "prefill_efficiency", 1.0, most=1.0)
        processor = Processor(_number(table, key, "tflops") * 1e12, efficiency)
    return Level(
        name=str(table.get("name", key)),
        memory=_number(table, key, "memory_gib") * GIB,
        bandwidth=_number(table, key, "bandwidth_gib") * GIB,
        processor=processor,
        usable=_number(table, key, "usable", 0.9, most=1.0),
    )


def _table(
    tables: Mapping[str, Any], key: str, default: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    table = tables.get(key, default)
    if not isinstance(table, Mapping):
        raise ConfigError(f"hardware file: the table [{key}] is missing")
    return table


def _known(where: str, table: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    unknown = sorted(set(table) - set(keys))
    if unknown:
        raise ConfigError.field(f"hardware file: {where}", unknown[0], ", ".join(keys))


def _number(
    table: Mapping[str, Any], where: str, key: str, default: float | None = None, most: float = float("inf")
) -> float:
    value = table.get(key, default)
    if value is None:
        raise ConfigError(f"hardware file: {where}.{key} is missing")
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 < value <= most or value == float("inf"):
        top = "" if most == float("inf") else f" up to {most:g}"
        raise ConfigError.field(f"hardware file: {where}.{key}", value, f"a number above 0{top}")
    return float(value)
