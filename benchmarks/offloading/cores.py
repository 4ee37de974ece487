"""Two cores as two levels: every schedule at several speeds of the link, beside its price.

The fast level is one core with the weights of two layers, the slow one the memory with the rest, all of the
cache, and the other core, which computes attention. What goes between them is copied at the link's speed.
Prices are those of `moesaic.policy.offloading.pricing` for each core as microbenchmarks found it, and for
experts as popular as decode steps of other prompts show them, computed in memory: no priced run is looked at.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import make_checkpoint
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from moesaic.cost import ops
from moesaic.cost.hardware import GIB, Hardware
from moesaic.cost.reading import read
from moesaic.cost.sizes import ModelSizes
from moesaic.models import files
from moesaic.policy.offloading.pipeline import SCHEDULES, Schedule
from moesaic.policy.offloading.policies import Policy, Workload
from moesaic.policy.offloading.pricing import Phase, Pricing
from moesaic.policy.offloading.tasks import Kind, Lane
from offloading import gantt
from offloading.percore import Bench
from offloading.sessions import FLOAT32, Job, Pass, Session, in_memory, routing

SHAPE = "qwen3-moe-0.2b"
"""The shape of the checkpoint that is written when none is given."""
PAPER: tuple[Schedule, ...] = ("cgopipe", "s2", "s3", "s4", "serial")
One = TypeVar("One")
SETTLING = 2
"""Number of first steps of a turn that do not count. After steps of other sessions, which mostly sleep, they
are slower.
"""
BEHIND = 0.03
"""Share of its throughput by which CGOPipe may be slower before it counts as behind."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=f"a Hugging Face directory (default: writes {SHAPE})")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--links", nargs="+", type=float, default=[0.25, 0.5, 1.0, 2.0, 4.0], metavar="GB/S")
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 512, 1024], metavar="TOKENS")
    parser.add_argument("--micro-batch", type=int, default=16, metavar="REQUESTS")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--prefill-rows", type=int, default=1024, help="of a micro-batch with prompts")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each schedule and speed")
    parser.add_argument("--steps", type=int, default=3, help="decode steps of a turn that count")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each microbenchmark")
    parser.add_argument("--svg", type=Path, help="a Gantt chart of each schedule's decode step")


def quick(arguments: argparse.Namespace) -> None:
    arguments.links, arguments.contexts = arguments.links[1:4:2], arguments.contexts[:1]
    arguments.rounds, arguments.steps, arguments.seconds = 1, 2, 0.1


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of every context, schedule and speed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(arguments.model or folder)
        if arguments.model is None:
            make_checkpoint.write(SHAPE, path)
        sizes = sizes_of(path)
        bench = Bench.of(path, arguments.seconds)
        found: dict[str, Any] = {"model": sizes.name, "contexts": []}
        for context in arguments.contexts:
            machine = bench.machine(sizes, arguments.micro_batch, context)
            found["contexts"].append(_context(path, sizes, machine, context, arguments))
    return found


def sizes_of(path: Path) -> ModelSizes:
    """The sizes of a pass. Logits are computed after it."""
    raw = files.read_json(path / "config.json")
    return replace(read(raw, str(path.name)), activation_number=float(FLOAT32), vocab=0)


def _context(
    path: Path, sizes: ModelSizes, machine: Hardware, context: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    steps = arguments.rounds * (SETTLING + arguments.steps) * len(arguments.links)
    rows = max(arguments.prefill_rows, context)
    job = Job(arguments.micro_batch, arguments.micro_batches, context, steps + 1, rows)
    token = int(sizes.layers * sizes.cache(1, FLOAT32))
    sizes = replace(sizes, routing=routing(str(path), job, token, sizes.experts))
    workload = Workload(context, job.generate, FLOAT32)
    speeds = [1e9 * speed for speed in arguments.links]
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:  # no thread beside lanes
        task = progress.add_task(f"context {context}", total=(steps + 1) * len(arguments.schedules))
        middle = speeds[len(speeds) // 2]
        sessions, prompts = [], {}
        split = priced(sizes, machine, workload, middle).durations.split_prices()
        for schedule in arguments.schedules:
            prices = split if schedule == "split" else None
            sessions.append(Session.begin(str(path), job.policy(schedule), job, middle, token, prices))
            prompts[schedule] = sessions[-1].step()
            progress.update(task, advance=1, refresh=True)
        taken: dict[tuple[Schedule, float], list[Pass]] = defaultdict(list)
        for speed, session in turns(sessions, speeds, arguments.rounds):
            made = [session.step(speed) for _ in range(SETTLING + arguments.steps)]
            taken[session.policy.schedule, speed] += made[SETTLING:]
            progress.update(task, advance=len(made), refresh=True)
    answers = {session.policy.schedule: session.finish() for session in sessions}
    whole = in_memory(str(path), job, token)
    return {
        "context": context,
        "requests": job.requests,
        "machine": machine.to_tables(),
        "distinct_experts": {rows: ops.distinct(sizes, rows) for rows in (1, job.micro_batch, job.requests)},
        "same_bits": {schedule: answer == whole for schedule, answer in answers.items()},
        "prefill": [
            prefill_row(one.policy, prompts[one.policy.schedule], priced(sizes, machine, workload, middle))
            for one in sessions
        ],
        "decode": [
            decode_row(one.policy, speed, taken[one.policy.schedule, speed], sizes, machine, workload)
            for speed in speeds
            for one in sessions
        ],
        "gantt": {
            one.policy.schedule: gantt.told(_middle(taken[one.policy.schedule, middle])) for one in sessions
        },
    }


def turns(sessions: Sequence[One], speeds: Sequence[float], rounds: int) -> Iterator[tuple[float, One]]:
    """The compared sessions run one after the other. Each is first in some rounds."""
    for turn in range(rounds):
        for speed in speeds:
            for place in range(len(sessions)):
                yield speed, sessions[(place + turn) % len(sessions)]


def priced(sizes: ModelSizes, machine: Hardware, workload: Workload, speed: float) -> Pricing:
    return Pricing(
        sizes,
        replace(machine, link=replace(machine.link, down_bandwidth=speed, up_bandwidth=speed)),
        workload,
    )


def decode_row(
    policy: Policy,
    speed: float,
    passes: Sequence[Pass],
    sizes: ModelSizes,
    machine: Hardware,
    workload: Workload,
) -> dict[str, Any]:
    pricing = priced(sizes, machine, workload, speed)
    row = _row(policy, passes, pricing.step(policy), policy.batch)
    table = pricing.durations.decode(policy)
    row["tasks"] = {
        f"{kind.value}, {lane.value}": {"measured": seconds, "priced": table[kind, lane]}
        for (kind, lane), seconds in tasks_of(passes).items()
    }
    return row | {"link": speed}


def prefill_row(policy: Policy, made: Pass, pricing: Pricing) -> dict[str, Any]:
    count = sum(task.kind is Kind.HEAD for task in made.tasks)
    tokens = policy.batch * pricing.workload.prompt
    return _row(policy, [made], pricing.prefill(policy, count), tokens) | {"micro_batches": count}


def _row(policy: Policy, passes: Sequence[Pass], price: Phase, tokens: int) -> dict[str, Any]:
    seconds = statistics.median(one.times.makespan for one in passes)
    return {
        "schedule": policy.schedule,
        "seconds": [one.times.makespan for one in passes],
        "measured": tokens / seconds,
        "priced": tokens / price.seconds,
        "busy": {
            lane.value: statistics.median(one.times.busy[lane] for one in passes) / seconds
            for lane in (Lane.FAST, Lane.SLOW, Lane.LINK_DOWN, Lane.LINK_UP)
        },
        "priced_busy": {name: busy / price.seconds for name, busy in price.busy.items()},
    }


def tasks_of(passes: Sequence[Pass]) -> dict[tuple[Kind, Lane], float]:
    """Median seconds of a task, by its kind and lane."""
    found: dict[tuple[Kind, Lane], list[float]] = defaultdict(list)
    for one in passes:
        for task, start, end in zip(one.tasks, one.times.starts, one.times.ends, strict=True):
            if task.kind is not Kind.SYNC:
                found[task.kind, task.lane].append(end - start)
    return {key: statistics.median(seconds) for key, seconds in found.items()}


def _middle(passes: Sequence[Pass]) -> Pass:
    """The run with the median time."""
    return sorted(passes, key=lambda one: one.times.makespan)[len(passes) // 2]


def picture(found: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Draws the longest context at the middle speed."""
    middle = arguments.links[len(arguments.links) // 2]
    last = found["contexts"][-1]
    title = f"A decode step of {last['requests']} requests at {last['context']} tokens, link {middle:g} GB/s"
    return gantt.draw(last["gantt"], title)


# ---- what is shown


def show(found: dict[str, Any], console: Console) -> None:
    for one in found["contexts"]:
        fast, slow, link = (one["machine"][part] for part in ("fast", "slow", "link"))
        console.print(
            f"[bold]{one['context']} tokens, {one['requests']} requests[/]; {_core('fast', fast)}; "
            f"{_core('slow', slow)}; a transfer takes {link['latency_us']:.0f} us beside its bytes, "
            f"a handover {link['handover_us']:.0f} us; distinct experts of other prompts' rows: "
            + ", ".join(f"{count:.1f} of {rows}" for rows, count in one["distinct_experts"].items())
            + "; bits as in memory: "
            + ", ".join(f"{name} {'yes' if same else 'NO'}" for name, same in one["same_bits"].items())
        )
        console.print(_table(one["prefill"], "prefill"))
        for speed in dict.fromkeys(row["link"] for row in one["decode"]):
            rows = [row for row in one["decode"] if row["link"] == speed]
            console.print(_table(rows, f"decode, link {speed / 1e9:g} GB/s"))
            console.print(verdict(rows))


def _core(name: str, level: dict[str, Any]) -> str:
    return (
        f"{name} core: {level['bandwidth_gib'] * GIB / 1e9:.1f} GB/s, {1e3 * level['tflops']:.0f} Gflops/s, "
        f"overlap {level['overlap']:.2f}, attention {level['attention_efficiency']:.2f} of its roofline, "
        f"prompts {level['prefill_efficiency']:.2f} of the peak, a task {level['launch_us']:.0f} us beside, "
        f"experts of 1 row {level['experts'][0]['gflops']:.1f} Gflops/s"
    )


def _table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in (
        "schedule",
        "tokens/s",
        "priced",
        "measured / priced",
        "x serial",
        "priced x",
        "ratio of both",
    ):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    table.add_column("busy: fast, slow, down (priced)", justify="right")
    base = base_of(rows)
    for row in rows:
        ours, theirs = row["measured"] / base["measured"], row["priced"] / base["priced"]
        table.add_row(
            row["schedule"],
            f"{row['measured']:.1f}",
            f"{row['priced']:.1f}",
            f"{row['measured'] / row['priced']:.2f}",
            f"{ours:.2f}",
            f"{theirs:.2f}",
            f"{ours / theirs:.2f}",
            ", ".join(
                f"{row['busy'][lane.value]:.0%} ({row['priced_busy'][lane.value]:.0%})"
                for lane in (Lane.FAST, Lane.SLOW, Lane.LINK_DOWN)
            ),
        )
    return table


def base_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The schedule that others are compared with: serial, or the first one if serial is missing."""
    return next((row for row in rows if row["schedule"] == "serial"), rows[0])


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """What CGOPipe gains over the paper's other schedules, measured and priced, and how far the ratios
    differ."""
    base = base_of(rows)
    off = {
        row["schedule"]: row["measured"] / base["measured"] / (row["priced"] / base["priced"]) - 1
        for row in rows
        if row is not base
    }
    worst = max(off, key=lambda name: abs(off[name]), default=None)
    text = "" if worst is None else f"ratios to {base['schedule']}: worst {worst}, {off[worst]:+.0%}"
    mine = next((row for row in rows if row["schedule"] == "cgopipe"), None)
    if mine is None:
        return text
    others = [row for row in rows if row["schedule"] in PAPER and row is not mine]
    behind = [row["schedule"] for row in others if mine["measured"] < (1 - BEHIND) * row["measured"]]
    ahead = [
        f"{row['schedule']} {mine['measured'] / row['measured']:.2f} ({mine['priced'] / row['priced']:.2f})"
        for row in others
    ]
    return f"{text}; cgopipe over others (priced): {', '.join(ahead)}; behind: {', '.join(behind) or 'none'}"
