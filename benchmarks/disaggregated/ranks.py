"""`ranks`: two tensor-parallel ranks with their experts on servers, against two that hold the experts."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from disaggregated import turns
from disaggregated.serving import serving
from disaggregated.turns import quick, show_beside, take_turns
from moesaic.config import ClusterConfig

__all__ = ["add", "measure", "quick", "show"]

SCHEDULES: dict[str, dict[str, Any]] = {
    "lockstep 1": {"schedule": "lockstep"},
    "lockstep 2": {"schedule": "lockstep", "inflight_batches": 2},
    "async": {"schedule": "async"},
}
ALONE = "2 ranks"


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each way of serving and each concurrency. Every process has one thread."""
    apart = ClusterConfig(tensor_parallel_size=2, expert_servers=arguments.servers, rebalance_interval=0)
    with ExitStack() as stack:
        alone = ClusterConfig(tensor_parallel_size=2)
        engines = [stack.enter_context(serving(ALONE, arguments.model, 1, alone))]
        for name in arguments.schedules:
            engine = serving(name, arguments.model, 1, apart, **SCHEDULES[name])
            engines.append(stack.enter_context(engine))
        return take_turns(engines, arguments)


def show(rows: list[dict[str, Any]], console: Console) -> None:
    title = "two ranks with expert servers against two ranks that hold the experts, one thread each"
    show_beside(rows, ALONE, title, console)


def add(parser: argparse.ArgumentParser) -> None:
    turns.add(parser, rounds=5, minutes=5)
    parser.add_argument("--servers", type=int, default=1, help="expert servers")
    parser.add_argument(
        "--schedules",
        nargs="+",
        choices=list(SCHEDULES),
        default=list(SCHEDULES),
        metavar="SCHEDULE",
        help=f"of {', '.join(SCHEDULES)}",
    )
