"""RAM over the disk: a checkpoint larger than the memory, through moesaic's schedules and peers.

Every run is a process of its own, in a memory control group whose limit is --cap plus --libraries; the
checkpoint's pages are dropped from the page cache before it starts, and what it reads itself is counted
as its own. Shown are medians of interleaved rounds: `tok/s` is generated tokens over prefill and decode
seconds, loading left out; `of it` is the first contender's rate over this one's; `link busy` the share of
decode in which experts came from the disk; `read` what the disk was read; `resident` the most memory of
the process, `charged` that of the group, its page cache included; `equal` counts answers whose tokens are
the first contender's, as far as both go; `parts at` is the token where the others part from them, in the
median. Seconds that moesaic predicted come in a table of their own: by the machine's file, and with the speed
that the link had in the run itself. A run that --time-limit ends shows what was reached, marked with <, and
after ~ what the whole job would have come to at that pace; --rounds does not repeat it.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from countdown import Clock, Tell
from rich.console import Console

from offloading import report
from offloading.contenders import SCHEDULES, Contender, cache_numbers, contenders, ordered
from offloading.groups import Group, NoGroup, create
from offloading.ours import planned
from offloading.watching import Outcome, drop_cache, watch
from offloading.workload import prompts, questions

BALANCE = "balance"
"""Takes the place of a batch size: the size that the planner would take for an endless job."""
ENDLESS = 512
"""Number of prompts that stand for an endless job."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=_absolute, help="a Hugging Face directory")
    parser.add_argument("--prompts", type=Path, required=True, help="such as MT-Bench's question.jsonl")
    parser.add_argument("--cap", default="1200MiB", help="fast memory of each contender")
    parser.add_argument("--libraries", default="384MiB", help="what a process may take besides")
    parser.add_argument("--no-limit", action="store_true", help="no control group: peaks are only shown")
    parser.add_argument("--batches", nargs="+", type=_batch, default=[1, 32, 128, BALANCE], metavar="N")
    parser.add_argument("--prompt-len", type=int, default=77, help="tokens that prompts are cut to")
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--few", type=int, default=8, help="in place of --gen-len at batch 1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds of a run; the same to load")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--schedules", nargs="*", choices=("auto", *SCHEDULES), default=list(SCHEDULES))
    compressed = "also every schedule on this: what `moesaic compress` made of the model"
    parser.add_argument("--compressed", type=_absolute, metavar="DIR", help=compressed)
    parser.add_argument(
        "--pad", action="store_true", help="also the first schedule with all prompts padded to the longest"
    )
    parser.add_argument("--kv-cache-dtype", choices=("auto", "bfloat16", "float32", "int8"), default="auto")
    parser.add_argument(
        "--hardware", type=_absolute, help="of `moesaic hardware measure`; measured if not given"
    )
    popular = "of `moesaic profile`: plans and prices know which experts are popular"
    parser.add_argument("--profile", type=_absolute, metavar="FILE", help=popular)
    _peers(parser)


def _peers(parser: argparse.ArgumentParser) -> None:
    venv = parser.add_argument_group("peers, each in a virtual environment of its own")
    venv.add_argument("--accelerate", type=Path, metavar="VENV", help="torch, transformers and accelerate")
    venv.add_argument("--accelerate-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    venv.add_argument("--accelerate-experts", choices=("eager", "grouped_mm"), default="grouped_mm")
    venv.add_argument("--llama", type=Path, metavar="VENV", help="from setup_peer.sh llama")
    venv.add_argument("--llama-rows", type=int, default=2048, help="that one pass computes at most")
    venv.add_argument("--work", type=_absolute, help="where peers' files go; beside MODEL if not given")


def quick(arguments: argparse.Namespace) -> None:
    arguments.batches, arguments.rounds, arguments.gen_len, arguments.few = [1, 4], 1, 4, 2


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _batch(text: str) -> int | str:
    return text if text == BALANCE else int(text)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The results of all runs, and their medians."""
    from moesaic.config import parse_bytes
    from moesaic.text.tokenizer import Tokenizer

    cap = parse_bytes("--cap", arguments.cap)
    limit = None if arguments.no_limit else cap + parse_bytes("--libraries", arguments.libraries)
    if limit is not None:
        _try(limit)
    texts, encode = questions(arguments.prompts), Tokenizer(arguments.model).encode
    with tempfile.TemporaryDirectory() as folder:
        hardware = arguments.hardware or _measured(arguments, Path(folder) / "this.toml")
        everyone = contenders(arguments, hardware)
        sizes = _sizes(arguments, cap, hardware, texts, encode)
        jobs = [_job(arguments, cap, prompts(texts, encode, size, arguments.prompt_len)) for size in sizes]
        rows = list(_all(everyone, jobs, limit, arguments))
    return {"settings": {name: str(value) for name, value in vars(arguments).items()}, "rows": rows}


def _try(limit: int) -> None:
    try:
        create(limit, _group_name()).remove()
    except NoGroup as error:
        raise SystemExit(f"offload: {error}") from error


def _group_name() -> str:
    return f"moesaic-offload-{os.getpid()}"


def _measured(arguments: argparse.Namespace, file: Path) -> Path:
    """This machine, as `moesaic hardware measure` finds it, on the model's disk and without a limit."""
    command = [sys.executable, "-m", "moesaic", "hardware", "measure", "-o", str(file)]
    subprocess.run([*command, "--path", str(arguments.model)], check=True, stdout=sys.stderr)
    return file


def _job(arguments: argparse.Namespace, cap: int, batch: list[list[int]]) -> dict[str, Any]:
    """What every contender is told about the job."""
    new = arguments.few if len(batch) == 1 else arguments.gen_len
    return {
        "model": str(arguments.model),
        "prompts": batch,
        "new": new,
        "threads": arguments.threads,
        "cap": cap,
        "cache_numbers": cache_numbers(arguments.model),
    }


def _sizes(
    arguments: argparse.Namespace, cap: int, hardware: Path, texts: list[str], encode: Any
) -> list[int]:
    """The different batch sizes, as numbers."""
    found = []
    for batch in arguments.batches:
        if isinstance(batch, str):
            job = _job(arguments, cap, prompts(texts, encode, ENDLESS, arguments.prompt_len))
            batch = planned(job | ordered("auto", arguments, hardware), math.inf).price.policy.batch
            Console(stderr=True).print(f"the planner's balance is at a batch of {batch}")
        found.append(batch)
    return list(dict.fromkeys(found))


def _all(
    everyone: list[Contender], jobs: list[dict[str, Any]], limit: int | None, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One row per (batch, contender)."""
    steps = [_step(one, job) for job in jobs for _ in range(arguments.rounds) for one in everyone]
    with Clock(steps) as clock:
        for job in jobs:
            runs: dict[str, list[Outcome]] = {one.name: [] for one in everyone}
            for turn in range(arguments.rounds):
                clock.what = f"round {turn + 1}"
                for one in everyone:
                    heard = _once(one, job, limit, arguments.time_limit, runs[one.name], clock)
                    runs[one.name] += heard
            reference = runs[everyone[0].name]
            for one in everyone:
                yield report.summarise(one.name, len(job["prompts"]), runs[one.name], reference[0])


def _once(
    one: Contender,
    job: dict[str, Any],
    limit: int | None,
    seconds: float,
    before: list[Outcome],
    clock: Clock,
) -> list[Outcome]:
    """One run. None if the first round failed, since it would fail again."""

    def step(tell: Tell) -> list[Outcome]:
        if before and before[0].ended != "done":
            return []
        drop_cache(one.reads)
        group = create(limit, _group_name()) if limit is not None else None
        return [_grouped(one, job, group, seconds, tell)]

    return clock.timed(_step(one, job), step)


def _grouped(one: Contender, job: dict[str, Any], group: Group | None, seconds: float, tell: Tell) -> Outcome:
    try:
        return watch(one.command, one.environment, job | one.order, group, seconds, tell)
    finally:
        if group is not None:
            group.remove()


def _step(one: Contender, job: dict[str, Any]) -> str:
    return f"{one.name} at {len(job['prompts'])}"


def show(found: dict[str, Any], console: Console) -> None:
    report.show(found["rows"], found["settings"], console)
