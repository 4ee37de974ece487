"""`queues`: requests arrive near saturation; rates, and queues by layer over time, by queue policy."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from disaggregated import depths, heatmap
from disaggregated.serving import Served, layout_of, percentile, random_prompts, serving, temporary
from moesaic.config import ClusterConfig

POLICIES = ("defrag", "mtfs", "flfs")
SAMPLE = 0.25
"""Seconds between two samples of the queues. Processes report as often."""


@dataclass
class Watched:
    """The samples of a run. Each list has one entry for each sample."""

    seconds: list[float] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    """Number of requests that have arrived."""
    ended: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    """Number of requests that no step has taken up."""
    waiting_pairs: list[int] = field(default_factory=list)
    """Number of pairs that wait at all expert servers."""
    depths: list[list[float]] = field(default_factory=list)
    """[each SAMPLE seconds][place] rows that wait in the attention workers; the last place is the sampler."""
    runs: list[int] = field(default_factory=list)
    """Number of runs of the attention workers so far."""
    partial_runs: list[int] = field(default_factory=list)
    """Those that computed only some of their worker's rows."""


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each policy and round. All policies get the same arrivals."""
    rows = []
    names = [*(str(layer) for layer in layout_of(arguments.model).layers), "sampler"]
    with ExitStack() as stack, Progress(console=Console(stderr=True)) as progress:
        folder = Path(stack.enter_context(temporary()))
        stack.enter_context(depths.sampled(folder))
        shape = ClusterConfig(
            attention_workers=arguments.attention_workers,
            expert_servers=arguments.expert_servers,
            rebalance_interval=0,
        )
        engines = [
            stack.enter_context(
                serving(policy, arguments.model, 1, shape, schedule="async", queue_policy=policy)
            )
            for policy in POLICIES
        ]
        task = progress.add_task("measuring", total=len(engines) * (arguments.rounds + 1))
        rates = []
        for engine in engines:
            rates.append(_saturation(engine, arguments))
            progress.advance(task)
        rate = arguments.rate or arguments.load * statistics.median(rates)
        for turn in range(arguments.rounds):
            for engine in engines:
                watched, gaps = one_run(engine, arguments, rate, turn, folder)
                row = {"policy": engine.name, "round": turn, "places": names}
                rows.append(row | evaluate(watched, gaps, rate))
                progress.advance(task)
    return rows


def _saturation(engine: Served, arguments: argparse.Namespace) -> float:
    """Requests/s if all requests are sent at once."""
    prompts = random_prompts(arguments.saturation, arguments.prompt_len, 1000)
    run = engine.run(prompts, arguments.gen_len)
    return len(prompts) / max(one[-1] for one in run.times)


def one_run(
    engine: Served, arguments: argparse.Namespace, rate: float, seed: int, folder: Path
) -> tuple[Watched, list[float]]:
    """Poisson arrivals for `arguments.seconds`. Returns the looks, and the gaps between tokens, ascending.

    folder: where the attention workers write how deep their queues are.
    """
    rng = random.Random(seed)
    prompts = iter(random_prompts(100_000, arguments.prompt_len, 1000, seed))
    engine.times.clear()
    watched, started = Watched(), time.monotonic()
    due, look = rng.expovariate(rate), 0.0
    while (now := time.monotonic() - started) < arguments.seconds:
        while due <= now:
            engine.submit(next(prompts), rng.randint(1, 2 * arguments.gen_len))
            due += rng.expovariate(rate)
        if now >= look:
            look += SAMPLE
            _look(engine, watched, now)
        engine.take(max(0.0, min(due, look) - now))
    for number in list(engine.open):
        engine.launched.engine.cancel(number)
    engine.open.clear()
    gaps = sorted(b - a for one in engine.times.values() for a, b in pairwise(one))
    _drain(engine)
    workers = [engine.pid(f"attention worker {number}") for number in range(arguments.attention_workers)]
    samples = [depths.read(folder, worker) for worker in workers]
    watched.depths = depths.binned(samples, started, arguments.seconds, SAMPLE)
    return watched, gaps


def _look(engine: Served, watched: Watched, now: float) -> None:
    counters = engine.counters()
    watched.seconds.append(now)
    watched.arrived.append(len(engine.times))
    watched.ended.append(len(engine.times) - len(engine.open))
    watched.running.append(counters.worker.running)
    watched.waiting.append(counters.worker.waiting)
    watched.runs.append(counters.worker.steps)
    watched.partial_runs.append(counters.worker.partial_runs)
    watched.waiting_pairs.append(sum(one.waiting_pairs for one in counters.servers))


def _drain(engine: Served) -> None:
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        engine.take(0.05)


def evaluate(watched: Watched, gaps: list[float], rate: float) -> dict[str, Any]:
    """Requests/s over the second half, when the queues are filled."""
    half = len(watched.seconds) // 2
    span = watched.seconds[-1] - watched.seconds[half]
    late = watched.depths[len(watched.depths) // 2 :]
    by_place = [statistics.fmean(column) for column in zip(*late, strict=True)]

    def over_time(counts: list[int]) -> float:
        return (counts[-1] - counts[half]) / span

    return {
        "offered_per_s": rate,
        "input_per_s": over_time(watched.arrived),
        "output_per_s": over_time(watched.ended),
        "open_at_end": watched.arrived[-1] - watched.ended[-1],
        "runs": watched.runs[-1] - watched.runs[half],
        "partial_runs": watched.partial_runs[-1] - watched.partial_runs[half],
        "running": statistics.fmean(watched.running[half:]),
        "waiting": statistics.fmean(watched.waiting[half:]),
        "waiting_pairs": statistics.fmean(watched.waiting_pairs[half:]),
        "waiting_rows": sum(by_place),
        "waiting_rows_by_place": by_place,
        "itl_p50": percentile(gaps, 0.5),
        "itl_p99": percentile(gaps, 0.99),
        "over_time": vars(watched),
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Poisson arrivals near saturation, second half of each run, medians of the rounds")
    columns = (
        "input req/s",
        "output req/s",
        "open at end",
        "running",
        "waiting",
        "rows ready",
        "pairs waiting",
        "partial runs",
    )
    table.add_column("policy")
    for column in (*columns, "ITL p50 ms", "p99 ms"):
        table.add_column(column, justify="right")
    for policy in POLICIES:
        mine = [row for row in rows if row["policy"] == policy]
        if not mine:
            continue
        middle = {
            key: statistics.median(row[key] for row in mine)
            for key in mine[0]
            if isinstance(mine[0][key], int | float)
        }
        table.add_row(
            policy,
            *(
                f"{middle['input_per_s']:.2f}",
                f"{middle['output_per_s']:.2f}",
                f"{middle['open_at_end']:.0f}",
            ),
            *(f"{middle['running']:.1f}", f"{middle['waiting']:.1f}"),
            *(f"{middle['waiting_rows']:.1f}", f"{middle['waiting_pairs']:.0f}"),
            f"{middle['partial_runs']:.0f} of {middle['runs']:.0f}",
            *(f"{1e3 * middle['itl_p50']:.0f}", f"{1e3 * middle['itl_p99']:.0f}"),
        )
    console.print(table)


def picture(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """How many rows wait at each place over the last round, a panel for each policy."""
    last = [row for row in rows if row["round"] == rows[-1]["round"]]
    panels = [
        heatmap.Panel(
            f"{row['policy']}: {row['input_per_s']:.1f} requests/s in, {row['output_per_s']:.1f} out",
            row["over_time"]["depths"],
        )
        for row in last
    ]
    title = "rows that wait in the attention workers, by layer"
    return heatmap.draw(panels, last[0]["places"], arguments.seconds, title, "seconds", "rows")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--attention-workers", type=int, default=1)
    parser.add_argument("--expert-servers", type=int, default=1)
    parser.add_argument("--load", type=float, default=0.9, help="arrivals, of the rate at saturation")
    parser.add_argument("--rate", type=float, help="arrivals in requests/s, in place of --load")
    parser.add_argument("--saturation", type=int, default=64, help="requests at once that measure it")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--gen-len", type=int, default=24, help="mean; lengths are uniform from 1 on")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--svg", help="draw the queues by layer over time into this file")


def quick(arguments: argparse.Namespace) -> None:
    arguments.rounds, arguments.seconds, arguments.saturation = 1, 4.0, 24
