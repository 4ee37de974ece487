"""Machines as data: memory levels, their processors, and the links between levels.

A level may be GPU memory, RAM or a disk. A level without a processor only stores data. GPU memory over RAM
and RAM over a disk are records of the same kind, so the same plans apply to both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moesaic.core.errors import ConfigError
from moesaic.core.weight_types import QUANTIZATIONS, split_dtype

GIB = 2.0**30
CONVERSIONS = (*QUANTIZATIONS, "float32", "columns", "decompressed")
"""What experts in files may be converted from. See ModelSizes.conversion."""


Rates = tuple[tuple[float, float], ...]
"""Measured (rows, flops/s), fewest rows first."""


def _interpolate(rates: Rates, rows: float) -> float:
    """Flops/s with `rows` rows. See `Processor.experts_flops`."""
    index = bisect_right(rates, rows, key=lambda one: one[0])
    if index == len(rates):
        return rates[-1][1]
    upper_rows, upper_flops = rates[index]
    lower_rows, lower_flops = rates[max(index - 1, 0)]
    part = 0.0 if index == 0 else (rows - lower_rows) / (upper_rows - lower_rows)
    return rows / ((1 - part) * lower_rows / lower_flops + part * upper_rows / upper_flops)


@dataclass(frozen=True)
class Processor:
    """The processor that computes on a level."""

    flops: float
    """Peak flops/s of dense products in the model's own dtype."""
    prefill: float = 1.0
    """Share of the peak that products with many rows reach."""
    attention: float = 1.0
    """Share of its roofline that attention to cached tokens reaches, with one row for each request."""
    overlap: float = 1.0
    """How much reading and computing overlap, 0 to 1: the share of the shorter one that runs during the
    longer one.

    With 1 it is the roofline of MoE-Lightning. With 0 the processor does one after the other.
    """
    experts: tuple[tuple[float, float], ...] = ()
    """Measured (rows for each expert, flops/s) of routed experts in the level's memory, fewest rows first.

    If it is empty, the roofline prices experts.
    """
    launch: float = 0.0
    """Seconds that a task takes besides its computation."""
    packed_rates: tuple[tuple[str, tuple[tuple[float, float], ...]], ...] = ()
    """Type of quantised experts (a key of core.weight_types.QUANTIZATIONS) -> `experts` of experts in this
    type. Types that are left out are priced by `experts`."""

    def rates(self, dtype: str | None) -> Rates:
        """The measured rates of experts. dtype: their type if they are quantised.

        Experts whose gate and up have one type, and whose down has another, take the seconds of both.
        """
        packed_rates, (first, second) = dict(self.packed_rates), split_dtype(dtype or "")
        inner_rates, down_rates = packed_rates.get(first), packed_rates.get(second)
        if inner_rates is None or down_rates is None:
            return self.experts
        if first == second:
            return inner_rates
        return tuple(
            (rows, 3 / (2 / flops + 1 / _interpolate(down_rates, rows))) for rows, flops in inner_rates
        )

    def experts_flops(self, rows: float, dtype: str | None = None) -> float:
        """Flops/s of routed experts with a mean of `rows` rows each. Their `rates` must not be empty.

        dtype: their type if they are quantised.

        Between two measured numbers of rows, an expert's seconds are interpolated linearly. With fewer rows
        than the fewest measured, it takes as long as with those.

        Example: 10 flops/s were measured with 1 row and 20 with 4. For one flop in each row, an expert
        takes 0.1 s and 0.2 s. With 2.5 rows it takes 0.15 s, so the rate is 16.7.
        """
        return _interpolate(self.rates(dtype), rows)

    def times(self, factor: float) -> Processor:
        """The same processor, `factor` times as fast."""

        def faster(rates: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
            return tuple((rows, factor * flops) for rows, flops in rates)

        packed = tuple((name, faster(rates)) for name, rates in self.packed_rates)
        return replace(self, flops=factor * self.flops, experts=faster(self.experts), packed_rates=packed)


@dataclass(frozen=True)
class Level:
    """A memory level. The levels of a machine are in order, fastest first."""

    name: str
    memory: float
    """Bytes of memory."""
    bandwidth: float
    """Bytes/s at which its processor reads it, or at which a disk is read."""
    processor: Processor | None
    usable: float = 0.9
    """Share of the memory that a plan may fill."""

    @property
    def room(self) -> float:
        """Bytes that a plan may fill."""
        return self.memory * self.usable


@dataclass(frozen=True)
class Link:
    """The link from a level to the next faster one. Both directions work at the same time."""

    down_bandwidth: float
    """Bytes/s from the slower level to the faster one."""
    up_bandwidth: float
    """Bytes/s from the faster level to the slower one."""
    staging: float | None = None
    """Bytes/s of the copy into pinned memory before a transfer down. None: there is no such copy."""
    latency: float = 0.0
    """Seconds that each transfer takes besides its bytes."""
    handover: float = 0.0
    """Seconds between the end of a task and the start of a task of another lane that waited for it."""
    conversions: tuple[tuple[str, float], ...] = ()
    """Name of a conversion of loaded experts (see ModelSizes.conversion) -> bytes/s of the files that it
    converts, after the transfer. Conversions that are left out take no time."""


@dataclass(frozen=True)
class Hardware:
    """A machine: a fast level, a slow one, and the link between them."""

    name: str
    fast: Level
    slow: Level
    link: Link
    source: str = ""
    """The source of the numbers, for people."""
    measurements: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """All results of `moesaic hardware measure`. Plans do not read them."""

    def parallel(self, ranks: int) -> Hardware:
        """The machine with `ranks` fast levels used as one (MoE-Lightning, section 4.3).

        Memory, bandwidth and flops add up; link and slow level stay the same. Raises ConfigError for fewer
        than 1.
        """
        if ranks < 1:
            raise ConfigError.field("--gpus", ranks, "an integer of at least 1")
        fast, processor = self.fast, self.fast.processor
        wide = None if processor is None else processor.times(ranks)
        fast = replace(fast, memory=ranks * fast.memory, bandwidth=ranks * fast.bandwidth, processor=wide)
        return replace(self, name=self.name if ranks == 1 else f"{ranks} x {self.name}", fast=fast)

    def with_slow(self, memory: float | None = None, bandwidth: float | None = None) -> Hardware:
        """The machine with another memory (bytes) and bandwidth (bytes/s) of the slow level.

        None keeps a value.
        """
        slow = replace(
            self.slow,
            memory=self.slow.memory if memory is None else memory,
            bandwidth=self.slow.bandwidth if bandwidth is None else bandwidth,
        )
        return replace(self, slow=slow)

    def with_link(self, bandwidth: float) -> Hardware:
        """The machine with another link speed, in bytes/s, with the overhead of transfers and conversions.

        If the slow level is a disk, it is read at this speed.
        """
        link = replace(self.link, down_bandwidth=bandwidth, latency=0.0, conversions=())
        slow = self.slow if self.slow.processor is not None else replace(self.slow, bandwidth=bandwidth)
        return replace(self, link=link, slow=slow)

    def to_tables(self) -> dict[str, dict[str, Any]]:
        """The tables of a hardware file. `from_tables` reads them."""
        tables: dict[str, dict[str, Any]] = {"machine": {"name": self.name, "source": self.source}}
        for key, level in (("fast", self.fast), ("slow", self.slow)):
            tables[key] = {
                "name": level.name,
                "memory_gib": level.memory / GIB,
                "bandwidth_gib": level.bandwidth / GIB,
                "usable": level.usable,
            }
            tables[key] |= {} if level.processor is None else _entries(level.processor)
        tables["link"] = {"down_gib": self.link.down_bandwidth / GIB, "up_gib": self.link.up_bandwidth / GIB}
        if self.link.staging is not None:
            tables["link"]["staging_gib"] = self.link.staging / GIB
        if self.link.conversions:
            tables["link"]["convert_gib"] = {name: rate / GIB for name, rate in self.link.conversions}
        tables["link"] |= {"latency_us": 1e6 * self.link.latency, "handover_us": 1e6 * self.link.handover}
        if self.measurements:
            tables["measured"] = dict(self.measurements)
        return tables


def from_tables(tables: Mapping[str, Any]) -> Hardware:
    """Read a machine from the tables of a hardware file (TOML), in GiB, GiB/s and Tflops/s:

        [machine]  name, source
        [fast]     name, memory_gib, bandwidth_gib, tflops, usable = 0.9, prefill_efficiency = 1.0,
                   attention_efficiency = 1.0, overlap = 1.0, launch_us = 0,
                   experts = []: tables with rows, gflops, and type if they are quantised
        [slow]     the same. Without tflops nothing computes there, as with a disk.
        [link]     down_gib, up_gib = down_gib, latency_us = 0, handover_us = 0; staging_gib if transfers
                   go through pinned memory; convert_gib = {}: name of a conversion -> GiB/s of the files
        [measured] anything; it is kept as it is

    Raises ConfigError naming the key.
    """
    unknown_tables = sorted(set(tables) - {"machine", "fast", "slow", "link", "measured"})
    if unknown_tables:
        raise ConfigError.field("hardware file", unknown_tables[0], "machine, fast, slow, link, measured")
    machine, link = _table(tables, "machine", {}), _table(tables, "link")
    _check_keys(
        "link", link, ("down_gib", "up_gib", "staging_gib", "convert_gib", "latency_us", "handover_us")
    )
    down_gib = _number(link, "link", "down_gib")
    fast = _level(tables, "fast")
    if fast.processor is None:
        raise ConfigError("hardware file: fast.tflops is missing: the fast level needs a processor")
    staging = _number(link, "link", "staging_gib") * GIB if "staging_gib" in link else None
    return Hardware(
        name=str(machine.get("name", "this machine")),
        fast=fast,
        slow=_level(tables, "slow"),
        link=Link(
            down_gib * GIB,
            _number(link, "link", "up_gib", down_gib) * GIB,
            staging,
            _number(link, "link", "latency_us", 0.0, zero=True) / 1e6,
            _number(link, "link", "handover_us", 0.0, zero=True) / 1e6,
            _conversions(link),
        ),
        source=str(machine.get("source", "")),
        measurements=_table(tables, "measured", {}),
    )


_LEVEL_KEYS = (
    *("name", "memory_gib", "bandwidth_gib", "tflops", "usable", "prefill_efficiency"),
    *("attention_efficiency", "overlap", "launch_us", "experts"),
)


def _entries(processor: Processor) -> dict[str, Any]:
    """The entries of a processor in the table of its level."""
    entries: dict[str, Any] = {
        "tflops": processor.flops / 1e12,
        "prefill_efficiency": processor.prefill,
        "attention_efficiency": processor.attention,
        "overlap": processor.overlap,
        "launch_us": 1e6 * processor.launch,
    }
    lines: list[dict[str, Any]] = [{"rows": rows, "gflops": flops / 1e9} for rows, flops in processor.experts]
    lines += [
        {"type": name, "rows": rows, "gflops": flops / 1e9}
        for name, rates in processor.packed_rates
        for rows, flops in rates
    ]
    return entries | ({"experts": lines} if lines else {})


def _level(tables: Mapping[str, Any], key: str) -> Level:
    table = _table(tables, key)
    _check_keys(key, table, _LEVEL_KEYS)
    processor = None
    if "tflops" in table:
        rates, packed_rates = _experts(table, key)
        processor = Processor(
            _number(table, key, "tflops") * 1e12,
            _number(table, key, "prefill_efficiency", 1.0, maximum=1.0),
            _number(table, key, "attention_efficiency", 1.0),
            _number(table, key, "overlap", 1.0, maximum=1.0, zero=True),
            rates,
            _number(table, key, "launch_us", 0.0, zero=True) / 1e6,
            packed_rates,
        )
    return Level(
        name=str(table.get("name", key)),
        memory=_number(table, key, "memory_gib") * GIB,
        bandwidth=_number(table, key, "bandwidth_gib") * GIB,
        processor=processor,
        usable=_number(table, key, "usable", 0.9, maximum=1.0),
    )


def _experts(table: Mapping[str, Any], key: str) -> tuple[Rates, tuple[tuple[str, Rates], ...]]:
    """The rates that `Processor.experts` and `Processor.packed` explain."""
    lines, table_name = table.get("experts", []), f"{key}.experts"
    if not isinstance(lines, list) or not all(isinstance(line, Mapping) for line in lines):
        raise ConfigError.field(f"hardware file: {table_name}", lines, "tables with rows and gflops")
    rates_by_type: dict[str | None, list[tuple[float, float]]] = {None: []}
    for line in lines:
        kind = line.get("type")
        if kind is not None and kind not in QUANTIZATIONS:
            raise ConfigError.field(f"hardware file: {table_name}.type", kind, ", ".join(QUANTIZATIONS))
        rate = _number(line, table_name, "rows"), 1e9 * _number(line, table_name, "gflops")
        rates_by_type.setdefault(kind, []).append(rate)
    plain = tuple(sorted(rates_by_type.pop(None)))
    return plain, tuple(
        (str(kind), tuple(sorted(rates))) for kind, rates in sorted(rates_by_type.items(), key=str)
    )


def _conversions(link: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    table = link.get("convert_gib", {})
    if not isinstance(table, Mapping):
        raise ConfigError.field("hardware file: link.convert_gib", table, "a table of names and GiB/s")
    _check_keys("link.convert_gib", table, CONVERSIONS)
    return tuple((name, _number(table, "link.convert_gib", name) * GIB) for name in sorted(table))


def _table(
    tables: Mapping[str, Any], key: str, default: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    table = tables.get(key, default)
    if not isinstance(table, Mapping):
        raise ConfigError(f"hardware file: the table [{key}] is missing")
    return table


def _check_keys(table_name: str, table: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    unknown_keys = sorted(set(table) - set(keys))
    if unknown_keys:
        raise ConfigError.field(f"hardware file: {table_name}", unknown_keys[0], ", ".join(keys))


def _number(
    table: Mapping[str, Any],
    table_name: str,
    key: str,
    default: float | None = None,
    maximum: float = float("inf"),
    zero: bool = False,
) -> float:
    """A number from a table. zero: 0 is allowed."""
    value = table.get(key, default)
    if value is None:
        raise ConfigError(f"hardware file: {table_name}.{key} is missing")
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (0 < value <= maximum or (zero and value == 0)) or value == float("inf"):
        low = "of 0 or more" if zero else "above 0"
        top = "" if maximum == float("inf") else f" up to {maximum:g}"
        raise ConfigError.field(f"hardware file: {table_name}.{key}", value, f"a number {low}{top}")
    return float(value)
