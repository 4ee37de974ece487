"""The same checkpoint, prompts and greedy tokens through two trees of moesaic: is one as fast as the other?

    git worktree add /tmp/before HEAD~10 && make -C /tmp/before setup
    python benchmarks/make_checkpoint.py qwen3-moe-0.96b /tmp/qwen
    python benchmarks/before_after.py /tmp/qwen --before /tmp/before

Each tree computes in a process of its own, with the Python of its .venv. The earlier tree runs in two
processes: what differs between these two is the machine, not the code. All take turns. Shown are medians
over the rounds, with the lowest and the highest value, and whether the tokens are those of the earlier tree.
"""

from __future__ import annotations

import argparse
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


def tree(name: str, root: Path, model: Path, threads: int) -> Engine:
    """The package moesaic of the tree at `root`, imported."""
    python, peer = root / ".venv" / "bin" / "python", root / "benchmarks" / "peer_moesaic.py"
    command = [str(python), str(peer), str(model), str(threads), "{}"]
    return Engine(name, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))


def measure(engines: list[Engine], concurrency: int, arguments: argparse.Namespace) -> list[list[str]]:
    """One row for each engine."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(arguments.prompt_len)] for _ in range(concurrency)]
    runs: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    for turn in range(arguments.rounds + 1):
        for engine in engines:
            answer = engine.ask(do="run", prompts=prompts, new=arguments.gen_len)
            time.sleep(PAUSE)
            if turn:  # the first one warms up
                runs[engine.name].append(answer)
    wanted = runs[engines[0].name][0]["tokens"]
    decoded = concurrency * (arguments.gen_len - 1)
    return [
        [
            str(concurrency),
            name,
            spread([concurrency * arguments.prompt_len / run["prefill_s"] for run in found]),
            spread([decoded / run["decode_s"] for run in found]),
            "yes" if all(run["tokens"] == wanted for run in found) else "no",
        ]
        for name, found in runs.items()
    ]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="directory of the checkpoint")
    parser.add_argument("--before", type=Path, required=True, help="the earlier tree, with its .venv")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="requests at once")
    parser.add_argument("--rounds", type=int, default=5, help="turns that count, of each process")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--gen-len", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each process")
    arguments = parser.parse_args()
    trees = ("before", arguments.before), ("after", HERE.parent), ("before again", arguments.before)
    engines = [tree(name, root, arguments.model, arguments.threads) for name, root in trees]
    table = Table("requests", "tree", "prefill tokens/s", "decode tokens/s", "same tokens")
    try:
        for concurrency in arguments.concurrency:
            for row in measure(engines, concurrency, arguments):
                table.add_row(*row)
    finally:
        for engine in engines:
            engine.stop()
    Console().print(table)


if __name__ == "__main__":
    main()
