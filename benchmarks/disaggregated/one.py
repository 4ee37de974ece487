"""`one`: an attention worker and an expert server on the cores of one process with two threads."""

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
    "lockstep 1, partial": {"schedule": "lockstep", "combine": "partial"},
    "async": {"schedule": "async"},
}
ALONE = "one process"


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each way of serving and each concurrency."""
    pair = ClusterConfig(expert_servers=1, rebalance_interval=0)
    with ExitStack() as stack:
        engines = [stack.enter_context(serving(ALONE, arguments.model, 2))]
        for name, settings in SCHEDULES.items():
            engines.append(
                stack.enter_context(serving(name, arguments.model, arguments.threads, pair, **settings))
            )
        return take_turns(engines, arguments)


def show(rows: list[dict[str, Any]], console: Console) -> None:
    title = "one attention worker + one expert server against one process, on two cores"
    show_beside(rows, ALONE, title, console)


def add(parser: argparse.ArgumentParser) -> None:
    turns.add(parser, rounds=3, minutes=60)
    parser.add_argument("--threads", type=int, default=2, help="of the worker and of the server, each")
