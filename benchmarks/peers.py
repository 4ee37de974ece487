"""The same checkpoint, prompts and greedy tokens through moesaic and its peers, side by side.

    python benchmarks/make_checkpoint.py qwen3-moe-0.96b /tmp/qwen
    python benchmarks/peers.py /tmp/qwen

Every engine stays loaded in a process of its own and they take turns, so that a slow minute of the
machine hits all of them. Shown are medians over the rounds. `prefill` is prompt tokens over the time
until every request has its first token; `decode` is all later tokens over the time after that; `GB/s`
is the weights that a decode step reads (the distinct experts that were routed to, counted) over its
time; `equal` counts the answers whose greedy tokens are moesaic's own.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

HERE = Path(__file__).parent


@dataclass
class Engine:
    """A child process, and one way to use it."""

    name: str
    process: subprocess.Popen[str]
    options: dict[str, Any] = field(default_factory=dict)

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(self.options | order) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} died; see its messages above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def child(script: str, model: str, threads: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / script), model, str(threads)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def start(model: str, threads: int, implementations: list[str]) -> list[Engine]:
    moesaic = Engine("moesaic", child("peer_moesaic.py", model, threads))
    peer = child("peer_transformers.py", model, threads)
    others = [Engine(f"transformers {name}", peer, {"experts": name}) for name in implementations]
    return [moesaic, *others]


def measure(engines: list[Engine], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per (engine, concurrency)."""
    rng = random.Random(0)
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        total = len(arguments.concurrency) * (arguments.rounds + 1) * len(engines)
        task = progress.add_task("measuring", total=total)
        for concurrency in arguments.concurrency:
            prompts = [[rng.randrange(256) for _ in range(arguments.prompt_len)] for _ in range(concurrency)]
            runs: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
            for turn in range(arguments.rounds + 1):
                for engine in engines:
                    answer = engine.ask(do="run", prompts=prompts, new=arguments.gen_len)
                    if turn:  # the first one warms up
                        runs[engine.name].append(answer)
                    progress.advance(task)
            step_bytes = engines[0].ask(do="bytes", prompts=prompts)["bytes"]
            rows += [
                summarise(name, concurrency, answers, arguments, step_bytes, runs)
                for name, answers in runs.items()
            ]
    return rows


def summarise(
    name: str,
    concurrency: int,
    answers: list[dict[str, Any]],
    arguments: argparse.Namespace,
    step_bytes: float,
    runs: dict[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    decode_s = statistics.median(answer["decode_s"] for answer in answers)
    prefill_s = statistics.median(answer["prefill_s"] for answer in answers)
    steps = arguments.gen_len - 1
    ours = runs["moesaic"][0]["tokens"]
    same = sum(mine == theirs for mine, theirs in zip(ours, answers[0]["tokens"], strict=True))
    return {
        "engine": name,
        "concurrency": concurrency,
        "prefill_tokens_per_s": concurrency * arguments.prompt_len / prefill_s,
        "decode_tokens_per_s": concurrency * steps / decode_s,
        "decode_gb_per_s": step_bytes * steps / decode_s / 1e9,
        "peak_gib": max(answer["peak_bytes"] for answer in answers) / 2**30,
        "same_tokens": f"{same}/{concurrency}",
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="greedy, float32, medians; ratios are moesaic's over that engine's")
    for column in (
        "concurrency",
        "engine",
        "prefill tok/s",
        "ratio",
        "decode tok/s",
        "ratio",
        "GB/s",
        "peak GiB",
    ):
        table.add_column(column, justify="left" if column == "engine" else "right")
    table.add_column("equal", justify="right")
    ours = {row["concurrency"]: row for row in rows if row["engine"] == "moesaic"}
    for row in rows:
        mine = ours[row["concurrency"]]
        table.add_row(
            str(row["concurrency"]),
            row["engine"],
            f"{row['prefill_tokens_per_s']:.1f}",
            f"{mine['prefill_tokens_per_s'] / row['prefill_tokens_per_s']:.2f}x",
            f"{row['decode_tokens_per_s']:.1f}",
            f"{mine['decode_tokens_per_s'] / row['decode_tokens_per_s']:.2f}x",
            f"{row['decode_gb_per_s']:.1f}",
            f"{row['peak_gib']:.2f}",
            row["same_tokens"],
            end_section=row is rows[-1] or rows[rows.index(row) + 1]["concurrency"] != row["concurrency"],
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--gen-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--experts", nargs="+", default=["eager", "grouped_mm"], help="of transformers")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    engines = start(arguments.model, arguments.threads, arguments.experts)
    rows = measure(engines, arguments)
    show(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))
    for engine in engines:
        engine.process.kill()
        engine.process.wait()


if __name__ == "__main__":
    main()
