"""`one`: an attention worker and an expert server on the cores of one process with two threads."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from disaggregated.serving import Served, medians, random_prompts, serving
from moesaic.config import ClusterConfig

SCHEDULES: dict[str, dict[str, Any]] = {
    "lockstep 1": {"schedule": "lockstep"},
    "lockstep 2": {"schedule": "lockstep", "inflight_batches": 2},
    "lockstep 1, partial": {"schedule": "lockstep", "combine": "partial"},
    "async": {"schedule": "async"},
}
ALONE = "one process"


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each way of serving and each concurrency."""
    runs: dict[tuple[int, str], list[dict[str, float]]] = {}
    with ExitStack() as stack, Progress(console=Console(stderr=True)) as progress:
        engines = [stack.enter_context(serving(ALONE, arguments.model, 2))]
        pair = ClusterConfig(expert_servers=1, rebalance_interval=0)
        for name, settings in SCHEDULES.items():
            engines.append(
                stack.enter_context(serving(name, arguments.model, arguments.threads, pair, **settings))
            )
        total = (1 + arguments.rounds * len(arguments.concurrency)) * len(engines)
        task = progress.add_task("measuring", total=total)
        for engine in engines:  # the first run of each is for warmth
            one_run(engine, arguments, min(arguments.concurrency), 4)
            progress.advance(task)
        for concurrency in arguments.concurrency:
            for _ in range(arguments.rounds):
                for engine in engines:
                    row = one_run(engine, arguments, concurrency, arguments.gen_len)
                    runs.setdefault((concurrency, engine.name), []).append(row)
                    progress.advance(task)
    return [
        {"concurrency": concurrency, "engine": name, **medians(rows)}
        for (concurrency, name), rows in runs.items()
    ]


def one_run(engine: Served, arguments: argparse.Namespace, concurrency: int, new: int) -> dict[str, float]:
    assert engine.launched.engine.info is not None
    vocabulary = min(engine.launched.engine.info.vocab_size, 1000)
    run, took = engine.measured(random_prompts(concurrency, arguments.prompt_len, vocabulary), new)
    return {
        "prefill_tokens_per_s": run.prefill_tokens_per_s,
        "decode_tokens_per_s": run.decode_tokens_per_s,
        "worker_waiting": took.worker_waiting / took.seconds,
        "server_idle": 1 - sum(took.server_busy) / took.seconds if took.server_busy else 0.0,
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="one attention worker + one expert server against one process, on two cores")
    for column in ("reqs", "served by", "prefill tok/s", "ratio", "decode tok/s", "ratio"):
        table.add_column(column, justify="left" if column == "served by" else "right")
    table.add_column("worker waits", justify="right")
    table.add_column("server idle", justify="right")
    base = {row["concurrency"]: row for row in rows if row["engine"] == ALONE}
    for row in rows:
        alone, apart = base[row["concurrency"]], row["engine"] != ALONE
        table.add_row(
            str(row["concurrency"]),
            row["engine"],
            f"{row['prefill_tokens_per_s']:.1f}",
            f"{row['prefill_tokens_per_s'] / alone['prefill_tokens_per_s']:.2f}x",
            f"{row['decode_tokens_per_s']:.1f}",
            f"{row['decode_tokens_per_s'] / alone['decode_tokens_per_s']:.2f}x",
            f"{row['worker_waiting']:.0%}" if apart else "",
            f"{row['server_idle']:.0%}" if apart else "",
            end_section=row["engine"] == list(SCHEDULES)[-1],
        )
    console.print(table)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2, help="of the worker and of the server, each")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--gen-len", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)


def quick(arguments: argparse.Namespace) -> None:
    arguments.concurrency, arguments.rounds, arguments.gen_len = [1, 8], 1, 8
