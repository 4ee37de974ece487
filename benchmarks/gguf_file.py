"""One GGUF file through moesaic and llama.cpp, side by side: for files of real sizes.

    benchmarks/setup_peer.sh llama /tmp/llama
    python benchmarks/gguf_file.py FILE.gguf --llama /tmp/llama --kernels auto avx512_int8

Each engine has a process of its own, and the engines take turns. Shown are medians over the rounds, as in
peers.py. `ready` is the time from the start of the process to the first token of one short request. `of
memory` is the weights that moesaic's decode step reads, by their bytes in the file, over the time of a step
and what a plain read of memory reached in the same turns. llama.cpp computes with rows that are rounded to
int8, as `*_int8` does.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from engines import SHORTEST_CONTEXT, Engine, start_child, venv_python
from peers import PAUSE
from rich.console import Console
from rich.table import Table

from moesaic.planning.hardware.roofline import ReadTest

WAYS = ("repacked", "mapped")
"""What llama.cpp does with quantised weights."""


def start_engines(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds until the first token of each engine. They load one after another."""
    file, threads = str(arguments.file), str(arguments.threads)
    length = max(SHORTEST_CONTEXT, arguments.prompt_len + arguments.gen_len)
    commands: list[tuple[str, tuple[str, ...]]] = []
    for kernels in arguments.kernels:
        settings = json.dumps({"max_model_len": length, "kernels": kernels} | json.loads(arguments.settings))
        commands.append((f"moesaic {kernels}", (sys.executable, "moesaic", file, threads, settings)))
    for way in arguments.llama_weights if arguments.llama else ():
        name = "llama.cpp" if way == "repacked" else f"llama.cpp {way}"
        commands.append((name, (venv_python(arguments.llama), "llama", file, threads, way)))
    ready = {}
    for name, command in commands:
        begin = time.monotonic()
        engine = Engine(name, start_child(*command))
        engine.ask(do="run", prompts=[[1, 2, 3]], new=1)
        ready[name] = time.monotonic() - begin
        arguments.engines.append(engine)
    return ready


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama", type=Path, metavar="VENV", help="from setup_peer.sh llama, or its python")
    ways = "llama.cpp copies them into a faster order, or leaves them in the mapped file"
    parser.add_argument("--llama-weights", nargs="+", choices=WAYS, default=["repacked"], help=ways)
    parser.add_argument("--kernels", nargs="+", default=["auto"], help="of moesaic")
    parser.add_argument("--settings", default="{}", help="of moesaic's LLM")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--gen-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows here, after each concurrency")
    arguments = parser.parse_args()
    arguments.engines = []
    ready = start_engines(arguments)
    rows: list[dict[str, Any]] = []
    for concurrency in arguments.concurrency:
        rows += measure(arguments, concurrency)
        if arguments.json:
            arguments.json.write_text(json.dumps({"ready": ready, "rows": rows}, indent=2))
    show(rows, ready)
    for engine in arguments.engines:
        engine.stop()


def measure(arguments: argparse.Namespace, concurrency: int) -> list[dict[str, Any]]:
    """A row for each engine."""
    rng, read_test, engines = random.Random(0), ReadTest(arguments.threads), arguments.engines
    prompts = [[rng.randrange(256) for _ in range(arguments.prompt_len)] for _ in range(concurrency)]
    answers: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    for turn in range(arguments.rounds + 1):
        for engine in engines:
            answer = engine.ask(do="run", prompts=prompts, new=arguments.gen_len)
            tell(concurrency, turn, engine.name, answer)
            time.sleep(PAUSE)
            if turn:  # the first one warms up
                answers[engine.name].append(answer | {"memory": read_test.gb_per_s()})
    step_bytes = engines[0].ask(do="count", prompts=prompts)["bytes"]
    return [
        summarise(engine.name, answers[engine.name], step_bytes, arguments, concurrency) for engine in engines
    ]


def tell(concurrency: int, turn: int, name: str, answer: dict[str, Any]) -> None:
    """Writes one run's seconds to the error stream, since a big file's runs take minutes."""
    times = f"prefill {answer['prefill_s']:.1f} s, decode {answer['decode_s']:.1f} s"
    print(f"{concurrency} requests, round {turn}, {name}: {times}", file=sys.stderr, flush=True)


def summarise(
    name: str,
    answers: list[dict[str, Any]],
    step_bytes: float,
    arguments: argparse.Namespace,
    concurrency: int,
) -> dict[str, Any]:
    steps = arguments.gen_len - 1
    shares = [step_bytes * steps / 1e9 / answer["decode_s"] / answer["memory"] for answer in answers]
    prefill_s, decode_s = (
        statistics.median(answer[key] for answer in answers) for key in ("prefill_s", "decode_s")
    )
    return {
        "engine": name,
        "concurrency": concurrency,
        "prefill_tokens_per_s": concurrency * arguments.prompt_len / prefill_s,
        "decode_tokens_per_s": concurrency * steps / decode_s,
        "of_memory": statistics.median(shares),
        "memory_gb_per_s": statistics.median(answer["memory"] for answer in answers),
        "peak_gib": max(answer["peak_bytes"] for answer in answers) / 2**30,
    }


def show(rows: list[dict[str, Any]], ready: dict[str, float]) -> None:
    table = Table(title="greedy, medians; ratios are those to the first llama.cpp")
    for column in (
        "reqs",
        "engine",
        "ready s",
        "prefill tok/s",
        "ratio",
        "decode tok/s",
        "ratio",
        "of memory",
        "GiB",
    ):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for row in rows:
        peer = next(
            (
                one
                for one in rows
                if one["engine"].startswith("llama.cpp") and one["concurrency"] == row["concurrency"]
            ),
            row,
        )
        ratios = [row[key] / peer[key] for key in ("prefill_tokens_per_s", "decode_tokens_per_s")]
        table.add_row(
            *(str(row["concurrency"]), row["engine"], f"{ready[row['engine']]:.1f}"),
            *(f"{row['prefill_tokens_per_s']:.1f}", f"{ratios[0]:.2f}x"),
            *(f"{row['decode_tokens_per_s']:.1f}", f"{ratios[1]:.2f}x", f"{row['of_memory']:.0%}"),
            f"{row['peak_gib']:.2f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
