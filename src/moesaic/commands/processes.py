"""The status of a cluster's processes, as tables for people."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Status = Mapping[str, Any]
"""A ClusterStatus as a JSON object."""
TRANSPORTS = {
    "shm": "shared memory",
    "socket": "Unix sockets",
    "cuda_ipc": "shared memory, with rows on GPUs",
    "nvshmem": "shared memory, and all servers by NVSHMEM in graphs of decode steps, not encrypted",
    "nixl": "shared memory, and those of other hosts by NIXL, not encrypted",
}
"""Value of --transport -> its name in sentences."""


def as_lines(status: Status) -> list[str]:
    """Tables of the processes, followed by notes and warnings. Print them one below the other."""
    tables = _servers(status), _workers(status), _hosts(status), links_table(status["links"])
    lines = [in_text(table) for table in tables if table.row_count]
    single = sum(len(layer["single"]) for layer in status["replicas"])
    missing = sum(len(layer["missing"]) for layer in status["replicas"])
    if single:
        advice = "--min-replicas 2, or moesaic place --redundant-experts"
        lines.append(
            f"{single} experts have only one copy, so their tokens wait if its server dies; see {advice}"
        )
    if one_host := sum(layer["one_host"] for layer in status["replicas"]):
        lines.append(
            f"{one_host} experts have all of their copies on one host, so their tokens wait if it dies; "
            "see --capacity of moesaic join"
        )
    if status["transport"]:
        lines.append(
            f"attention workers reach the expert servers of this host by {TRANSPORTS[status['transport']]}"
        )
    lines.append(f"requests are dispatched by {status['dispatch']}")
    if status["placement_solve"]:
        lines.append(f"placement from live routing: {status['placement_solve']['state']}")
    if status["join_address"]:
        lines.append(f"processes of other hosts can join at {status['join_address']}")
    waiting = (process for process in status["processes"] if process.get("waiting"))
    lines += [f"{process['name']}: {process['waiting']}" for process in waiting]
    if status["paced"]:
        lines.append(f"times are those of modelled devices: {status['paced']}")
    if status.get("outage"):
        lines.append(f"{status['health']}: {status['outage']}")
    if not status["watched"]:
        lines.append("the supervisor has stopped, so processes are not restarted any more")
    if missing:
        lines.append(f"{missing} experts have no copy now: their tokens wait")
    return lines


def in_text(table: Table) -> str:
    """The table as text, with the colours and the width of stdout."""
    text = io.StringIO()
    Console(file=text, force_terminal=sys.stdout.isatty()).print(table)
    return text.getvalue().rstrip("\n")


def _servers(status: Status) -> Table:
    """A table with a row for each expert server. It has the capacities if they differ."""
    servers = [process for process in status["processes"] if process["role"] == "expert server"]
    has_same_capacity = len({process["capacity"] for process in servers}) < 2
    numbers = (
        ["experts", "layers", "threads"]
        if has_same_capacity
        else ["experts", "layers", "capacity", "threads"]
    )
    table = Table(box=None, pad_edge=False)
    gpus = ["gpu"] if any(process["devices"] for process in servers) else []
    for name in ("process", "pid", "stage", *numbers, *gpus, "kernels"):
        left = name in ("process", "stage", "kernels")
        table.add_column(name, justify="left" if left else "right", no_wrap=name == "process")
    for process in servers:
        counts = [f"{process[name]:g}" for name in numbers] + ([process["devices"]] if gpus else [])
        table.add_row(process["name"], _place(process), process["stage"], *counts, process["kernels"])
    return table


def _workers(status: Status) -> Table:
    """A table with a row for each attention worker."""
    table = Table(box=None, pad_edge=False)
    table.add_column("process")
    table.add_column("pid", justify="right")
    table.add_column("stage")
    workers = [process for process in status["processes"] if process["role"] != "expert server"]
    gpus = any(process["devices"] for process in workers)
    if gpus:
        table.add_column("gpu")
    for process in workers:
        gpu_cells = [process["devices"]] if gpus else []
        table.add_row(process["name"], _place(process), process["stage"], *gpu_cells)
    return table


def _hosts(status: Status) -> Table:
    """A table with a row for each host, if there are several."""
    table = Table(box=None, pad_edge=False)
    table.add_column("host", no_wrap=True)
    table.add_column("processes")
    for host in status["hosts"] if len(status["hosts"]) > 1 else ():
        table.add_row(host_name(host["name"]), ", ".join(host["processes"]))
    return table


def links_table(links: Sequence[Mapping[str, Any]]) -> Table:
    """A table with a row for each link between two hosts. links: of a ClusterStatus."""
    table = Table(box=None, pad_edge=False)
    table.add_column("link", no_wrap=True)
    table.add_column("latency", justify="right")
    table.add_column("bandwidth", justify="right")
    table.add_column("known from")
    for link in links:
        table.add_row(
            f"{host_name(link['one'])} - {host_name(link['other'])}",
            f"{1e6 * link['latency_seconds']:,.0f} µs",
            f"{link['bytes_per_second'] / 1e9:,.3g} GB/s",
            link["source"],
        )
    return table


def host_name(name: str) -> str:
    """The name of a host for people."""
    return name or "this host"


def _place(process: Status) -> str:
    """The process's pid, or its address if it is on another machine."""
    return str(process["address"] if process["pid"] is None else process["pid"])
