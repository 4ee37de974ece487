"""Who serves what, as a table for people."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

Status = Mapping[str, Any]
"""A ClusterStatus as JSON has it."""
WAYS = {"shm": "shared memory", "socket": "Unix sockets"}
"""`--transport`, for people."""


def as_lines(status: Status) -> list[str]:
    """The tables and what there is to warn of, to be printed one below the other."""
    lines = [in_text(table) for table in (_servers(status), _others(status)) if table.row_count]
    single = sum(len(layer["single"]) for layer in status["replicas"])
    missing = sum(len(layer["missing"]) for layer in status["replicas"])
    if single:
        how = "--min-replicas 2, or moesaic place --redundant-experts"
        lines.append(f"{single} experts have one copy; with two ({how}) none waits when its server dies")
    if status["transport"]:
        lines.append(
            f"attention workers reach the expert servers of this host by {WAYS[status['transport']]}"
        )
    lines.append(f"requests are dispatched by {status['dispatch']}")
    if status["join_address"]:
        lines.append(f"expert servers of other machines join at {status['join_address']}")
    if not status["watched"]:
        lines.append("the supervisor has stopped, so processes are not restarted any more")
    if missing:
        lines.append(f"{missing} experts have no copy now: their tokens wait")
    return lines


def in_text(table: Table) -> str:
    """As it looks on stdout."""
    text = io.StringIO()
    Console(file=text, force_terminal=sys.stdout.isatty()).print(table)
    return text.getvalue().rstrip("\n")


def _servers(status: Status) -> Table:
    """A row for each expert server; their capacities where they differ."""
    servers = [process for process in status["processes"] if process["role"] == "expert server"]
    same = len({process["capacity"] for process in servers}) < 2
    numbers = ["experts", "layers", "threads"] if same else ["experts", "layers", "capacity", "threads"]
    table = Table(box=None, pad_edge=False)
    for name in ("process", "pid", "stage", *numbers, "kernels"):
        left = name in ("process", "stage", "kernels")
        table.add_column(name, justify="left" if left else "right", no_wrap=name == "process")
    for process in servers:
        counts = [f"{process[name]:g}" for name in numbers]
        table.add_row(process["name"], _place(process), process["stage"], *counts, process["kernels"])
    return table


def _others(status: Status) -> Table:
    """A row for each attention worker."""
    table = Table(box=None, pad_edge=False)
    table.add_column("process")
    table.add_column("pid", justify="right")
    table.add_column("stage")
    for process in status["processes"]:
        if process["role"] != "expert server":
            table.add_row(process["name"], _place(process), process["stage"])
    return table


def _place(process: Status) -> str:
    """Its pid, or its address where it is on another machine."""
    return str(process["address"] if process["pid"] is None else process["pid"])
