"""What it costs to watch a server: measurements with and without a reader of `GET /v1/events` take turns.

    python benchmarks/watcher.py demo
    python benchmarks/watcher.py /tmp/qwen --rounds 6 --requests 16 --new 32
    python benchmarks/watcher.py demo --serve "--attention-workers 2 --expert-servers 3 --min-replicas 2"

One server runs all the time. Each round sends the same requests twice: while one plain client reads the
stream of the live page, and while nobody does. Which comes first alternates. Shown are medians of output
tokens/s and of the rounds' ratios. The spread of the ratios says how much of it is the machine.

The second table has CPU time, which other programs change less. It is that of the server's own process, in
milliseconds per second, while no request runs (--idle seconds each, in turns). The stream comes from that
process. What is read is the first table's "bytes/s" and "events/s".
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from one_server import Served, rate, served
from rich.console import Console
from rich.progress import track
from rich.table import Table

IDLE_TURNS = 4
"""Measurements of CPU time with a reader, and as many without."""


@dataclass
class Read:
    """What a reader of the stream got."""

    bytes: int = 0
    events: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Round:
    """Output tokens/s of one round."""

    alone: float
    watched: float


@dataclass(frozen=True)
class Found:
    """All that was measured."""

    rounds: list[Round]
    idle_alone: list[float]
    """CPU milliseconds per second of the server's own process, without a reader."""
    idle_watched: list[float]
    read: Read


@contextmanager
def watching(url: str, read: Read) -> Iterator[None]:
    """One client reads the stream inside. It counts in `read` and does nothing else."""
    with urllib.request.urlopen(f"{url}/v1/events") as answer:
        ended = threading.Event()

        def follow() -> None:
            begun = time.monotonic()
            while not ended.is_set() and (line := answer.readline()):
                read.bytes += len(line)
                read.events += line.startswith(b"event: ")
            read.seconds += time.monotonic() - begun

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            ended.set()  # the next event, half a second later, ends the thread
            thread.join()


def cpu_seconds(pid: int) -> float:
    """CPU time of the threads that a process has now, without that of its children."""
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):  # /proc/PID/stat counts in 10 ms
        with suppress(OSError):  # the thread has just ended
            nanoseconds += int(thread.read_text().split()[0])
    return 1e-9 * nanoseconds


def idle(server: Served, seconds: float) -> float:
    """CPU milliseconds per second of the server's own process, while nobody asks."""
    begun, before = time.monotonic(), cpu_seconds(server.pid)
    time.sleep(seconds)
    return 1e3 * (cpu_seconds(server.pid) - before) / (time.monotonic() - begun)


def measure(arguments: argparse.Namespace) -> Found:
    found = Found([], [], [], Read())
    console = Console(stderr=True)
    with served(arguments.model, arguments.port, shlex.split(arguments.serve)) as server:
        rate(server.url, arguments, arguments.rounds)  # a first round, which is not counted
        for seed in track(range(arguments.rounds), "rounds", console=console):
            rates: dict[bool, float] = {}
            for watched in (False, True) if seed % 2 else (True, False):
                if watched:
                    with watching(server.url, found.read):
                        rates[watched] = rate(server.url, arguments, seed)
                else:
                    rates[watched] = rate(server.url, arguments, seed)
            found.rounds.append(Round(rates[False], rates[True]))
        for _ in track(range(IDLE_TURNS), "CPU time", console=console):
            found.idle_alone.append(idle(server, arguments.idle))
            with watching(server.url, found.read):
                found.idle_watched.append(idle(server, arguments.idle))
    return found


def show(found: Found, console: Console) -> None:
    ratios = sorted(one.watched / one.alone for one in found.rounds)
    table = _table("tokens/s", "watched", "ratio, median", "least", "most", "events/s", "bytes/s")
    table.add_row(
        f"{statistics.median(one.alone for one in found.rounds):.1f}",
        f"{statistics.median(one.watched for one in found.rounds):.1f}",
        *(f"{one:.3f}" for one in (statistics.median(ratios), ratios[0], ratios[-1])),
        f"{found.read.events / found.read.seconds:.1f}",
        f"{found.read.bytes / found.read.seconds:.0f}",
    )
    console.print(table)
    table = _table("CPU ms/s of the server's process, idle", "watched", "difference")
    alone, watched = statistics.median(found.idle_alone), statistics.median(found.idle_watched)
    table.add_row(f"{alone:.1f}", f"{watched:.1f}", f"{watched - alone:.1f}")
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table()
    for name in columns:
        table.add_column(name, justify="right")
    return table


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=64, help="of each half of a round")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds of each measurement of CPU time")
    parser.add_argument("--serve", default="--expert-servers 1", help="flags of the server, as one word")
    parser.add_argument("--port", type=int, default=8741)
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
    arguments = parser.parse_args(words)
    found = measure(arguments)
    if arguments.json:
        print(json.dumps(asdict(found)))
    else:
        show(found, Console())


if __name__ == "__main__":
    main()
