"""Engines that take turns at batches of requests, and their throughput beside that of the first one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from disaggregated.serving import Served, medians, random_prompts


def take_turns(engines: Sequence[Served], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row of medians for each concurrency and engine.

    A round has every concurrency and every engine. After `arguments.minutes` no other round begins.
    """
    runs: dict[tuple[int, str], list[dict[str, float]]] = {
        (concurrency, engine.name): [] for concurrency in arguments.concurrency for engine in engines
    }
    deadline = time.monotonic() + 60 * arguments.minutes
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=len(engines) + arguments.rounds * len(runs))
        for engine in engines:  # the first run of each is for warmth
            one_run(engine, arguments, min(arguments.concurrency), 4)
            progress.advance(task)
        for number in range(arguments.rounds):
            if number and time.monotonic() > deadline:
                break
            for concurrency in arguments.concurrency:
                for engine in engines:
                    row = one_run(engine, arguments, concurrency, arguments.gen_len)
                    runs[concurrency, engine.name].append(row)
                    progress.advance(task)
    return [
        {"concurrency": concurrency, "engine": name, "rounds": len(rows), **medians(rows)}
        for (concurrency, name), rows in runs.items()
    ]


def one_run(engine: Served, arguments: argparse.Namespace, concurrency: int, new: int) -> dict[str, float]:
    """Throughput of both phases, and the shares of the time in which processes had nothing to do."""
    assert engine.launched.engine.info is not None
    vocabulary = min(engine.launched.engine.info.vocab_size, 1000)
    run, took = engine.measured(random_prompts(concurrency, arguments.prompt_len, vocabulary), new)
    busy = took.server_busy
    return {
        "prefill_tokens_per_s": run.prefill_tokens_per_s,
        "decode_tokens_per_s": run.decode_tokens_per_s,
        "worker_waiting": took.worker_waiting / took.seconds,
        "server_idle": 1 - sum(busy) / len(busy) / took.seconds if busy else 0.0,
    }


def show_beside(rows: Sequence[dict[str, Any]], base: str, title: str, console: Console) -> None:
    """A table whose ratios are those to the engine `base`."""
    table = Table(title=title)
    for column in ("reqs", "served by", "prefill tok/s", "ratio", "decode tok/s", "ratio"):
        table.add_column(column, justify="left" if column == "served by" else "right")
    table.add_column("worker waits", justify="right")
    table.add_column("server idle", justify="right")
    alone = {row["concurrency"]: row for row in rows if row["engine"] == base}
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        beside, apart = alone[row["concurrency"]], row["engine"] != base
        cells = [str(row["concurrency"]), row["engine"]]
        for phase in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            cells += [f"{row[phase]:.1f}", f"{row[phase] / beside[phase]:.2f}x"]
        shares = [f"{row[name]:.0%}" if apart else "" for name in ("worker_waiting", "server_idle")]
        last = after is None or after["concurrency"] != row["concurrency"]
        table.add_row(*cells, *shares, end_section=last)
    console.print(table)


def add(parser: argparse.ArgumentParser, rounds: int, minutes: float) -> None:
    """The arguments that `take_turns` reads. rounds, minutes: their defaults."""
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--gen-len", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="begin no round after so many (%(default)g)"
    )


def quick(arguments: argparse.Namespace) -> None:
    arguments.concurrency, arguments.rounds, arguments.gen_len = [1, 8], 1, 8
