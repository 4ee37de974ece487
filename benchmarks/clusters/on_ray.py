"""`ray`: the same cluster as children of one process, and as processes that actors of Ray start.

The Ray cluster has all of its nodes on this machine, so the cores are the same. What differs is how processes
start and how the router talks to them: over a socket pair, or over TCP in encrypted records. Workers and
expert servers of one machine share memory in both. A start begins with the command and ends when the cluster
serves; the Ray cluster runs before. Shown are medians. For the steady state both clusters stay loaded and
take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from disaggregated.serving import Served, medians, random_prompts, serving
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from moesaic.config import ClusterConfig

BACKENDS = ("local", "ray")
STORE = 80 << 20
"""Bytes of a node's object store, the least that Ray takes. Nothing is put there."""


@contextmanager
def ray_nodes(count: int, cpus: int) -> Iterator[None]:
    """A Ray cluster of so many nodes on this machine, each with so many logical cores."""
    with patch.dict(os.environ, {"RAY_USAGE_STATS_ENABLED": "0"}):
        from ray.cluster_utils import Cluster

        head = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": STORE}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(count - 1):
            nodes.add_node(num_cpus=cpus, object_store_memory=STORE)
        os.environ["RAY_ADDRESS"] = nodes.address
        try:
            yield
        finally:
            nodes.shutdown()


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each backend."""
    starts: dict[str, list[float]] = {name: [] for name in BACKENDS}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in BACKENDS}
    total = len(BACKENDS) * (arguments.starts + arguments.rounds)
    processes = arguments.workers + arguments.servers
    with (
        ray_nodes(arguments.nodes, -(-processes // arguments.nodes) * arguments.threads),
        Progress(console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("measuring", total=total)
        for last in [*[False] * (arguments.starts - 1), True]:
            with ExitStack() as stack:
                engines = []
                for name in BACKENDS:
                    begun = time.monotonic()
                    opened = serving(name, arguments.model, arguments.threads, shape(name, arguments))
                    engines.append(stack.enter_context(opened))
                    starts[name].append(time.monotonic() - begun)
                    progress.advance(task)
                for _ in range(arguments.rounds if last else 0):
                    for engine in engines:
                        runs[engine.name].append(one_run(engine, arguments))
                        progress.advance(task)
    return [
        {"backend": name, "start_s": statistics.median(starts[name]), **medians(runs[name])}
        for name in BACKENDS
    ]


def shape(backend: str, arguments: argparse.Namespace) -> ClusterConfig:
    return ClusterConfig(
        attention_workers=arguments.workers,
        expert_servers=arguments.servers,
        rebalance_interval=0,
        distributed_executor_backend=backend,  # type: ignore[arg-type]
    )


def one_run(engine: Served, arguments: argparse.Namespace) -> dict[str, float]:
    assert engine.launched.engine.info is not None
    vocabulary = min(engine.launched.engine.info.vocab_size, 1000)
    prompts = random_prompts(arguments.concurrency, arguments.prompt_len, vocabulary)
    run, _ = engine.measured(prompts, arguments.gen_len)
    return {
        "prefill_tokens_per_s": run.prefill_tokens_per_s,
        "decode_tokens_per_s": run.decode_tokens_per_s,
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="processes as children, and as those that Ray's actors start")
    for column in ("backend", "start s", "prefill tok/s", "ratio", "decode tok/s", "ratio"):
        table.add_column(column, justify="left" if column == "backend" else "right")
    base = rows[0]
    for row in rows:
        cells = [row["backend"], f"{row['start_s']:.1f}"]
        for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            cells += [f"{row[name]:.1f}", f"{row[name] / base[name]:.2f}x"]
        table.add_row(*cells)
    console.print(table)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=2, help="of the Ray cluster, all on this machine")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--gen-len", type=int, default=64)


def quick(arguments: argparse.Namespace) -> None:
    arguments.starts, arguments.rounds, arguments.gen_len = 1, 1, 8
