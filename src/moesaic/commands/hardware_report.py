"""What `moesaic hardware measure` found, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from moesaic.commands.processes import in_text
from moesaic.commands.units import in_bytes
from moesaic.cost.hardware import GIB, Hardware, Level

Lines = Sequence[Mapping[str, Any]]
DIFFERS = 1.5
"""Times the first read's bandwidth, from which on a repeated read is remarked upon."""


def as_text(hardware: Hardware, written: Path | None) -> str:
    """Tables, and what there is to remark below them. written: the file, None when there is none."""
    found = hardware.measured
    parts = [f"{hardware.name}: {hardware.source}", in_text(_levels(hardware))]
    for prefix, where in (("", ""), ("fast_", ", fast level"), ("slow_", ", slow level")):
        if f"{prefix}memory" in found:
            parts += [f"Weights read for one row{where}", in_text(_memory(found[f"{prefix}memory"]))]
            shape = f", experts of {found['experts']}" if "experts" in found else ""
            parts += [f"Products, Gflops/s{where}{shape}", in_text(_products(found[f"{prefix}products"]))]
    if "disk" in found:
        parts += [f"Reading {found['file']}", in_text(_disk(found["disk"]))]
    if "link" in found:
        parts += ["Copies", in_text(_link(found["link"]))]
    parts += remarks(hardware)
    if written is not None:
        parts += ["", f"moesaic plan MODEL --hardware {written} --prompt-len S --gen-len N"]
    return "\n".join(parts)


def remarks(hardware: Hardware) -> list[str]:
    """What a reader of the numbers has to know, a sentence each."""
    found = hardware.measured
    said: list[str] = []
    if "disk" not in found:
        return said
    if not found["direct"]:
        said.append("This file system has no O_DIRECT: reads went through the page cache, which was emptied.")
    if "write_gib" not in found:
        said.append("Nothing was written: the link up is taken to be as fast as the link down.")
    first = next(line["gib"] for line in found["disk"] if not line["repeated"])
    ratio = hardware.link.down / GIB / first
    if ratio > DIFFERS:
        said.append(
            f"Repeated reads, which plans are given, are {ratio:.1f} times as fast as the first: something "
            "below this system may cache them. What is larger than its cache is read at the first one's rate."
        )
    return said


def _levels(hardware: Hardware) -> Table:
    table = _table("", "memory", "GiB/s", "Gflops/s", "of it in prefill")
    for level in (hardware.fast, hardware.slow):
        table.add_row(level.name, in_bytes(level.memory), _gib(level.bandwidth), *_processor(level))
    table.add_row("link down", "", _gib(hardware.link.down), "", "")
    table.add_row("link up", "", _gib(hardware.link.up), "", "")
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
    table = _table("rows a matrix", *(f"{shape}, {dtype}" for shape, dtype in kinds))
    rates = {(line["shape"], line["dtype"], line["rows"]): line["gflops"] for line in lines}
    for rows in dict.fromkeys(line["rows"] for line in lines):
        table.add_row(str(rows), *(f"{rates[*kind, rows]:.1f}" for kind in kinds))
    return table


def _disk(lines: Lines) -> Table:
    table = _table("bytes a read", "threads", "", "GiB/s")
    for line in lines:
        when = "again" if line["repeated"] else "the first time"
        table.add_row(in_bytes(1024 * line["block_kib"]), str(line["readers"]), when, f"{line['gib']:.2f}")
    return table


def _link(lines: Lines) -> Table:
    table = _table("", "memory of the host", "GiB/s")
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
