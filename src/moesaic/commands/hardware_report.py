"""The report of `moesaic hardware measure`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from moesaic.commands.processes import in_text
from moesaic.commands.program import program
from moesaic.commands.units import in_bytes
from moesaic.cost.hardware import GIB, Hardware, Level

Lines = Sequence[Mapping[str, Any]]
DIFFERS = 1.5
"""A remark is printed if repeated reads are at least this many times as fast as the first one."""


def as_text(hardware: Hardware, output_file: Path | None) -> str:
    """Tables, and remarks below them. output_file: the file that was written, or None."""
    figures = hardware.measurements
    parts = [f"{hardware.name}: {hardware.source}", in_text(_levels(hardware))]
    for prefix, level_name in (("", ""), ("fast_", ", fast level"), ("slow_", ", slow level")):
        if f"{prefix}memory" in figures:
            parts += [f"Weights read for one row{level_name}", in_text(_memory(figures[f"{prefix}memory"]))]
            shape = f", experts of {figures['experts']}" if "experts" in figures else ""
            parts += [
                f"Matrix products, Gflops/s{level_name}{shape}",
                in_text(_products(figures[f"{prefix}products"])),
            ]
    if "disk" in figures:
        parts += [f"Reading {figures['file']}", in_text(_disk(figures["disk"]))]
    if "link" in figures:
        parts += ["Copies", in_text(_link(figures["link"]))]
    parts += remarks(hardware)
    if output_file is not None:
        parts += ["", f"{program()} plan MODEL --hardware {output_file} --prompt-len S --gen-len N"]
    return "\n".join(parts)


def remarks(hardware: Hardware) -> list[str]:
    """What a reader must know to judge the figures, one remark each."""
    figures = hardware.measurements
    notes: list[str] = []
    if "disk" not in figures:
        return notes
    if not figures["direct"]:
        notes.append(
            "This file system has no O_DIRECT: reads went through the page cache, which was emptied."
        )
    if "write_gib" not in figures:
        notes.append("Writing was not measured: the link up is assumed to be as fast as the link down.")
    first = next(line["gib"] for line in figures["disk"] if not line["repeated"])
    ratio = hardware.link.down_bandwidth / GIB / first
    if ratio > DIFFERS:
        notes.append(
            f"Repeated reads are {ratio:.1f} times as fast as the first one, and plans use their rate. A "
            "cache below this system may be the reason. Larger data than it holds is read at the first rate."
        )
    return notes


def _levels(hardware: Hardware) -> Table:
    table = _table("", "memory", "GiB/s", "Gflops/s", "prefill efficiency")
    for level in (hardware.fast, hardware.slow):
        table.add_row(level.name, in_bytes(level.memory), _gib(level.bandwidth), *_processor(level))
    table.add_row("link down", "", _gib(hardware.link.down_bandwidth), "", "")
    table.add_row("link up", "", _gib(hardware.link.up_bandwidth), "", "")
    for name, rate in hardware.link.conversions:
        table.add_row(f"conversion, {name}", "", _gib(rate), "", "")
    if hardware.link.staging is not None:
        table.add_row("copy into pinned memory", "", _gib(hardware.link.staging), "", "")
    return table


def _processor(level: Level) -> tuple[str, str]:
    if level.processor is None:
        return "none", ""
    return f"{level.processor.flops / 1e9:.1f}", f"{level.processor.prefill:.0%}"


def _memory(lines: Lines) -> Table:
    table = _table("threads", "weights", "GiB/s")
    for line in lines:
        table.add_row(str(line["threads"]), line["dtype"], f"{line['gib']:.2f}")
    return table


def _products(lines: Lines) -> Table:
    kinds = list(dict.fromkeys((line["shape"], line["dtype"]) for line in lines))
    table = _table("rows per matrix", *(f"{shape}, {dtype}" for shape, dtype in kinds))
    rates = {(line["shape"], line["dtype"], line["rows"]): line["gflops"] for line in lines}
    for rows in dict.fromkeys(line["rows"] for line in lines):
        table.add_row(str(rows), *(f"{rates[*kind, rows]:.1f}" for kind in kinds))
    return table


def _disk(lines: Lines) -> Table:
    table = _table("size of a read", "threads", "", "GiB/s")
    for line in lines:
        occasion = "repeated" if line["repeated"] else "first time"
        table.add_row(
            in_bytes(1024 * line["block_kib"]), str(line["readers"]), occasion, f"{line['gib']:.2f}"
        )
    return table


def _link(lines: Lines) -> Table:
    table = _table("", "host memory", "GiB/s")
    for line in lines:
        table.add_row(line["way"], "pinned" if line["pinned"] else "pageable", f"{line['gib']:.2f}")
    return table


def _gib(bandwidth: float) -> str:
    return f"{bandwidth / GIB:.2f}"


def _table(first: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table
