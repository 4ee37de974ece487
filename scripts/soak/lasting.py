"""A real server under traffic in states that last: files, limits, disks, clocks and slow starts.

    python -m scripts.soak.lasting                  200 rounds, about two hours on two cores
    python -m scripts.soak.lasting --minutes 20     as many as fit

A round brings a server of several processes into one state for some seconds, ends it, and waits until the
server is well. Meanwhile clients send requests, and one looks at /health. The law of a round:

- Each request has the tokens of before the first fault, or a 503 or an error event.
- Where /health says 200, a probe request ends within --unavailable-timeout, counted from the last fault.
- Where /health says 503, no request is answered.
- Nothing is left behind: descriptors, sockets, memory segments and processes are as many as before.

The exit code is 1 when a round breaks it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import httpx
from rich import box
from rich.console import Console
from rich.table import Table
from scripts.soak.lasting_faults import FAULTS, Fault, Site
from scripts.soak.lasting_traffic import Prober, Record, Traffic
from scripts.soak.leaks import held_by
from tests.support.moved_clock import compile_clock
from tests.support.troubled_server import TroubledServer, serve

SHAPES = (
    ("--attention-workers", "1", "--expert-servers", "2"),
    ("--attention-workers", "2", "--expert-servers", "2", "--min-replicas", "2"),
)
SHARED = 8
"""Rounds that share a server."""
HEAL_SECONDS = 300.0
"""Seconds in which a server must be well after a state has ended, also on a busy machine."""
LEAK_SECONDS = 20.0
DISK_BYTES = 48 << 20


def start_site(stack: ExitStack, folder: Path) -> Site:
    """The folders and files through which states are made. The server's own folder is a small disk if one can
    be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    can_fill = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    if can_fill:
        stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
    return Site(folder, disk, can_fill, compile_clock(folder))


def held(server: TroubledServer) -> Counter[str]:
    """What the server and its processes hold: kinds of holdings, and their numbers."""
    pids = [process["pid"] for process in server.status()["processes"]]
    total = Counter(processes=len(pids))
    for pid in [server.process.pid, *pids]:
        total += held_by(Path(f"/proc/{pid}"))
    total["descriptors"] = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    return total


def find_leaks(server: TroubledServer, before: Counter[str]) -> list[str]:
    """What the server holds beyond `before`. Looks again for a while, since some of it may still go away."""
    deadline = time.monotonic() + LEAK_SECONDS
    while (more := held(server) - before) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [f"{number} {kind}" for kind, number in more.items()]


def is_well(server: TroubledServer, size: int) -> bool:
    """Whether all processes serve, and a request is answered. Raises AssertionError if the server ended."""
    assert server.process.poll() is None, f"the server ended: {server.log[-1000:]}"
    processes = server.status()["processes"]
    stages = [process["stage"] for process in processes]
    return stages == ["serving"] * size and server.health().status == 200 and server.ask().status == 200


def run_round(
    server: TroubledServer, site: Site, fault: Fault, record: Record, rng: random.Random, outage: float
) -> None:
    """Makes one state, ends it, and looks. Writes into `record` what broke the law.

    outage: the --unavailable-timeout of the server, in seconds.
    """
    size = len(server.status()["processes"])
    server.until(lambda: is_well(server, size), HEAL_SECONDS)
    before = held(server)
    with Traffic(server, record) as traffic, Prober(server, record, outage) as prober:
        time.sleep(rng.uniform(0.5, 1.5))
        prober.note_fault()
        fault.begin(server, site, traffic, rng)
        prober.note_fault()
        time.sleep(rng.choice((1.0, 4.0, 9.0, outage + 5.0)))
        fault.end(server, site, traffic)
        prober.note_fault()
        server.until(lambda: is_well(server, size), HEAL_SECONDS)
        time.sleep(1.0)
    record.leaks += find_leaks(server, before)


def run(arguments: argparse.Namespace, console: Console) -> list[Record]:
    """Runs all rounds, or as many as there is time for."""
    records: list[Record] = []
    deadline = time.monotonic() + 60 * (arguments.minutes or 1e6)
    numbers = iter(range(arguments.rounds) if not arguments.minutes else count())
    is_over = False
    while not is_over:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
            site = start_site(stack, folder)
            shape = SHAPES[len(records) // SHARED % len(SHAPES)]
            server = stack.enter_context(
                serve(site.disk, *shape, outage_seconds=arguments.outage, **site.environment())
            )
            for _ in range(SHARED):
                number = next(numbers, None)
                if number is None or time.monotonic() > deadline:
                    is_over = True
                    break
                rng = random.Random(f"{arguments.seed}/{number}")
                faults = [fault for fault in FAULTS if fault.can_be_made(site)]
                fault = faults[number % len(faults)]
                record = Record(number, fault.name)
                records.append(record)
                begin = time.monotonic()
                try:
                    run_round(server, site, fault, record, rng, arguments.outage)
                except (AssertionError, OSError, ValueError, httpx.HTTPError) as error:
                    record.broken.append(f"{type(error).__name__}: {str(error)[:2000]}")
                record.seconds = time.monotonic() - begin
                console.print(record.describe(), markup=False, highlight=False)
                if record.broken:
                    break
            if not is_over and server.process.poll() is None and (code := server.stop()):
                records[-1].broken.append(f"SIGTERM: exit code {code}")
    return records


def show(records: list[Record], console: Console) -> None:
    """Prints the summary by kinds of states."""
    table = Table(title="states that last", box=box.SIMPLE, padding=(0, 0, 0, 1))
    for column in ("state", "rounds", "requests", "503", "lost", "different", "leaks", "probes", "wrong"):
        table.add_column(column, justify="left" if column == "state" else "right")
    for name in [*(fault.name for fault in FAULTS), "all"]:
        rows = [record for record in records if name in (record.fault, "all")]
        sums = [sum(values) for values in zip(*(row.numbers() for row in rows), strict=True)]
        numbers = [len(rows), *(sums or [0] * 7)]
        table.add_row(name, *(f"{number:,}" for number in numbers))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.soak.lasting", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--minutes", type=float, help="begin no round after so many, whatever --rounds says")
    parser.add_argument("--seed", default="0", help="of what is drawn: who dies, and for how long")
    parser.add_argument(
        "--outage", type=float, default=10.0, help="--unavailable-timeout; longer than a start takes"
    )
    parser.add_argument("--json", type=Path, help="write the rounds here")
    arguments = parser.parse_args()
    records = run(arguments, Console(stderr=True, width=200))
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(record) for record in records], indent=2))
    show(records, Console())
    return 0 if records and all(record.is_good for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
