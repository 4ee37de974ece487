"""How fast the native kernels are, beside what this machine can do at all.

    python benchmarks/make_checkpoint.py qwen3-moe-0.96b /tmp/qwen
    python benchmarks/kernel_speed.py /tmp/qwen

Every line is the median over calls on the weights of a checkpoint, layer after layer, so that no call finds
its weights in a cache. GB/s counts each weight that a call needs once; GFLOP/s two operations a weight and
row. torch's line is `torch.nn.functional.linear` on those weights widened to float32, with as many threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.model import Model

Call = Callable[[], object]


def seconds(calls: Iterator[Call], count: int) -> float:
    """Median time of the next `count` calls, after a few to warm up."""
    for call in itertools.islice(calls, max(2, count // 4)):
        call()
    times = []
    for call in itertools.islice(calls, count):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def expert_calls(model: Model, kernels: table.Kernels, rows: int) -> tuple[Iterator[Call], float]:
    """Calls over all layers with fresh uniform routing, and the mean number of experts they touch."""
    spec = model.spec
    hidden = torch.randn(rows, spec.hidden_size)
    out = torch.empty(rows, spec.top_k, spec.hidden_size)
    layers = [model.experts[layer] for layer in spec.moe_layers]
    ids = [
        torch.rand(rows, spec.num_experts).topk(spec.top_k).indices for _ in range(8 * len(layers) + 1)
    ]  # one more than a multiple of the layers: each layer meets other experts the next time round
    active = statistics.mean(len(one.unique()) for one in ids)

    def call(weights: Any, chosen: torch.Tensor) -> Call:
        return lambda: kernels.experts(weights, hidden, chosen, out)

    pairs = zip(itertools.cycle(layers), itertools.cycle(ids), strict=False)
    return (call(weights, chosen) for weights, chosen in pairs), active


def linear_calls(weights: list[torch.Tensor], linear: Any, rows: int) -> Iterator[Call]:
    hidden = torch.randn(rows, weights[0].shape[1])

    def call(weight: torch.Tensor) -> Call:
        return lambda: linear(hidden, weight)

    return (call(weight) for weight in itertools.cycle(weights))


def measure(model: Model, kernels: table.Kernels, rows: int) -> Iterator[dict[str, Any]]:
    spec = model.spec
    count = 3 * spec.num_layers if rows <= 64 else spec.num_layers
    calls, active = expert_calls(model, kernels, rows)
    taken = seconds(calls, count)
    numbers = 3 * spec.hidden_size * spec.expert_width
    size = model.head.element_size()
    yield line("experts", kernels.name, rows, taken, active * numbers * size, rows * spec.top_k * numbers)
    stored = [block.attention_part.out.weight for block in model.blocks]  # type: ignore[attr-defined]
    stored += [block.attention_part.query.weight for block in model.blocks]  # type: ignore[attr-defined]
    widened = [weight.float() for weight in stored]
    for name, weights, linear in (
        (kernels.name, stored, kernels.linear),
        ("torch float32", widened, functional.linear),
    ):
        taken = seconds(linear_calls(weights, linear, rows), count)
        read = weights[0].numel() * weights[0].element_size()
        yield line("linear", name, rows, taken, read, rows * weights[0].numel())


def line(what: str, engine: str, rows: int, taken: float, read: float, products: float) -> dict[str, Any]:
    return {
        "what": what,
        "kernels": engine,
        "rows": rows,
        "microseconds": taken * 1e6,
        "gb_per_s": read / taken / 1e9,
        "gflop_per_s": 2 * products / taken / 1e9,
    }


def show(results: list[dict[str, Any]], title: str) -> None:
    shown = Table(title=title)
    for column in ("what", "kernels", "rows", "us", "GB/s", "GFLOP/s"):
        shown.add_column(column, justify="left" if column in ("what", "kernels") else "right")
    for row in results:
        shown.add_row(
            row["what"],
            row["kernels"],
            str(row["rows"]),
            f"{row['microseconds']:.0f}",
            f"{row['gb_per_s']:.1f}",
            f"{row['gflop_per_s']:.0f}",
        )
    Console(width=100).print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--kernels", nargs="+", default=sorted({*table.instruction_sets()} - table.INTEGER))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 128, 512, 2048])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    results = []
    with torch.inference_mode():
        for name in arguments.kernels:
            kernels = table.pick("cpu", name)
            model = registry.load(arguments.model, kernels)
            kernels.set_threads(arguments.threads, False)
            torch.set_num_threads(arguments.threads)
            for rows in arguments.rows:
                results += measure(model, kernels, rows)
    show(results, f"{arguments.model.name}, {arguments.threads} threads")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
