"""The longest pause of a stream when the host of half of the expert servers dies, or its link is cut.

    sudo .venv/bin/python benchmarks/hosts.py demo
    sudo .venv/bin/python benchmarks/hosts.py /tmp/qwen --role attention-worker --rounds 10 --json hosts.json

Two hosts are Linux namespaces of this machine, which needs root. The first one has the API, an attention
worker and half of the expert servers. The other half has joined from the second host. Requests follow each
other without a pause. After --before seconds the second host is killed (`kill`) or its link goes down without
a word (`cut`). Each round has a new cluster. "longest gap" is the longest time between two tokens of a
request that ends after the fault. "without" is the longest one before it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from clusters.traffic import keep_busy
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.hosts import Hosts, missing
from tests.support.joined_cluster import SERVER, WORKER, joined_cluster

FAULTS = ("kill", "cut")


def one_round(hosts: Hosts, folder: Path, fault: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The longest gaps before and after the fault, in seconds."""
    roles = [SERVER] * arguments.servers if arguments.role == "expert-server" else [WORKER]
    shape: dict[str, Any] = {"attention_workers": 1, "expert_servers": arguments.servers}
    shape |= {"min_replicas": arguments.min_replicas, "rebalance_interval": 0.0}
    with joined_cluster(hosts, folder, model=arguments.model, schedule=arguments.schedule, **shape) as joined:
        joined.bring(hosts[1], roles)
        keep_busy(joined, arguments, time.monotonic() + arguments.warm)
        begin = time.monotonic()
        keep_busy(joined, arguments, begin + arguments.before)
        moment = time.monotonic()
        getattr(hosts[1], fault)()
        keep_busy(joined, arguments, moment + arguments.after)
        times = joined.served.running.times.values()
        for number in list(joined.served.running.unfinished):
            joined.served.cancel(number)
        report = joined.served.supervisor.report().counters
    gaps = [(a, b) for one in times for a, b in pairwise(one)]
    return {
        "fault": fault,
        "longest_gap": max((b - a for a, b in gaps if b > moment), default=0.0),
        "without": max((b - a for a, b in gaps if begin < b <= moment), default=0.0),
        "resent_pairs": report.resent_pairs,
        "moved_requests": report.moved_requests,
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each fault and round. The faults take turns."""
    rows = []
    turns = [fault for _ in range(arguments.rounds) for fault in FAULTS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = [folder] if arguments.model == "demo" else [folder, Path(arguments.model)]
        with Hosts(2, given) as hosts, hosts[0].entered():
            for fault in track(turns, "measuring", console=Console(stderr=True)):
                rows.append(one_round(hosts, folder, fault, arguments))
                hosts[1].kill()
                hosts[1].boot()
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Seconds between two tokens of a request, when the second host goes")
    for column in ("fault", "rounds", "longest gap, median", "largest", "without", "pairs again", "moved"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for fault in FAULTS:
        mine = [row for row in rows if row["fault"] == fault]
        gaps = [row["longest_gap"] for row in mine]
        others = [
            statistics.median(row[name] for row in mine)
            for name in ("without", "resent_pairs", "moved_requests")
        ]
        table.add_row(
            *(fault, str(len(mine)), f"{statistics.median(gaps):.2f}", f"{max(gaps):.2f}"),
            *(f"{others[0]:.2f}", f"{others[1]:.0f}", f"{others[2]:.0f}"),
        )
    console.print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo", help="a Hugging Face directory, or demo")
    parser.add_argument(
        "--role",
        choices=("expert-server", "attention-worker"),
        default="expert-server",
        help="what runs on the second host: half of the servers, or one of two attention workers",
    )
    parser.add_argument("--servers", type=int, default=2, help="expert servers of each host that has some")
    parser.add_argument("--min-replicas", type=int, default=2)
    parser.add_argument("--schedule", choices=("barrier", "lockstep", "async", "auto"), default="lockstep")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--gen-len", type=int, default=64, help="tokens of a request")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds of traffic that do not count")
    parser.add_argument("--before", type=float, default=5.0, help="seconds of traffic before the fault")
    parser.add_argument("--after", type=float, default=15.0, help="seconds of traffic after it")
    parser.add_argument("--quick", action="store_true", help="one short round: a look at whether it works")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.warm, arguments.before, arguments.after = 1, 1.0, 1.0, 8.0
    return arguments


def main() -> int:
    arguments = parse()
    if missing():
        sys.stderr.write(missing() + "\n")
        return 2
    rows = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))
    show(rows, Console())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
