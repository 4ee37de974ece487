"""`loss`: tokens/s over time across the death of one of several hosts, with every expert twice and without.

The first host has the API, an attention worker and two expert servers. Each other host has one expert server,
which has joined. Requests follow each other without a pause. At 0 s every process of the last host is killed
at once. Hosts are Linux namespaces of this machine, which needs root. Each run has a new cluster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from disaggregated.kill import evaluate
from disaggregated.picture import Line, draw
from rich.console import Console
from rich.progress import track
from rich.table import Table

from clusters.traffic import keep_busy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.hosts import Hosts, missing
from tests.support.joined_cluster import SERVER, joined_cluster

from moesaic.core.errors import ConfigError


def cases(arguments: argparse.Namespace) -> dict[str, int]:
    """Name -> copies of each expert at least. In the first case no host dies."""
    most = max(arguments.min_replicas)
    return {"no fault": most} | {f"min-replicas {each}": each for each in arguments.min_replicas}


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each case and round. The cases take turns."""
    if missing():
        raise ConfigError(missing())
    rows = []
    todo = [(turn, *case) for turn in range(arguments.rounds) for case in cases(arguments).items()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = [folder] if arguments.model == "demo" else [folder, Path(arguments.model)]
        with Hosts(arguments.hosts, given) as hosts, hosts[0].entered():
            for turn, case, copies in track(todo, "measuring", console=Console(stderr=True)):
                found = one_run(hosts, folder, copies, case != "no fault", arguments)
                rows.append({"case": case, "round": turn, **found})
                for host in list(hosts)[1:]:
                    host.kill()
                    host.boot()
    return rows


def one_run(
    hosts: Hosts, folder: Path, copies: int, fault: bool, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Traffic without a pause. After `arguments.before` seconds the last host dies, or nothing happens."""
    shape: dict[str, Any] = {"attention_workers": 1, "expert_servers": 2, "rebalance_interval": 0.0}
    with joined_cluster(
        hosts, folder, model=arguments.model, schedule=arguments.schedule, min_replicas=copies, **shape
    ) as joined:
        for number in range(1, len(hosts)):
            joined.bring(hosts[number], [SERVER])
        keep_busy(joined, arguments, time.monotonic() + arguments.warm + arguments.before)
        moment = time.monotonic()
        if fault:
            hosts[len(hosts) - 1].kill()
        keep_busy(joined, arguments, moment + arguments.after)
        for number in list(joined.served.running.unfinished):
            joined.served.cancel(number)
        report = joined.served.supervisor.report().counters
        found = evaluate(joined.served.running.times, moment, arguments)
    return found | {"resent_pairs": report.resent_pairs}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="one host dies: 5 seconds before and after, medians over the rounds")
    for column in ("case", "tokens before", "after", "longest gap s", "largest", "pairs re-sent"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        middle = {
            name: statistics.median(row[name] for row in mine)
            for name in ("tokens_before", "tokens_after", "longest_gap", "resent_pairs")
        }
        table.add_row(
            *(case, f"{middle['tokens_before']:.0f}", f"{middle['tokens_after']:.0f}"),
            *(f"{middle['longest_gap']:.2f}", f"{max(row['longest_gap'] for row in mine):.2f}"),
            f"{middle['resent_pairs']:.0f}",
        )
    console.print(table)


def picture(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """Draws tokens/s over the seconds since the death, as medians over the rounds."""
    lines = []
    for case in cases(arguments):
        columns = zip(*(row["bins"] for row in rows if row["case"] == case), strict=True)
        rates = [statistics.median(column) / arguments.bin for column in columns]
        start = -arguments.before + arguments.bin / 2
        lines.append(Line(case, [(start + place * arguments.bin, rate) for place, rate in enumerate(rates)]))
    title = f"one of {arguments.hosts} hosts dies at 0 s"
    return draw(lines, title, "seconds", "tokens/s", mark=0.0)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--min-replicas", type=int, nargs="+", default=[2, 1], choices=(1, 2))
    parser.add_argument("--schedule", choices=("barrier", "lockstep", "async", "auto"), default="lockstep")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--gen-len", type=int, default=64, help="tokens of a request")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--before", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--after", type=float, default=8.0, metavar="SECONDS")
    parser.add_argument("--bin", type=float, default=0.25, metavar="SECONDS", help="of the picture")
    parser.add_argument("--svg", help="draw tokens/s over time into this file")


def quick(arguments: argparse.Namespace) -> None:
    arguments.rounds, arguments.before, arguments.after = 1, 1.0, 2.0
