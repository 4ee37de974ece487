"""`prefill`: prompts on a prefill worker against chunked prompts, with requests that arrive over time."""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from countdown import Clock, Tell
from rich.console import Console
from rich.table import Table

from disaggregated.serving import Served, percentile
from moesaic.cluster.launch import launch
from moesaic.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.metrics import TransferStats
from moesaic.jobs.bench.arrivals import arrival_times
from moesaic.jobs.bench.lengths import TraceRow, read_trace

FEWEST = 8
"""Requests of a run at least."""
LONGEST_TRACE = 1_000_000
"""Requests of a trace that are read at most."""
CHUNKS = (64, 512)
"""Rows of a step with chunked prompts. A small step delays next tokens less, and a prompt takes longer."""


@dataclass(frozen=True)
class Setting:
    """A way to use two cores."""

    name: str
    cluster: ClusterConfig
    rows: int
    """Rows of a step."""


SETTINGS = (
    Setting("prefill apart", ClusterConfig(attention_workers=1, prefill_workers=1), CHUNKS[-1]),
    *(Setting(f"two workers, chunks of {rows}", ClusterConfig(attention_workers=2), rows) for rows in CHUNKS),
)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each setting and round. All settings get the same arrivals."""
    names = [setting.name for setting in SETTINGS]
    steps = [f"start of {name}" for name in names] + [f"{name}, all at once" for name in names]
    rows, rates = [], []
    with ExitStack() as stack, Clock(steps + arguments.rounds * names) as clock:
        clock.what = "start"
        engines = [
            clock.timed(step, partial(_entered, stack, _serving(setting, arguments)))
            for step, setting in zip(steps, SETTINGS, strict=False)
        ]
        clock.what = "speed"
        for engine in engines:
            step = partial(_saturation, engine, arguments)
            rates.append(clock.timed(f"{engine.name}, all at once", step))
        rate = arguments.rate or arguments.load * statistics.median(rates)
        for turn in range(arguments.rounds):
            clock.what = f"round {turn + 1} of {arguments.rounds}"
            requests = _requests(arguments, rate, turn)
            for engine in engines:
                found = clock.timed(engine.name, partial(one_run, engine, requests, turn))
                rows.append({"setting": engine.name, "round": turn, "requests": len(requests)} | found)
    return rows


def _entered(stack: ExitStack, serving: AbstractContextManager[Served], tell: Tell) -> Served:
    return stack.enter_context(serving)


@contextmanager
def _serving(setting: Setting, arguments: argparse.Namespace) -> Iterator[Served]:
    """The setting's processes, each with one thread on a core of its own."""
    worker = WorkerConfig(
        ModelConfig(arguments.model, threads=1, max_model_len=arguments.max_model_len),
        CacheConfig(arguments.kv_cache_memory, enable_prefix_caching=False),
        SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=max(64, setting.rows)),
    )
    with launch(worker, setting.cluster, seed=0) as launched:
        served = Served(setting.name, launched)
        served.until_ready()
        _pin(served)
        yield served


def _pin(served: Served) -> None:
    assert served.launched.supervisor is not None
    cores = sorted(os.sched_getaffinity(0))
    for index, one in enumerate(served.launched.supervisor.status()):
        for thread in Path(f"/proc/{one.pid}/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread.name), {cores[index % len(cores)]})


def _saturation(engine: Served, arguments: argparse.Namespace, tell: Tell) -> float:
    """Requests/s if many requests of mean length are sent at once."""
    requests = _requests(arguments, rate=math.inf, seed=1, count=arguments.saturation)
    started = time.monotonic()
    for one, prompt in zip(requests, _prompts(requests, 1), strict=True):
        engine.submit(prompt, one.output_tokens)
    while engine.open:
        engine.take(1.0)
        tell(len(requests) - len(engine.open), len(requests))
    engine.times.clear()
    return len(requests) / (time.monotonic() - started)


def _requests(
    arguments: argparse.Namespace, rate: float, seed: int, count: int | None = None
) -> list[TraceRow]:
    """What arrives: the trace's requests, or prompts of random length. Arrivals of a trace are scaled to the
    rate, unless --trace-speed says how fast they are. count: None: as many as --requests or --seconds say."""
    longest, limit = arguments.max_model_len, count or arguments.requests
    known = limit or max(FEWEST, math.ceil(rate * arguments.seconds))
    rng = np.random.default_rng(seed)
    if arguments.trace is None:
        times = arrival_times(known, rate, rng)
        given = rng.integers(arguments.prompt_len // 2, 2 * arguments.prompt_len, known)
        wanted = rng.integers(1, 2 * arguments.gen_len, known)
        rows = [TraceRow(*one) for one in zip(times.tolist(), given.tolist(), wanted.tolist(), strict=True)]
    else:
        whole = arguments.trace_speed is not None and limit is None
        rows = read_trace(arguments.trace, LONGEST_TRACE if whole else known, 1.0, arguments.length_scale)
        speed = arguments.trace_speed or rate * max(1e-9, rows[-1].arrival) / len(rows)
        rows = [TraceRow(row.arrival / speed, row.input_tokens, row.output_tokens) for row in rows]
        rows = [row for row in rows if not whole or row.arrival <= arguments.seconds]
    fit = [(row, min(row.output_tokens, longest // 2)) for row in rows]
    return [TraceRow(row.arrival, min(row.input_tokens, longest - new - 1), new) for row, new in fit]


def _prompts(requests: list[TraceRow], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 900) for _ in range(one.input_tokens)] for one in requests]


def one_run(engine: Served, requests: list[TraceRow], seed: int, tell: Tell) -> dict[str, float]:
    """Sends the requests when they arrive, and waits for all of them."""
    prompts = _prompts(requests, seed + 100)
    before = engine.settled().worker.transfers
    engine.times.clear()
    due: dict[int, float] = {}
    started, left = time.monotonic(), list(zip(requests, prompts, strict=True))[::-1]
    while left or engine.open:
        now = time.monotonic() - started
        while left and left[-1][0].arrival <= now:
            request, prompt = left.pop()
            due[engine.submit(prompt, request.output_tokens)] = started + request.arrival
        engine.take(max(0.0, min(0.5, left[-1][0].arrival - now)) if left else 0.5)
        tell(len(requests) - len(left) - len(engine.open), len(requests))
    ended = time.monotonic()
    first = sorted(engine.times[number][0] - at for number, at in due.items())
    gaps = sorted(b - a for one in engine.times.values() for a, b in pairwise(one))
    # the longest pause of each request that has several tokens
    worst = sorted(max(b - a for a, b in pairwise(one)) for one in engine.times.values() if len(one) > 1)
    tokens = sum(map(len, engine.times.values()))
    found = {"requests_per_s": len(requests) / (ended - started), "tokens_per_s": tokens / (ended - started)}
    for name, values in (("ttft", first), ("itl", gaps), ("longest_gap", worst)):
        found |= {f"{name}_p50": percentile(values, 0.5), f"{name}_p99": percentile(values, 0.99)}
    return found | _moved(before, engine.settled().worker.transfers)


def _moved(before: TransferStats, after: TransferStats) -> dict[str, float]:
    sent, seconds = after.sent_bytes - before.sent_bytes, after.sent_seconds - before.sent_seconds
    early = after.early_bytes - before.early_bytes
    return {
        "kv_requests": after.received_requests - before.received_requests,
        "kv_gb": sent / 1e9,
        "kv_gb_per_s": (sent - early) / 1e9 / seconds if seconds else 0.0,
        "kv_early": early / sent if sent else 0.0,
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="prefill apart and chunked, on two cores; medians of the rounds")
    table.add_column("setting")
    columns = ("req/s", "tokens/s", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "longest gap p50", "p99")
    for column in (*columns, "KV GB", "GB/s", "early"):
        table.add_column(column, justify="right")
    for setting in SETTINGS:
        mine = [row for row in rows if row["setting"] == setting.name]
        names = [name for name in mine[0] if name not in ("setting", "round", "requests")]
        middle = {name: statistics.median(row[name] for row in mine) for name in names}
        times = [
            f"{1e3 * middle[f'{name}_{share}']:.1f}"
            for name in ("ttft", "itl", "longest_gap")
            for share in ("p50", "p99")
        ]
        rates = [f"{middle['requests_per_s']:.2f}", f"{middle['tokens_per_s']:.1f}"]
        moved = [f"{middle['kv_gb']:.3f}", f"{middle['kv_gb_per_s']:.2f}", f"{middle['kv_early']:.0%}"]
        moved = moved if middle["kv_gb"] else [""] * 3
        table.add_row(setting.name, *rates, *times, *moved)
    console.print(table)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, help="CSV file of arrivals and lengths; without it: Poisson")
    parser.add_argument("--length-scale", type=float, default=1.0, help="factor of the trace's lengths")
    parser.add_argument(
        "--trace-speed", type=float, help="factor of the trace's arrivals, in place of --load"
    )
    parser.add_argument("--load", type=float, default=0.6, help="arrivals, of the median rate at saturation")
    parser.add_argument("--rate", type=float, help="arrivals in requests/s, in place of --load")
    parser.add_argument("--seconds", type=float, default=22.0, help="for which requests arrive in each run")
    parser.add_argument("--requests", type=int, help="of each run, in place of --seconds")
    parser.add_argument("--saturation", type=int, default=8, help="requests at once that measure the rate")
    parser.add_argument("--prompt-len", type=int, default=256, help="lengths are uniform, a half to twice")
    parser.add_argument("--gen-len", type=int, default=32, help="mean; lengths are uniform from 1 on")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--kv-cache-memory", default="1GiB")
    parser.add_argument("--rounds", type=int, default=3)


def quick(arguments: argparse.Namespace) -> None:
    arguments.rounds, arguments.requests, arguments.saturation = 1, 12, 6
