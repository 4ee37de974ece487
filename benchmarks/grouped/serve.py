"""`serve`: a model on two ranks in the four forms, against one process with as many threads.

The shuffled form has a placement made of a profile of other prompts of the same kind; the other forms have
experts in consecutive ranges. Bytes are those of the first rank, all layers together.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from disaggregated.serving import Served, layout_of, medians, random_prompts, serving, temporary
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from moesaic.config import ClusterConfig
from moesaic.core.metrics import GroupStats, WorkerStats
from moesaic.core.profile import Profile
from moesaic.jobs.profiling.prompts import read
from moesaic.models import files
from moesaic.policy.placement import predict
from moesaic.policy.placement.solvers import SOLVERS
from moesaic.text.tokenizer import Tokenizer

ALONE = "one process"
SHUFFLED = "shuffled"
FORMS = ("deepspeed", "all-reduce", "reduce-scatter", SHUFFLED)
IDS = 1000
"""Upper bound of the token ids of random prompts."""
PAYLOAD = ("all_reduce_bytes", "reduce_scatter_bytes", "all_gather_bytes", "all_to_all_bytes")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each way of serving and each concurrency."""
    runs: dict[tuple[int, str], list[dict[str, float]]] = {}
    profiled, served = prompts_of(arguments)
    with ExitStack() as stack, Progress(console=Console(stderr=True)) as progress:
        folder = Path(stack.enter_context(temporary()))
        total = (1 + arguments.rounds * len(arguments.concurrency)) * (1 + len(arguments.form))
        task = progress.add_task("loading", total=total)
        placement = arguments.placement
        if placement is None and SHUFFLED in arguments.form:
            progress.update(task, description="placing")
            placement = place(profiled, folder, arguments)
        engines = [stack.enter_context(one) for one in _engines(arguments, placement)]
        progress.update(task, description="measuring")
        for engine in engines:  # the first run of each is for warmth
            one_run(engine, served[: min(arguments.concurrency)], 4)
            progress.advance(task)
        for concurrency in arguments.concurrency:
            for turn in range(arguments.rounds):
                some = random.Random(turn).sample(served, concurrency)
                for engine in engines:
                    row = one_run(engine, some, arguments.gen_len)
                    runs.setdefault((concurrency, engine.name), []).append(row)
                    progress.advance(task)
    return [
        {"concurrency": concurrency, "engine": name, **medians(rows)}
        for (concurrency, name), rows in runs.items()
    ]


def _engines(arguments: argparse.Namespace, placement: Path | None) -> Iterator[Any]:
    size = arguments.ranks
    yield serving(ALONE, arguments.model, size)
    for form in arguments.form:
        file = str(placement) if form == SHUFFLED else None
        shape = ClusterConfig(tensor_parallel_size=size, moe_collectives=form, placement=file)
        yield serving(form, arguments.model, 1, shape)


def prompts_of(arguments: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts to profile, and of the prompts to serve."""
    tokenizer = Tokenizer(files.resolve(arguments.model, None))
    most, length = max(arguments.concurrency), arguments.prompt_len
    if not arguments.prompts:
        made = random_prompts(arguments.profiled + 2 * most, length, min(IDS, tokenizer.vocab_size))
        return made[: arguments.profiled], made[arguments.profiled :]
    texts = [one.text for one in read(arguments.prompts)]
    made = [tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
    return split([one[:length] for one in made], arguments.profiled, most)


def split(prompts: list[list[int]], profiled: int, most: int) -> tuple[list[list[int]], list[list[int]]]:
    """In random order: `profiled` of them or as many as leave `most`, and all others.

    Raises SystemExit where there are fewer than one and `most`.
    """
    mixed = random.Random(0).sample(prompts, len(prompts))
    count = min(profiled, len(mixed) - most)
    if count < 1:
        raise SystemExit(f"--prompts: {len(mixed)} prompts; allowed: {most + 1} or more")
    return mixed[:count], mixed[count:]


def place(prompts: list[list[int]], folder: Path, arguments: argparse.Namespace) -> Path:
    """A placement file, its tables beside it, of a profile that `moesaic profile` makes of the prompts."""
    lines, file = folder / "prompts.jsonl", folder / "profile.npz"
    lines.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    command = [sys.executable, "-m", "moesaic", "profile", arguments.model]
    command += ["--prompts", str(lines), "-o", str(file), "--max-tokens", str(arguments.gen_len)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    profile = Profile.load(file)
    profile.check(layout_of(arguments.model).fingerprint, str(file))
    clusters = SOLVERS[arguments.solver](profile, arguments.ranks)
    predict.build(profile, clusters).save(folder / "tables.npz")
    placement = folder / "placement.json"
    placement.write_text(clusters.placement(profile.layers, profile.model, "tables.npz").to_json())
    return placement


def one_run(engine: Served, prompts: list[list[int]], new: int) -> dict[str, float]:
    before = engine.counters().worker
    run = engine.run(prompts, new)
    after = engine.settled().worker
    return {
        "prefill_tokens_per_s": run.prefill_tokens_per_s,
        "decode_tokens_per_s": run.decode_tokens_per_s,
        **moved(before, after),
    }


def moved(before: WorkerStats, after: WorkerStats) -> dict[str, float]:
    """Bytes of a token (a computed row) that the first rank sent, and the share of its pairs that were local.

    The share is 0 where no pair was looked at: in one process, and where no token travels.
    """

    def grown(name: str) -> int:
        return int(getattr(new, name) - getattr(old, name))

    old: GroupStats = before.experts.group
    new: GroupStats = after.experts.group
    rows = after.prefill_tokens + after.decode_tokens - before.prefill_tokens - before.decode_tokens
    return {
        "payload_bytes_per_token": sum(map(grown, PAYLOAD)) / max(1, rows),
        "all_to_all_bytes_per_token": grown("all_to_all_bytes") / max(1, rows),
        "metadata_bytes_per_token": grown("metadata_bytes") / max(1, rows),
        "local_share": grown("local_pairs") / max(1, grown("pairs")),
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="attention and experts on ranks of one thread, against one process with all threads")
    columns = ("reqs", "served by", "prefill tok/s", "ratio", "decode tok/s", "ratio")
    for column in (*columns, "payload B/token", "all-to-all", "metadata", "local share"):
        table.add_column(column, justify="left" if column == "served by" else "right")
    table.caption = "bytes that the first rank sent; over all layers"
    base = {row["concurrency"]: row for row in rows if row["engine"] == ALONE}
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        alone, apart = base[row["concurrency"]], row["engine"] != ALONE
        table.add_row(
            str(row["concurrency"]),
            row["engine"],
            f"{row['prefill_tokens_per_s']:.1f}",
            f"{row['prefill_tokens_per_s'] / alone['prefill_tokens_per_s']:.2f}x",
            f"{row['decode_tokens_per_s']:.1f}",
            f"{row['decode_tokens_per_s'] / alone['decode_tokens_per_s']:.2f}x",
            f"{row['payload_bytes_per_token']:,.0f}" if apart else "",
            f"{row['all_to_all_bytes_per_token']:,.0f}" if apart else "",
            f"{row['metadata_bytes_per_token']:,.0f}" if apart else "",
            f"{row['local_share']:.3f}" if row["local_share"] else "",
            end_section=following is None or following["concurrency"] != row["concurrency"],
        )
    console.print(table)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="demo", help="a Hugging Face directory, or demo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--form", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--placement", type=Path, help="with tables, of shuffled; default: made of a profile")
    parser.add_argument("--solver", choices=sorted(SOLVERS), default="ours", help="that makes it")
    parser.add_argument("--prompts", type=Path, nargs="+", help="as of moesaic profile; default: random ids")
    parser.add_argument("--profiled", type=int, default=200, help="prompts that the profile is made of")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=64, help="most tokens of a prompt")
    parser.add_argument("--gen-len", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)


def quick(arguments: argparse.Namespace) -> None:
    arguments.concurrency, arguments.rounds, arguments.gen_len = [1, 8], 1, 8
    arguments.profiled = 30
