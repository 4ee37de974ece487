"""The same checkpoint, prompts and greedy tokens through moesaic and its peers, side by side.

    python benchmarks/make_checkpoint.py qwen3-moe-0.96b /tmp/qwen
    python benchmarks/peers.py /tmp/qwen

    benchmarks/setup_peer.sh llama /tmp/llama
    benchmarks/setup_peer.sh vllm /tmp/vllm
    python benchmarks/peers.py /tmp/qwen --llama /tmp/llama --vllm /tmp/vllm --no-transformers

    python benchmarks/peers.py /tmp/qwen --llama /tmp/llama --quantised q8_0
    python benchmarks/peers.py /tmp/qwen --llama /tmp/llama --quantised q8_0 \\
        --settings '{"kernels": "avx512_int8"}'

Every engine stays loaded in a process of its own and they take turns, so that a slow minute of the
machine hits all of them. Shown are medians over the rounds. `prefill` is prompt tokens over the time
until every request has its first token, `GFLOP/s` the products with weights in it, counted from the
checkpoint; `decode` is all later tokens over the time after that; `GB/s` is the weights that a decode
step reads (the distinct experts that moesaic routed to, counted, in the bytes that the engine stores
them in) over its time, and `of memory` that over what a plain read of memory with as many threads
reached just after, because that drifts as well; `peak` adds up all processes of an engine; `equal`
counts the answers whose greedy tokens are moesaic's own. With bf16, llama.cpp and vLLM round rows too.
Over random weights few of their answers are equal then; `--llama-types f32` shows that the model is.

`--speculate` also shows moesaic with drafted tokens. Its GB/s are those of steps without any. Random weights
repeat themselves, so that more drafts are right than in text: speculation.py asks by acceptance.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint import Checkpoint
from engines import BYTES, QUANTISED, Engine, start
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from moesaic.planning.hardware.roofline import ReadTest

PAUSE = 0.3
"""Seconds after each turn: threads of some engines keep a core busy that long, waiting for more."""


def measure(engines: list[Engine], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per (engine, concurrency)."""
    rng = random.Random(0)
    read_test = ReadTest(arguments.threads)
    with Progress(console=Console(stderr=True)) as progress:
        total = len(arguments.concurrency) * (arguments.rounds + 1) * len(engines)
        task = progress.add_task("measuring", total=total)
        for concurrency in arguments.concurrency:
            prompts = [[rng.randrange(256) for _ in range(arguments.prompt_len)] for _ in range(concurrency)]
            runs: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
            for turn in range(arguments.rounds + 1):
                for engine in engines:
                    answer = engine.ask(do="run", prompts=prompts, new=arguments.gen_len)
                    time.sleep(PAUSE)
                    if turn:  # the first one warms up
                        runs[engine.name].append(answer | {"memory_gb_per_s": read_test.gb_per_s()})
                    progress.advance(task)
            ours = [engine for engine in engines if engine.weight_bytes is None]
            counted = {engine.name: engine.ask(do="count", prompts=prompts) for engine in ours}
            for engine in engines:
                reads = counted.get(engine.name, counted["moesaic"])
                row = summarise(engine, runs[engine.name], reads, arguments, concurrency)
                pairs = zip(runs["moesaic"][0]["tokens"], runs[engine.name][0]["tokens"], strict=True)
                same = sum(mine == theirs for mine, theirs in pairs)
                yield row | {"same_tokens": f"{same}/{concurrency}"}


def summarise(
    engine: Engine,
    answers: list[dict[str, Any]],
    counted: dict[str, float],
    arguments: argparse.Namespace,
    concurrency: int,
) -> dict[str, Any]:
    """The summary of one engine's answers. counted: the weights that a decode step reads."""
    decode_s = statistics.median(answer["decode_s"] for answer in answers)
    prefill_s = statistics.median(answer["prefill_s"] for answer in answers)
    steps, tokens = arguments.gen_len - 1, concurrency * arguments.prompt_len
    flops = Checkpoint(arguments.model).prefill_flops(concurrency, tokens)
    step_bytes = counted["numbers"] * engine.weight_bytes if engine.weight_bytes else counted["bytes"]
    gigabytes = step_bytes * steps / 1e9
    shares = [gigabytes / answer["decode_s"] / answer["memory_gb_per_s"] for answer in answers]
    return {
        "engine": engine.name,
        "concurrency": concurrency,
        "prefill_tokens_per_s": tokens / prefill_s,
        "prefill_gflop_per_s": flops / prefill_s / 1e9,
        "decode_tokens_per_s": concurrency * steps / decode_s,
        "decode_gb_per_s": gigabytes / decode_s,
        "memory_gb_per_s": statistics.median(answer["memory_gb_per_s"] for answer in answers),
        "of_memory": statistics.median(shares),
        "peak_gib": max(answer["peak_bytes"] for answer in answers) / 2**30,
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="greedy, medians; ratios are moesaic's over that engine's")
    table.add_column("reqs", justify="right")
    table.add_column("engine", no_wrap=True)
    for column in (
        *("prefill tok/s", "ratio", "GFLOP/s", "decode tok/s", "ratio", "GB/s", "of memory"),
        *("peak GiB", "equal"),
    ):
        table.add_column(column, justify="right")
    ours = {row["concurrency"]: row for row in rows if row["engine"] == "moesaic"}
    for row in rows:
        mine = ours[row["concurrency"]]
        table.add_row(
            str(row["concurrency"]),
            row["engine"],
            f"{row['prefill_tokens_per_s']:.1f}",
            f"{mine['prefill_tokens_per_s'] / row['prefill_tokens_per_s']:.2f}x",
            f"{row['prefill_gflop_per_s']:.0f}",
            f"{row['decode_tokens_per_s']:.1f}",
            f"{mine['decode_tokens_per_s'] / row['decode_tokens_per_s']:.2f}x",
            f"{row['decode_gb_per_s']:.1f}",
            f"{row['of_memory']:.0%}",
            f"{row['peak_gib']:.2f}",
            row["same_tokens"],
            end_section=row is rows[-1] or rows[rows.index(row) + 1]["concurrency"] != row["concurrency"],
        )
    Console(width=120).print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--gen-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--settings", default="{}", help='of moesaic\'s LLM, as in \'{"dtype": "float32"}\'')
    compressed = "moesaic also on this: what `moesaic compress` made of the model"
    parser.add_argument("--compressed", type=Path, metavar="DIR", help=compressed)
    speculate = "moesaic also with n-grams that draft so many tokens"
    parser.add_argument("--speculate", type=int, default=0, metavar="TOKENS", help=speculate)
    parser.add_argument("--experts", nargs="+", default=["eager", "grouped_mm"], help="of transformers")
    parser.add_argument("--no-transformers", dest="experts", action="store_const", const=[])
    parser.add_argument("--llama", type=Path, metavar="VENV", help="from setup_peer.sh llama, or its python")
    parser.add_argument("--llama-types", nargs="+", choices=sorted(BYTES), default=["bf16"])
    quantised = (
        "only moesaic and llama.cpp, both on a GGUF file of this type that llama.cpp makes of the model"
    )
    parser.add_argument("--quantised", choices=QUANTISED, help=quantised)
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="from setup_peer.sh vllm, or its python")
    parser.add_argument("--vllm-types", nargs="+", choices=sorted(BYTES), default=["bf16"])
    parser.add_argument("--work", type=Path, help="where llama.cpp's files go; beside MODEL if not given")
    parser.add_argument("--json", type=Path, help="write the rows here")
    given = parser.parse_args()
    if given.quantised and not given.llama:
        parser.error("--quantised: llama.cpp makes the file; allowed: with --llama")
    return given


def main() -> None:
    arguments = parse()
    engines = start(arguments)
    rows = list(measure(engines, arguments))
    show(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))
    for engine in engines:
        engine.stop()


if __name__ == "__main__":
    main()
