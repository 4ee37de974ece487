"""How fast one layer of linear attention (gated DeltaNet) is, without its projections.

    python benchmarks/delta_speed.py

16 key heads and 32 value heads of 128 numbers unless told otherwise. A step that passes a multiple of 64
positions also writes the states anew. `states GB/s` counts the states of all heads, read once for each
sequence of a decode step. `GFLOP/s` counts the products that a row needs with states, keys and updates.
Best and median of the rounds, in microseconds for each row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from moesaic.core.tokens import TokenBatch
from moesaic.kernels import table
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.states import CHUNK, LayerStates, StateSizes
from moesaic.kernels.table import Kernels

CASES = [(1, 1, 65), (1, 1, 97), (1, 1, 128), (8, 1, 97), (32, 1, 97), (1, 64, 64), (1, 512, 512)]
"""(sequences, new tokens of each, tokens of each with the new ones)."""


def some_states(sizes: StateSizes, sequences: int) -> LayerStates:
    heads, kept = sizes.value_heads, sizes.taps - 1
    decays = -torch.rand(sequences, heads, CHUNK)
    return LayerStates(
        sizes,
        pages=torch.randn(sequences + 1, heads, sizes.key_width, sizes.value_width),
        page_tails=torch.randn(sequences + 1, kept, sizes.channels),
        keys=torch.randn(sequences, sizes.key_heads, CHUNK, sizes.key_width),
        updates=torch.randn(sequences, heads, CHUNK, sizes.value_width),
        decays=decays.cumsum(-1),
        tails=torch.randn(sequences, kept, sizes.channels),
    )


def step(sequences: int, rows: int, context: int) -> AttentionBatch:
    first = context - rows
    batch = TokenBatch(
        token_ids=np.zeros(sequences * rows, np.int64),
        positions=np.tile(np.arange(first, context), sequences),
        query_starts=np.arange(sequences + 1) * rows,
        context_lens=np.full(sequences, context),
        block_tables=np.zeros((sequences, 1), np.int64),
        logit_rows=np.arange(1),
        states=np.array(
            [(index + 1, first // CHUNK * CHUNK, index + 1, index) for index in range(sequences)]
        ),
    )
    return AttentionBatch.build(batch, 1 << 20)


def calls(kernels: Kernels, sizes: StateSizes, case: tuple[int, int, int]) -> list[Callable[[], object]]:
    """The convolution, the delta rule, and the norm behind it."""
    batch, states = step(*case), some_states(sizes, case[0])
    n, heads = case[0] * case[1], sizes.value_heads
    rows, gates = torch.randn(n, sizes.channels), torch.randn(n, 2 * heads)
    weight, decay, bias = torch.randn(sizes.taps, sizes.channels).t(), -torch.rand(heads), torch.rand(heads)
    made, norm = torch.randn(n, heads, sizes.value_width), torch.rand(sizes.value_width)
    opening = torch.randn(n, heads * sizes.value_width)
    return [
        lambda: kernels.convolve(rows, weight, states, batch),
        lambda: kernels.delta(rows, gates, decay, bias, states, batch),
        lambda: kernels.gated_norm(made, norm, opening, 1e-6),
    ]


def seconds(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The best and the median of some rounds."""
    call()
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return min(taken), statistics.median(taken)


def row_of(kernels: Kernels, sizes: StateSizes, case: tuple[int, int, int], rounds: int) -> list[str]:
    sequences, rows, context = case
    n = sequences * rows
    times = [seconds(call, rounds) for call in calls(kernels, sizes, case)]
    matrices = sizes.value_heads * sizes.key_width * sizes.value_width
    since = [position % CHUNK + 1 for position in range(context - rows, context)]
    of_keys = 2 * sum(since) * sizes.key_heads * sizes.key_width
    of_updates = 2 * sum(since) * sizes.value_heads * sizes.value_width
    passed = since.count(CHUNK) * CHUNK * matrices
    products = sequences * (2 * rows * matrices + of_keys + of_updates + passed)
    best = times[1][0]
    return [
        *(str(number) for number in case),
        *(f"{1e6 * low / n:.1f} / {1e6 * middle / n:.1f}" for low, middle in times),
        f"{4 * sequences * matrices / best / 1e9:.1f}" if rows == 1 else "",
        f"{2 * products / best / 1e9:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--heads", type=int, nargs=3, default=[16, 32, 128], metavar=("KEY", "VALUE", "WIDTH")
    )
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    kernels = table.pick("cpu", arguments.kernels)
    kernels.set_threads(arguments.threads, False)
    key_heads, value_heads, width = arguments.heads
    sizes = StateSizes(key_heads, value_heads, width, width, 4)
    shown = Table(title=f"{kernels.name}, {arguments.threads} threads: us for each row, best / median")
    for column in (
        "sequences",
        "new",
        "context",
        "convolve",
        "delta",
        "gated_norm",
        "states GB/s",
        "GFLOP/s",
    ):
        shown.add_column(column, justify="right")
    for case in CASES:
        shown.add_row(*row_of(kernels, sizes, case, arguments.rounds))
    Console(width=110).print(shown)


if __name__ == "__main__":
    main()
