"""`colocated`: two ranks by schedule and skew; an attention worker and an expert server share a core.

Throughput at saturation: all requests are in at once, and counted are the tokens while none has ended.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import make_checkpoint
import skew
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from disaggregated import breakdown
from disaggregated.serving import (
    Served,
    halves,
    medians,
    percentile,
    random_prompts,
    serving,
    temporary,
)
from moesaic.cluster import local
from moesaic.config import ClusterConfig, ExpertServerConfig, WorkerConfig

SCHEDULES: dict[str, dict[str, Any]] = {
    "barrier": {"schedule": "barrier"},
    "lockstep 1": {"schedule": "lockstep"},
    "lockstep 2": {"schedule": "lockstep", "inflight_batches": 2},
    "async defrag": {"schedule": "async", "queue_policy": "defrag"},
    "async mtfs": {"schedule": "async", "queue_policy": "mtfs"},
    "async flfs": {"schedule": "async", "queue_policy": "flfs"},
    "auto": {"schedule": "auto"},
}
UNIFORM = "uniform"
ROUTINGS = (UNIFORM, *skew.PATTERNS)


def checkpoint(arguments: argparse.Namespace, routing: str) -> Path:
    """The checkpoint. It is written if it does not exist."""
    path: Path = arguments.checkpoints / f"{arguments.shape}-{routing}-{arguments.share:g}"
    done = path / "done"
    if not done.exists():
        pattern = None if routing == UNIFORM else routing
        print(f"writing {path}", file=sys.stderr)
        make_checkpoint.write(arguments.shape, path, pattern, arguments.share)
        done.touch()
    return path


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rows by routing, concurrency and schedule, then the counted shares and the breakdowns."""
    found: dict[str, Any] = {"rows": [], "shares": {}, "breakdown": []}
    models = {routing: checkpoint(arguments, routing) for routing in arguments.routing}
    each = arguments.rounds * len(arguments.concurrency) + 2
    with Progress(console=Console(stderr=True)) as progress, temporary() as folder:
        task = progress.add_task("measuring", total=each * len(models) * len(arguments.schedule))
        for routing, model in models.items():
            placement = halves(str(model), Path(folder))
            with ExitStack() as stack:
                engines = []
                for name in arguments.schedule:
                    opened = _ranks(name, str(model), placement, arguments)
                    engines.append(stack.enter_context(opened))
                    progress.advance(task)
                found["rows"] += _rounds(engines, routing, arguments, lambda: progress.advance(task))
                found["shares"][routing] = _shares(engines[0])
        for routing in arguments.breakdown:
            if routing in models:
                placement = halves(str(models[routing]), Path(folder))
                found["breakdown"] += _breakdowns(routing, str(models[routing]), placement, arguments)
    return found


@contextmanager
def _ranks(name: str, model: str, placement: Path, arguments: argparse.Namespace) -> Iterator[Served]:
    shape = ClusterConfig(
        attention_workers=2, expert_servers=2, placement=str(placement), rebalance_interval=0
    )
    cores = sorted(os.sched_getaffinity(0))
    seats = max(64, max(arguments.concurrency) // 2)
    with serving(name, model, 1, shape, max_num_seqs=seats, **SCHEDULES[name]) as served:
        served.pin(cores)
        yield served


def _rounds(
    engines: list[Served], routing: str, arguments: argparse.Namespace, advance: Any
) -> list[dict[str, Any]]:
    """Interleaves the runs of all settings. The first run of each only warms up."""
    runs: dict[tuple[int, str], list[dict[str, float]]] = {}
    for engine in engines:
        engine.run(random_prompts(8, arguments.prompt_len, 1000), 4)
        advance()
    for concurrency in arguments.concurrency:
        for _ in range(arguments.rounds):
            for engine in engines:
                prompts = random_prompts(concurrency, arguments.prompt_len, 1000)
                runs.setdefault((concurrency, engine.name), []).append(
                    one_run(engine, prompts, arguments.gen_len)
                )
                advance()
    return [
        {"routing": routing, "concurrency": concurrency, "schedule": name, **medians(rows)}
        for (concurrency, name), rows in runs.items()
    ]


def one_run(engine: Served, prompts: list[list[int]], new: int) -> dict[str, float]:
    run, took = engine.measured(prompts, new)
    return {
        "tokens_per_s": run.decode_tokens_per_s,
        "itl_p50": percentile(run.gaps, 0.5),
        "itl_p99": percentile(run.gaps, 0.99),
        "rows_per_expert_run": took.rows_per_expert_run,
        "runs": float(took.runs),
        "partial_runs": float(took.partial_runs),
        "worker_waiting": took.worker_waiting / took.seconds / 2,
        **{f"server_idle_{i}": 1 - busy / took.seconds for i, busy in enumerate(took.server_busy)},
    }


def _shares(engine: Served) -> list[float]:
    """The share of the pairs of each layer that are on server 0, over everything that this engine
    computed."""
    assert engine.launched.supervisor is not None
    load = engine.launched.supervisor.load()
    if load is None:
        return []
    half = load.pairs.shape[1] // 2
    return [float(layer[:half].sum() / max(1, layer.sum())) for layer in load.pairs]


def _breakdowns(
    routing: str, model: str, placement: Path, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Runs each schedule once with stopwatches in the processes."""
    found = []
    for name in arguments.schedule:
        with (
            temporary() as folder,
            _stopwatches(Path(folder)),
            _ranks(name, model, placement, arguments) as served,
        ):
            workers, servers = (
                [served.pid(f"{role} {number}") for number in (0, 1)]
                for role in ("attention worker", "expert server")
            )
            prompts = random_prompts(max(arguments.concurrency), arguments.prompt_len, 1000)
            served.measured(prompts[:8], 4)
            before = _read(Path(folder), workers, servers)
            served.measured(prompts, arguments.gen_len)
            after = _read(Path(folder), workers, servers)
        grown = [breakdown.grown(a, b) for a, b in zip(before, after, strict=True)]
        barrier, overlap = breakdown.bound(grown[:2], grown[2:])
        for role, these in (("attention", grown[:2]), ("expert", grown[2:])):
            runs = max(1, sum(one["runs"] for one in these))
            stages = {
                stage: 1e3 * sum(one["seconds"].get(stage, 0.0) for one in these) / runs
                for stage in breakdown.STAGES
            }
            found.append(
                {"routing": routing, "schedule": name, "role": role, "runs": runs, "ms": stages}
                | {"barrier_seconds": barrier, "overlap_seconds": overlap}
            )
    return found


def _read(folder: Path, workers: list[int], servers: list[int]) -> list[dict[str, Any]]:
    return breakdown.read(folder, "worker", workers) + breakdown.read(folder, "server", servers)


@contextmanager
def _stopwatches(folder: Path) -> Iterator[None]:
    """Puts stopwatches into the processes that are started inside the context."""

    def worker(config: WorkerConfig) -> local.ChildProcess:
        return local.spawn_process(
            "disaggregated.timed_worker", config.to_json(), "worker process", Path(config.model.model)
        )

    def server(config: ExpertServerConfig) -> local.ChildProcess:
        return local.spawn_process(
            "disaggregated.timed_server", config.to_json(), "expert server", Path(config.model)
        )

    paths = os.pathsep.join(
        filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    )
    with (
        patch.dict(os.environ, {breakdown.FOLDER: str(folder), "PYTHONPATH": paths}),
        patch("moesaic.cluster.launcher.spawn_worker", worker),
        patch("moesaic.cluster.launcher.spawn_server", server),
    ):
        yield


def show(found: dict[str, Any], console: Console) -> None:
    for routing, shares in found["shares"].items():
        text = " ".join(f"{share:.2f}" for share in shares)
        console.print(f"{routing}: share of the pairs on rank 0, layer by layer: {text}", highlight=False)
    table = Table(title="two ranks, decode at saturation")
    table.add_column("routing")
    table.add_column("reqs", justify="right")
    table.add_column("schedule", no_wrap=True)
    for column in (
        *("tok/s", "of barrier", "ITL p50 ms", "p99 ms", "rows a run", "worker waits"),
        *("server 0 idle", "1 idle", "partial runs"),
    ):
        table.add_column(column, justify="right")
    base = {
        (row["routing"], row["concurrency"]): row["tokens_per_s"]
        for row in found["rows"]
        if row["schedule"] == "barrier"
    }
    for row in found["rows"]:
        barrier = base.get((row["routing"], row["concurrency"]))
        table.add_row(
            *(row["routing"], str(row["concurrency"]), row["schedule"], f"{row['tokens_per_s']:.1f}"),
            "" if barrier is None else f"{row['tokens_per_s'] / barrier:.2f}x",
            *(f"{1e3 * row['itl_p50']:.1f}", f"{1e3 * row['itl_p99']:.1f}"),
            *(f"{row['rows_per_expert_run']:.1f}", f"{row['worker_waiting']:.0%}"),
            *(f"{row['server_idle_0']:.0%}", f"{row['server_idle_1']:.0%}"),
            f"{row['partial_runs']:.0f} of {row['runs']:.0f}",
        )
    console.print(table)
    if found["breakdown"]:
        console.print(_stages(found["breakdown"]))


def _stages(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="CPU time of an execution step at one layer, ms; `gain`: most that overlap allows")
    for column in ("routing", "schedule", "of an", *breakdown.STAGES, "gain"):
        table.add_column(column, justify="left" if column in ("routing", "schedule", "of an") else "right")
    for row in rows:
        gain = row["barrier_seconds"] / row["overlap_seconds"] if row["overlap_seconds"] else 0.0
        stages = [f"{row['ms'][stage]:.3f}" for stage in breakdown.STAGES]
        table.add_row(row["routing"], row["schedule"], row["role"], *stages, f"{gain:.2f}x")
    return table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoints", type=Path, default=Path("/tmp/moesaic-skewed"), metavar="FOLDER")
    parser.add_argument(
        "--shape", choices=sorted(make_checkpoint.SHAPES), default="qwen3-moe-0.1b", help="of the model"
    )
    parser.add_argument("--share", type=float, default=0.75, help="of the pairs, on the hot half")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--schedule", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--prompt-len", type=int, default=8)
    parser.add_argument("--gen-len", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--breakdown", nargs="*", choices=ROUTINGS, default=["alternating"])


def quick(arguments: argparse.Namespace) -> None:
    arguments.shape, arguments.rounds, arguments.concurrency = "qwen3-moe-0.01b", 1, [16]
    arguments.gen_len = 12
