"""How fast attention over a paged cache is, beside torch's over dense tensors.

    python benchmarks/attention_speed.py
    python benchmarks/attention_speed.py --heads 32 8 128 --kernels avx512 avx512_bf16 --long --no-torch

Sequences of one length each; 16 query heads and 4 key heads of 64 numbers unless told otherwise. torch's line
is `scaled_dot_product_attention` in float32 on keys and values that lie together, in as many threads; it has
none where a chunk follows cached tokens. GB/s counts the cache, read once; GFLOP/s the products that a row
needs, with keys and with values, none of those behind it. With --shared-prefix the decode rows of a step
share all blocks but the last; GB/s then counts what each would read alone. With several kernels the first
ones are those that the ratio "times" compares with. --long has long prompts, whole and in their last chunk,
and decode behind them. Medians; the engines take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from moesaic.core.tokens import TokenBatch
from moesaic.kernels import table
from moesaic.kernels.batch import AttentionBatch

CASES = [
    (1, 1, 100),
    (1, 1, 8000),
    (8, 1, 1000),
    (32, 1, 100),
    (32, 1, 4100),
    (1, 512, 512),
    (32, 64, 64),
    (4, 128, 2000),
]
"""(sequences, new tokens of each, tokens of each with the new ones)."""
LONG = [
    (1, 4096, 4096),
    (1, 512, 16384),
    (1, 16384, 16384),
    (1, 1, 4096),
    (1, 1, 16384),
    (8, 1, 4096),
    (32, 1, 1024),
]
Case = tuple[int, int, int]
BLOCK = 16
PAUSE = 0.3
"""Seconds of waiting before each turn. Threads of the other engine keep a core busy for a while and wait for
more.
"""


def steps(sequences: int, rows: int, context: int, shared: bool = False) -> AttentionBatch:
    """One step of sequences whose blocks are anywhere in the cache. shared: all but the last are equal."""
    width = -(-context // BLOCK)
    blocks = np.random.default_rng(0).permutation(sequences * width).reshape(sequences, width)
    if shared:
        blocks[:, :-1] = blocks[0, :-1]
    batch = TokenBatch(
        token_ids=np.zeros(sequences * rows, np.int64),
        positions=np.tile(np.arange(context - rows, context), sequences),
        query_starts=np.arange(sequences + 1) * rows,
        context_lens=np.full(sequences, context),
        block_tables=blocks,
        logit_rows=np.arange(1),
    )
    return AttentionBatch.build(batch, BLOCK)


@dataclass(frozen=True)
class Options:
    kernels: list[str]
    heads: tuple[int, int, int]
    """Query heads, key heads, numbers of a head."""
    dtype: torch.dtype
    rounds: int
    shared: bool
    torch: bool


def calls(case: Case, options: Options) -> list[Callable[[], Any]]:
    """A call of each kernels, and torch's if torch has one."""
    sequences, rows, context = case
    query_heads, key_heads, width = options.heads
    batch = steps(*case, options.shared)
    query = torch.randn(sequences * rows, query_heads, width)
    shape = (sequences * -(-context // BLOCK), BLOCK, key_heads, width)
    keys, values = (torch.randn(shape).to(options.dtype) for _ in range(2))
    found: list[Callable[[], Any]] = [
        partial(attend, name, query, keys, values, batch, width**-0.5) for name in options.kernels
    ]
    if options.torch and rows in (1, context):
        key, value = torch.randn(2, sequences, key_heads, context, width)
        own = query.view(sequences, rows, query_heads, width).transpose(1, 2).contiguous()
        found.append(
            lambda: scaled_dot_product_attention(own, key, value, is_causal=rows > 1, enable_gqa=True)
        )
    return found


def attend(name: str, *given: Any) -> torch.Tensor:
    """Picks kernels and calls them. Picking takes a few microseconds."""
    return table.pick("cpu", name).paged_attention(*given)


def medians(engines: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Median seconds of each call, in three turns of `rounds` calls."""
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(3):
        for taken, call in zip(times, engines, strict=True):
            time.sleep(PAUSE)
            for turn in range(rounds + 1):
                started = time.perf_counter()
                call()
                if turn > 0:
                    taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in times]


def measure(case: Case, options: Options) -> list[dict[str, Any]]:
    """A line for each kernels."""
    sequences, rows, context = case
    query_heads, key_heads, width = options.heads
    found = medians(calls(case, options), options.rounds)
    seen = sequences * (rows * context - rows * (rows - 1) // 2)
    cached = 2 * sequences * context * key_heads * width * options.dtype.itemsize
    return [
        {
            "sequences": sequences,
            "new tokens": rows,
            "context": context,
            "kernels": name,
            "microseconds": seconds * 1e6,
            "gb_per_s": cached / seconds / 1e9,
            "gflop_per_s": 4 * seen * query_heads * width / seconds / 1e9,
            "times": found[0] / seconds,
            "torch_microseconds": found[-1] * 1e6 if len(found) > len(options.kernels) else None,
        }
        for name, seconds in zip(options.kernels, found, strict=False)
    ]


def show(results: list[dict[str, Any]], title: str) -> None:
    shown = Table(title=title)
    heads = (
        "sequences",
        "new tokens",
        "context",
        "kernels",
        "us",
        "GB/s",
        "GFLOP/s",
        "times",
        "torch / moesaic",
    )
    for column in heads:
        shown.add_column(column, justify="right")
    for row in results:
        theirs = row["torch_microseconds"]
        shown.add_row(
            *(str(row[name]) for name in ("sequences", "new tokens", "context", "kernels")),
            f"{row['microseconds']:.0f}",
            f"{row['gb_per_s']:.1f}",
            f"{row['gflop_per_s']:.0f}",
            f"{row['times']:.2f}x",
            "" if theirs is None else f"{theirs / row['microseconds']:.2f}x",
        )
    Console(width=110).print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--heads", type=int, nargs=3, default=[16, 4, 64], metavar=("QUERY", "KEY", "WIDTH"))
    parser.add_argument("--kernels", nargs="+", default=["auto"], help="kernels that take turns")
    parser.add_argument("--kv-cache-dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--shared-prefix", action="store_true", help="all blocks but the last are shared")
    parser.add_argument("--long", action="store_true", help="long prompts, and decode behind them")
    parser.add_argument("--no-torch", action="store_true", help="without torch's line")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.kv_cache_dtype)
    options = Options(
        arguments.kernels,
        tuple(arguments.heads),
        dtype,
        arguments.rounds,
        arguments.shared_prefix,
        not arguments.no_torch,
    )
    table.pick("cpu").set_threads(arguments.threads, False)
    with torch.inference_mode():
        results = [row for case in (LONG if arguments.long else CASES) for row in measure(case, options)]
    show(results, f"{arguments.kv_cache_dtype} cache, {arguments.threads} threads")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
