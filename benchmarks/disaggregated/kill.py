"""`kill`: tokens/s over time across the SIGKILL of an expert server, with every expert twice and without."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from disaggregated.picture import Line, draw
from disaggregated.serving import SETTLE, Served, random_prompts, serving, spent
from moesaic.config import ClusterConfig

VICTIM = "expert server 1"
AFTER = 5.0
"""Seconds after the kill whose tokens are counted."""
CASES = {"no fault": 2, "min-replicas 2": 2, "min-replicas 1": 1}
"""Name -> minimum replicas. In the first case nothing is killed."""


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each case and round. `bins` has the tokens in each `arguments.bin` seconds."""
    rows = []
    with ExitStack() as stack, Progress(console=Console(stderr=True)) as progress:
        engines = {}
        for name, replicas in CASES.items():
            shape = ClusterConfig(expert_servers=2, min_replicas=replicas, rebalance_interval=0)
            opened = serving(name, arguments.model, 1, shape, schedule=arguments.schedule)
            engines[name] = stack.enter_context(opened)
        task = progress.add_task("measuring", total=len(engines) * arguments.rounds)
        for turn in range(arguments.rounds):
            for name, engine in engines.items():
                rows.append({"case": name, "round": turn, **one_run(engine, arguments, name != "no fault")})
                progress.advance(task)
    return rows


def one_run(engine: Served, arguments: argparse.Namespace, fault: bool) -> dict[str, Any]:
    """Traffic without a pause. After `arguments.before` seconds the victim is killed, or nothing happens."""
    engine.times.clear()
    assert engine.launched.engine.info is not None
    vocabulary = min(engine.launched.engine.info.vocab_size, 1000)
    prompts = iter(random_prompts(100_000, 16, vocabulary))
    _traffic(engine, arguments, prompts, time.monotonic() + arguments.warm)
    before, moment = engine.counters(), time.monotonic() + arguments.before
    _traffic(engine, arguments, prompts, moment)
    if fault:
        os.kill(engine.pid(VICTIM), signal.SIGKILL)
    killed = time.monotonic()
    _traffic(engine, arguments, prompts, killed + arguments.after)
    _settle(engine)
    return evaluate(engine.times, killed, arguments) | _redone(engine, before)


def evaluate(times: dict[int, list[float]], killed: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of a run, from the times of all tokens of each request."""
    moments = [moment - killed for one in times.values() for moment in one]
    gaps = [b - a for one in times.values() for a, b in pairwise(one) if b > killed]
    count = round((arguments.before + arguments.after) / arguments.bin)
    bins = [0] * count
    for moment in moments:
        place = int((moment + arguments.before) // arguments.bin)
        if 0 <= place < count:
            bins[place] += 1
    return {
        "tokens_before": sum(-AFTER <= moment < 0 for moment in moments),
        "tokens_after": sum(0 <= moment < AFTER for moment in moments),
        "longest_gap": max(gaps, default=0.0),
        "bins": bins,
    }


def _traffic(engine: Served, arguments: argparse.Namespace, prompts: Any, until: float) -> None:
    while time.monotonic() < until:
        while len(engine.open) < arguments.concurrency:
            engine.submit(next(prompts), arguments.gen_len)
        engine.take(0.02)


def _settle(engine: Served) -> None:
    """Drop open requests, and wait until all processes serve again."""
    for number in list(engine.open):
        engine.launched.engine.cancel(number)
    engine.open.clear()
    assert engine.launched.supervisor is not None
    deadline = time.monotonic() + 60
    settled = time.monotonic() + SETTLE
    while time.monotonic() < settled or any(
        one.stage != "serving" for one in engine.launched.supervisor.status()
    ):
        engine.take(0.05)
        if time.monotonic() > deadline:
            raise SystemExit(f"{engine.name}: {VICTIM} was not started again")


def _redone(engine: Served, before: Any) -> dict[str, int]:
    took = spent(before, engine.counters())
    return {"resent_pairs": took.resent_pairs, "failovers": took.failovers}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians by case. `kept`: tokens after the kill, divided by those of the control in the same round."""
    found = []
    control = {row["round"]: row for row in rows if row["case"] == "no fault"}
    for case in CASES:
        mine = [row for row in rows if row["case"] == case]
        names = ("tokens_before", "tokens_after", "longest_gap", "resent_pairs", "failovers")
        kept = [row["tokens_after"] / max(1, control[row["round"]]["tokens_after"]) for row in mine]
        found.append(
            {"case": case, "kept": statistics.median(kept)}
            | {name: statistics.median(row[name] for row in mine) for name in names}
        )
    return found


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"SIGKILL of {VICTIM}: {AFTER:.0f} seconds before and after, medians over the rounds")
    for column in ("case", "tokens before", "after", "of no fault", "longest gap s", "pairs re-sent"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in summary(rows):
        table.add_row(
            *(row["case"], f"{row['tokens_before']:.0f}", f"{row['tokens_after']:.0f}", f"{row['kept']:.0%}"),
            *(f"{row['longest_gap']:.2f}", f"{row['resent_pairs']:.0f}"),
        )
    console.print(table)


def picture(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """Draws tokens/s over the seconds since the kill, as medians over the rounds."""
    lines = []
    for case in CASES:
        columns = zip(*(row["bins"] for row in rows if row["case"] == case), strict=True)
        rates = [statistics.median(column) / arguments.bin for column in columns]
        start = -arguments.before + arguments.bin / 2
        lines.append(Line(case, [(start + place * arguments.bin, rate) for place, rate in enumerate(rates)]))
    return draw(lines, "an expert server is killed at 0 s", "seconds", "tokens/s", mark=0.0)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedule", choices=("barrier", "lockstep", "async"), default="lockstep")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--gen-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--before", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--after", type=float, default=8.0, metavar="SECONDS")
    parser.add_argument("--bin", type=float, default=0.25, metavar="SECONDS", help="of the picture")
    parser.add_argument("--svg", help="draw tokens/s over time into this file")


def quick(arguments: argparse.Namespace) -> None:
    arguments.rounds, arguments.before, arguments.after = 1, 2.0, 5.0
