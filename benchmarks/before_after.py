"""The same checkpoint, prompts and greedy tokens through two trees of moesaic: is one as fast as the other?

    git worktree add /tmp/before HEAD~10 && make -C /tmp/before setup
    python benchmarks/make_checkpoint.py qwen3-moe-0.96b /tmp/qwen
    python benchmarks/before_after.py /tmp/qwen --before /tmp/before
    python benchmarks/before_after.py /tmp/qwen --before /tmp/before --services

Each tree computes in a process of its own, with the Python of its .venv; with --services in an attention
worker and an expert server, each with half of the threads. The earlier tree runs twice: what differs between
these two is the machine, not the code. All take turns. A ratio is that of a round, to the earlier tree; shown
are the median over the rounds and its interval of 95 %, by the order statistics that a fair coin gives.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from engines import Engine
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
PAUSE = 0.3
"""Seconds of waiting after each turn, as in peers.py."""
CONFIDENCE = 0.95


def start_engine(name: str, tree: Path, arguments: argparse.Namespace) -> Engine:
    """The package moesaic of the tree at `tree`, loaded in a child process."""
    python, model, threads = tree / ".venv" / "bin" / "python", str(arguments.model), arguments.threads
    command = [str(python), str(tree / "benchmarks" / "peer_moesaic.py"), model, str(threads), "{}"]
    if arguments.services:
        command = [str(python), str(HERE / "peer_services.py"), str(tree), model, str(max(1, threads // 2))]
    return Engine(name, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))


def measure_rounds(
    engines: list[Engine], concurrency: int, arguments: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """The answers of each engine, one a round. The order of the engines changes from round to round."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(arguments.prompt_len)] for _ in range(concurrency)]
    answers: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    for turn in range(arguments.rounds + 1):
        for engine in rng.sample(engines, len(engines)):
            answer = engine.ask(do="run", prompts=prompts, new=arguments.gen_len)
            time.sleep(PAUSE)
            if turn:  # the first one warms up
                answers[engine.name].append(answer)
    return answers


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """The median, and the two values between which the true median lies with CONFIDENCE.

    Example: of 12 values these are the third lowest and the third highest.
    """
    ordered, count = sorted(values), len(values)
    tail, rank = 0.5**count, 0
    while rank + 1 < count // 2 and 2 * (tail + math.comb(count, rank + 1) * 0.5**count) <= 1 - CONFIDENCE:
        rank += 1
        tail += math.comb(count, rank) * 0.5**count
    return statistics.median(ordered), ordered[rank], ordered[count - 1 - rank]


def rows(answers: dict[str, list[dict[str, Any]]], concurrency: int) -> list[dict[str, Any]]:
    """One row for each tree: median seconds, their ratios to the first tree, and whether tokens agree."""
    first = next(iter(answers))
    return [
        {
            "requests": concurrency,
            "tree": name,
            "same_tokens": all(run["tokens"] == answers[first][0]["tokens"] for run in runs),
            **{
                stage: {
                    "median_s": statistics.median(run[stage] for run in runs),
                    "ratio": median_interval(
                        [run[stage] / base[stage] for run, base in zip(runs, answers[first], strict=True)]
                    ),
                }
                for stage in ("prefill_s", "decode_s")
            },
        }
        for name, runs in answers.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of the checkpoint, or demo")
    parser.add_argument("--before", type=Path, required=True, help="the earlier tree, with its .venv")
    parser.add_argument("--services", action="store_true", help="a worker and an expert server")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="requests at once")
    parser.add_argument("--rounds", type=int, default=12, help="turns that count, of each process")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--gen-len", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each tree")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    trees = ("before", arguments.before), ("after", HERE.parent), ("before again", arguments.before)
    engines = [start_engine(name, root, arguments) for name, root in trees]
    table = Table("requests", "tree", "prefill ms", "ratio", "decode ms", "ratio", "same tokens")
    shown: list[dict[str, Any]] = []
    try:
        for concurrency in arguments.concurrency:
            shown += rows(measure_rounds(engines, concurrency, arguments), concurrency)
    finally:
        for engine in engines:
            engine.stop()
    if arguments.json:
        print(json.dumps(shown))
        return
    for row in shown:
        cells = [
            text
            for stage in ("prefill_s", "decode_s")
            for text in (
                f"{1e3 * row[stage]['median_s']:.1f}",
                "{:.3f} ({:.3f} to {:.3f})".format(*row[stage]["ratio"]),
            )
        ]
        table.add_row(str(row["requests"]), row["tree"], *cells, "yes" if row["same_tokens"] else "no")
    Console().print(table)


if __name__ == "__main__":
    main()
