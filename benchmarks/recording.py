"""What `serve --record-routing` costs: two servers of one model, one of which records, take turns.

    python benchmarks/recording.py demo
    python benchmarks/recording.py /tmp/qwen --rounds 8 --concurrency 8 --new 32
    python benchmarks/recording.py demo --cpu      # what the recorder itself computes, in one process

Each round sends the same requests to both, in alternating order. Shown are medians of output tokens/s and of
the rounds' ratios; the spread of the ratios says how much of it is the machine.

--cpu counts CPU time instead, which other processes hardly change: one attention worker in this process runs
all requests, and each call of its recorder is timed. The recorder's share of the worker's CPU time is what
recording costs where steps follow each other without a pause. The profile that the server makes of the rows
is timed beside it; that happens once a minute, in another process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from one_server import PROMPT, rate, served
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moesaic.config import CacheConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.request import Request, SamplingParams
from moesaic.core.routing import draw
from moesaic.runtime import in_memory
from moesaic.runtime.build import build_worker
from moesaic.runtime.context import WorkerContext
from moesaic.runtime.routing_recorder import REQUESTS_TOGETHER, SEED, build_recorder
from moesaic.runtime.worker import Worker
from moesaic.trace.parts import part_path
from moesaic.trace.routing import INTERVAL, Collector, prepare
from moesaic.transport.local import LocalConnection, local_pair

MOST_BYTES = 1 << 28


def measure(arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """(without, recording) tokens/s of each round."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        record = ["--record-routing", str(folder / "profile.npz")]
        record += ["--record-routing-share", str(arguments.share)]
        plain = stack.enter_context(served(arguments.model, arguments.port, ()))
        recording = stack.enter_context(served(arguments.model, arguments.port + 1, record))
        rounds = []
        for seed in track(range(arguments.rounds), "rounds", console=Console(stderr=True)):
            order = (plain, recording) if seed % 2 else (recording, plain)
            found = {server.url: rate(server.url, arguments, seed) for server in order}
            rounds.append((found[plain.url], found[recording.url]))
    return rounds


def show(rounds: Sequence[tuple[float, float]], console: Console) -> None:
    plain, recording = zip(*rounds, strict=True)
    ratios = sorted(after / before for before, after in rounds)
    table = Table()
    for column in ("tokens/s", "recording", "ratio, median", "least", "most"):
        table.add_column(column, justify="right")
    ends = statistics.median(ratios), ratios[0], ratios[-1]
    table.add_row(
        f"{statistics.median(plain):.1f}",
        f"{statistics.median(recording):.1f}",
        *(f"{one:.3f}" for one in ends),
    )
    console.print(table)


# ---- CPU time


class Timed:
    """A recorder whose CPU time is counted."""

    def __init__(self, made: Any) -> None:
        self.seconds = 0.0
        self.steps = 0
        self._made = made

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._made, name)

        def timed(*arguments: Any) -> None:
            time.thread_time()  # after a step's products the first look at a clock waits for memory
            begun = time.thread_time()
            call(*arguments)
            self.seconds += time.thread_time() - begun
            self.steps += name == "record_step"

        return timed


def cpu(arguments: argparse.Namespace) -> tuple[list[tuple[float, float, int]], list[float]]:
    """By round: CPU seconds of the worker and of its recorder, and steps; CPU seconds of the profile."""
    timed: list[Timed] = []

    def made(*given: Any) -> Timed:
        timed.append(Timed(build_recorder(*given)))
        return timed[0]

    with tempfile.TemporaryDirectory() as folder, patch.object(in_memory, "build_recorder", made):
        file = Path(folder) / "profile.npz"
        part = part_path(str(file), "attention worker 0")
        assert part is not None
        prepare(file, f"{MOST_BYTES}B")
        ours, theirs = local_pair()
        config = WorkerConfig(
            ModelConfig(arguments.model, threads=1),
            CacheConfig(enable_prefix_caching=False),
            SchedulerConfig(max_num_seqs=arguments.concurrency),
            record=part,
            record_share=arguments.share,
        )
        worker, info = build_worker(WorkerContext(config, theirs, time.monotonic))
        collector = Collector(file, MOST_BYTES)
        rounds, profiles = [], []
        for number in track(range(arguments.rounds + 1), "rounds", console=Console(stderr=True)):
            before = timed[0].seconds, timed[0].steps
            seconds = drained(worker, ours, requests(arguments, number, info.vocab_size))
            rounds.append((seconds, timed[0].seconds - before[0], timed[0].steps - before[1]))
            begun = time.process_time()
            collector.collect()
            collector.save()
            profiles.append(time.process_time() - begun)
    return rounds[1:], profiles[1:]  # the first one records steps for replay


def requests(arguments: argparse.Namespace, number: int, vocab_size: int) -> list[Request]:
    """The requests of a round. They have other ids, so that other requests are recorded."""
    rng = np.random.default_rng(number)
    params = SamplingParams(temperature=0.0, max_tokens=arguments.new, ignore_eos=True, seed=0)
    prompts = rng.integers(3, vocab_size, (arguments.requests, PROMPT)).tolist()
    return [Request(number * len(prompts) + one, prompt, params) for one, prompt in enumerate(prompts)]


def drained(worker: Worker, connection: LocalConnection, requests: list[Request]) -> float:
    """CPU seconds that the worker takes for all of them."""
    connection.send(messages.Submit(requests))
    left, begun = len(requests), time.process_time()
    while left:
        worker.turn(timeout=0.0)
        while (message := connection.receive(0)) is not None:
            if isinstance(message, messages.Tokens):
                left -= sum(end is not None for end in message.finish)
    return time.process_time() - begun


def show_cpu(
    rounds: Sequence[tuple[float, float, int]], profiles: Sequence[float], recorded: float, console: Console
) -> None:
    """recorded: share of the requests, which is --share only where there are many."""
    table = Table()
    for column in ("steps", "requests recorded", "CPU us a step", "recorder us", "share"):
        table.add_column(column, justify="right")
    table.add_column("a profile, ms", justify="right")
    table.add_column("of a minute", justify="right")
    seconds, mine, steps = (sum(one[index] for one in rounds) for index in range(3))
    profile = statistics.median(profiles)
    table.add_row(
        *(str(steps), f"{recorded:.1%}", f"{seconds / steps * 1e6:.0f}", f"{mine / steps * 1e6:.1f}"),
        *(f"{mine / seconds:.2%}", f"{profile * 1e3:.1f}", f"{profile / INTERVAL:.2%}"),
    )
    console.print(table)


def recorded(arguments: argparse.Namespace) -> float:
    """The share of recorded requests in all rounds but the first."""
    ids = range(arguments.requests, (arguments.rounds + 1) * arguments.requests)
    return statistics.fmean(draw(one // REQUESTS_TOGETHER, SEED) < arguments.share for one in ids)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--share", type=float, default=0.05, help="as --record-routing-share")
    parser.add_argument("--port", type=int, default=8731)
    parser.add_argument("--cpu", action="store_true", help="count CPU time in one process")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.cpu:
        show_cpu(*cpu(arguments), recorded(arguments), Console())
        return
    rounds = measure(arguments)
    if arguments.json:
        print(json.dumps([{"plain": before, "recording": after} for before, after in rounds]))
    else:
        show(rounds, Console())


if __name__ == "__main__":
    main()
