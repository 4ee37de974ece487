"""`moesaic quantize`: quantises a checkpoint, with progress, and prints what it cost."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moesaic.commands.progress import progress
from moesaic.commands.units import in_bytes
from moesaic.core.errors import ConfigError
from moesaic.jobs.quantizing import run as quantizing
from moesaic.jobs.quantizing.options import QuantizeOptions
from moesaic.jobs.quantizing.run import Cost

MAX_NAMED = 8
"""Experts with few tokens that are named; --json has all."""


def run(options: QuantizeOptions, as_json: bool) -> int:
    """Write the quantised checkpoint and print what it cost. Returns the exit code.

    Raises ConfigError for a checkpoint that cannot be quantised and files that cannot be read or written.
    """
    start = time.monotonic()
    try:
        with progress(Console(stderr=True), time.monotonic, "MB/s") as show:
            cost = quantizing.run(options, show)
    except OSError as error:
        name = error.filename or options.target
        advice = "the same command goes on where it stopped"
        raise ConfigError(f"{name}: {error.strerror}; {advice}") from error
    except KeyboardInterrupt:
        print("moesaic: interrupted; the same command goes on where it stopped", file=sys.stderr)
        raise
    seconds = time.monotonic() - start
    if as_json:
        report = {"model": options.model, "directory": str(options.directory), **asdict(cost)}
        share = cost.bytes_after / cost.bytes_before
        print(json.dumps({**report, "share": share, "seconds": round(seconds, 3)}))
    else:
        _print(options, cost, seconds)
    return 0


def _print(options: QuantizeOptions, cost: Cost, seconds: float) -> None:
    console = Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for name in ("original", cost.format):
        table.add_column(name, justify="right")
    share = cost.bytes_after / cost.bytes_before
    table.add_row("size", in_bytes(cost.bytes_before), f"{in_bytes(cost.bytes_after)} ({share:.1%})")
    if cost.perplexity_before is not None and cost.perplexity_after is not None:
        table.add_row("perplexity", f"{cost.perplexity_before:.4f}", f"{cost.perplexity_after:.4f}")
    if cost.agreement is not None:
        table.add_row("same most likely token", "", f"{cost.agreement:.2%}")
    console.print(table)
    for line in _lines(options, cost, seconds):
        console.print(line, soft_wrap=True, markup=False)


def _lines(options: QuantizeOptions, cost: Cost, seconds: float) -> list[str]:
    groups = "a scale for each row" if cost.group_size is None else f"a scale for {cost.group_size} numbers"
    method = "rounded to nearest"
    if cost.calibration_tokens:
        method = f"experts calibrated with {cost.calibration_tokens} tokens"
    evaluation = f", measured with {cost.evaluation_tokens} other tokens" if cost.evaluation_tokens else ""
    duration = f"{seconds:.1f} s"
    lines = [
        f"{options.directory}: {cost.matrices} matrices with {groups}, {method}{evaluation}, in {duration}"
    ]
    if cost.few_tokens:
        expert_names = ", ".join(
            f"layer {layer} expert {expert} ({count})" for layer, expert, count in cost.few_tokens[:MAX_NAMED]
        )
        rest_note = (
            f" and {len(cost.few_tokens) - MAX_NAMED} more, all in --json"
            if len(cost.few_tokens) > MAX_NAMED
            else ""
        )
        lines.append(
            f"{len(cost.few_tokens)} experts saw fewer than {options.least_tokens} tokens and were rounded "
            f"to nearest: {expert_names}{rest_note}"
        )
    return lines
