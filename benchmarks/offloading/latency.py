"""What one layer of a decode step costs: its cache over the link, attention beside the cache, all after it.

MoE-Lightning, Figure 9: for each micro-batch and context the seconds until its cache has come over the link,
of attention to it on the slow level, and of what follows on the fast one, whose weights are there. Where the
second is below the first, attention is better left beside the cache; where it is below the third, it is free.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import make_checkpoint
import torch
from disaggregated import picture as lines
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from offloading.cores import SHAPE
from offloading.percore import Bench, cores, on_core

PARTS = ("transfer", "attention", "feed_forward")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=f"a Hugging Face directory (default: writes {SHAPE})")
    parser.add_argument("--link", type=float, default=2.0, metavar="GB/S")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[8, 16, 32, 64], metavar="REQUESTS")
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each figure")
    parser.add_argument("--svg", type=Path, help="the largest micro-batch, by context")


def quick(arguments: argparse.Namespace) -> None:
    arguments.micro_batches, arguments.contexts = arguments.micro_batches[:2], arguments.contexts[:2]
    arguments.seconds = 0.05


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """A row for each micro-batch and context, in seconds of one layer."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = Path(arguments.model or folder)
        if arguments.model is None:
            make_checkpoint.write(SHAPE, path)
        bench = Bench.of(path, arguments.seconds)
        total = len(arguments.micro_batches) * len(arguments.contexts)
        rows = []
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("measuring", total=total)
            for requests in arguments.micro_batches:
                for context in arguments.contexts:
                    rows.append(_row(bench, requests, context, 1e9 * arguments.link))
                    progress.advance(task)
    return {"model": path.name, "link": arguments.link, "rows": rows}


def _row(bench: Bench, requests: int, context: int, speed: float) -> dict[str, Any]:
    fast, slow = cores()
    kernels = bench.loaded.kernels
    return {
        "micro_batch": requests,
        "context": context,
        "transfer": bench.transfer(requests, context, speed),
        "attention": on_core(kernels, slow, lambda: bench.attention(requests, context)),
        "feed_forward": on_core(kernels, fast, lambda: bench.feed_forward(requests)),
    }


def show(found: dict[str, Any], console: Console) -> None:
    table = Table(title=f"milliseconds of one layer, link {found['link']:g} GB/s", title_justify="left")
    for name in (
        "micro-batch",
        "context",
        "cache over the link",
        "attention, slow core",
        "after it, fast core",
    ):
        table.add_column(name, justify="right")
    table.add_column("link / attention", justify="right")
    for row in found["rows"]:
        figures = [f"{1e3 * row[part]:.2f}" for part in PARTS]
        ratio = row["transfer"] / row["attention"]
        table.add_row(str(row["micro_batch"]), str(row["context"]), *figures, f"{ratio:.1f}")
    console.print(table)


def picture(found: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Draws milliseconds over the context, for the largest micro-batch."""
    largest = max(row["micro_batch"] for row in found["rows"])
    rows = [row for row in found["rows"] if row["micro_batch"] == largest]
    title = f"One layer, micro-batch {largest}, link {found['link']:g} GB/s"
    return lines.draw(curves(rows), title, "tokens of context", "milliseconds")


def curves(rows: Sequence[dict[str, Any]]) -> list[lines.Line]:
    names = ("cache over the link", "attention, slow core", "after it, fast core")
    return [
        lines.Line(name, [(row["context"], 1e3 * row[part]) for row in rows])
        for name, part in zip(names, PARTS, strict=True)
    ]
