"""`hosts`: throughput on 1 to 8 hosts with the timing of modelled devices, beside the simulator's prediction.

Each host has an attention worker and an expert server, which compute the demo checkpoint with the timing of
--paced devices. Hosts are Linux namespaces of this machine, which needs root; all but the first join over
TCP. Requests are closed loops, as many for each worker on any number of hosts. Rates are in the devices'
time. "late" is the share of runs that took longer here than on the device: above 2 % a line says nothing.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.hosts import Hosts, missing
from tests.support.joined_cluster import SERVER, WORKER, JoinedCluster, joined_cluster

from moesaic import SamplingParams
from moesaic.commands.plan import find_model
from moesaic.core.errors import ConfigError
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.scenario import parse

MODEL = "demo"
PROMPT, ANSWER, SEATS = 8, 16, 64
DEVICES = """source = "made up: a run of experts takes 2 ms, and 29 us more for each row above 16"
attention.points_ms = [[4, 3.0], [64, 6.0]]
experts.points_ms = [[16, 2.0], [256, 9.0]]
link.latency_us = 50.0
link.gb_per_s = 10.0
"""


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of hosts."""
    if missing():
        raise ConfigError(missing())
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "devices.toml").write_text(f"dilation = {arguments.dilation}\n{DEVICES}")
        with Hosts(max(arguments.hosts), [folder]) as hosts, hosts[0].entered():
            for count in track(arguments.hosts, "measuring", console=Console(stderr=True)):
                rows.append(
                    real(hosts, folder, count, arguments) | {"simulated": simulated(count, arguments)}
                )
                for number in range(1, len(hosts)):
                    hosts[number].kill()
                    hosts[number].boot()
    return rows


def real(hosts: Hosts, folder: Path, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of the devices' time, and the share of late runs."""
    shape = {
        "attention_workers": 1,
        "expert_servers": 1,
        "rebalance_interval": 0.0,
        "dispatch": "round-robin",
    }
    paced = str(folder / "devices.toml")
    with joined_cluster(hosts, folder, model=MODEL, paced=paced, **shape) as joined:
        for number in range(1, count):
            joined.bring(hosts[number], [SERVER, WORKER])
        clients, warm = count * arguments.clients, arguments.warm * arguments.dilation
        traffic(joined, clients, time.monotonic() + warm)
        before, begun = joined.served.running.tokens, time.monotonic()
        traffic(joined, clients, begun + arguments.seconds * arguments.dilation)
        tokens, seconds = joined.served.running.tokens - before, time.monotonic() - begun
        for number in list(joined.served.running.unfinished):
            joined.served.cancel(number)
        found = joined.served.supervisor.report().counters
    late = found.paced_late / max(1, found.paced_runs)
    return {"hosts": count, "tokens_per_s": tokens / seconds * arguments.dilation, "late": late}


def traffic(joined: JoinedCluster, clients: int, until: float) -> None:
    """Keep so many requests open, until that time."""
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    numbers = itertools.count(len(joined.served.running.answers))
    while time.monotonic() < until:
        while len(joined.served.running.unfinished) < clients:
            number = next(numbers)
            joined.served.submit([[3 + (number * 7 + place) % 800 for place in range(PROMPT)]], [params])
        joined.served.take(0.02)


def simulated(count: int, arguments: argparse.Namespace) -> float:
    """Tokens per second of the same cluster in virtual time."""
    scenario = parse(
        {
            "model": MODEL,
            "devices": tomllib.loads(DEVICES),
            "seed": 1,
            "duration": arguments.warm + arguments.seconds,
            "warm_up": arguments.warm,
            "workers": {"count": count, "max_num_seqs": SEATS, "dispatch": "round-robin"},
            "servers": {"count": count},
            "workload": {
                "kind": "closed",
                "clients": count * arguments.clients,
                "prompt": [PROMPT, PROMPT],
                "answer": [ANSWER, ANSWER],
            },
        },
        Path(),
    )
    return float(SimulatedCluster(scenario, find_model(MODEL)).run().throughput)


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="tokens per second of the modelled devices' time")
    for column in ("hosts", "real", "of 1 host", "late", "simulated", "of 1 host", "simulated / real"):
        table.add_column(column, justify="right")
    first = rows[0]
    for row in rows:
        table.add_row(
            *(str(row["hosts"]), f"{row['tokens_per_s']:,.0f}"),
            f"{row['tokens_per_s'] / first['tokens_per_s']:.2f}x",
            f"{row['late']:.1%}",
            f"{row['simulated']:,.0f}",
            f"{row['simulated'] / first['simulated']:.2f}x",
            f"{row['simulated'] / row['tokens_per_s']:.2f}",
        )
    console.print(table)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--clients", type=int, default=8, help="open requests for each worker")
    parser.add_argument("--dilation", type=float, default=40.0, help="factor of every modelled duration")
    parser.add_argument("--warm", type=float, default=0.3, help="seconds of the devices' time, not measured")
    parser.add_argument("--seconds", type=float, default=1.0, help="of the devices' time")


def quick(arguments: argparse.Namespace) -> None:
    arguments.hosts, arguments.warm, arguments.seconds = [1, 2], 0.05, 0.2
