"""`affinity`: two ranks by dispatch and placement; what crosses between them, and tokens/s.

An attention worker and an expert server share a core: they are a rank. Requests of several domains come
mixed, all at once, each round others in another order, the same for all ways of serving. Each placement comes
with its own tables, so affinity knows where its experts are, also those of `vanilla`.

    local              share of the (row, expert) pairs that went to the own rank's server, as workers counted
    remote B/token     bytes of calls to the other server and of its answers, as workers counted them: a row
                       is sent to a server once, and comes back for each of its experts there
    token              a row that was computed, of prompts and of answers
    tok/s              of answers, over the whole run

Both ranks are on one machine and share its memory, so a remote pair costs little more than a local one here.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from disaggregated.serving import Served, layout_of, medians, serving, temporary
from moesaic.commands.place_formats import save
from moesaic.config import ClusterConfig, DispatchName
from moesaic.core.errors import ConfigError
from moesaic.core.metrics import WorkerStats
from moesaic.core.profile import Profile, Routes
from moesaic.jobs.profiling import prompts as profiled
from moesaic.models import files
from moesaic.policy.placement import redundancy
from moesaic.policy.placement.solvers import SOLVERS
from moesaic.text.tokenizer import Tokenizer

RANKS = 2
VANILLA = "vanilla"

Tokens = list[int]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One row for each placement and dispatch, and what was served."""
    layout = layout_of(arguments.model)
    profile = Profile.load(arguments.profile)
    profile.check(layout.fingerprint, str(arguments.profile))
    domains = read(arguments, profile)
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    with ExitStack() as stack, Progress(console=Console(stderr=True)) as progress:
        folder = Path(stack.enter_context(temporary()))
        ways = [
            (solver, dispatch) for solver in (VANILLA, arguments.solver) for dispatch in arguments.dispatch
        ]
        placements = {solver: placed(profile, solver, folder) for solver in (VANILLA, arguments.solver)}
        task = progress.add_task("measuring", total=len(ways) * (2 + arguments.rounds))
        engines = []
        for solver, dispatch in ways:
            opened = _ranks(f"{solver}, {dispatch}", placements[solver], dispatch, arguments)
            engines.append(stack.enter_context(opened))
            progress.advance(task)
        for engine in engines:  # for warmth
            engine.run(mixed(domains, 2 * len(domains), 0), 4)
            progress.advance(task)
        for turn in range(arguments.rounds):
            prompts = mixed(domains, arguments.concurrency, turn)
            for way, engine in zip(ways, engines, strict=True):
                row = one_run(engine, prompts, arguments.gen_len)
                runs.setdefault(way, []).append(row)
                progress.advance(task)
    rows = [
        {"placement": solver, "dispatch": dispatch, **medians(found)}
        for (solver, dispatch), found in runs.items()
    ]
    sizes = {domain: len(prompts) for domain, prompts in domains.items()}
    return {"rows": rows, "prompts": sizes, "concurrency": arguments.concurrency, "rounds": arguments.rounds}


def placed(profile: Profile, solver: str, folder: Path) -> Path:
    """A solver's placement with its tables beside it, as `moesaic place` writes them."""
    clusters = SOLVERS[solver](profile, RANKS)
    file = folder / f"{solver}.json"
    placement = redundancy.place(profile, clusters, tables=f"{solver}.tables.npz")
    save(placement, redundancy.tables_of(profile, clusters, placement), file)
    return file


@contextmanager
def _ranks(
    name: str, placement: Path, dispatch: DispatchName, arguments: argparse.Namespace
) -> Iterator[Served]:
    shape = ClusterConfig(
        data_parallel_size=RANKS,
        enable_expert_parallel=True,
        placement=str(placement),
        dispatch=dispatch,
        rebalance_interval=0,
    )
    settings = {"schedule": arguments.schedule, "max_num_seqs": max(64, arguments.concurrency)}
    with serving(name, arguments.model, 1, shape, **settings) as served:
        served.pin(sorted(os.sched_getaffinity(0)))
        yield served


def one_run(engine: Served, prompts: list[Tokens], new: int) -> dict[str, float]:
    before = engine.counters()
    run, _ = engine.measured(prompts, new)
    after = engine.counters()
    pairs = [b.pairs - a.pairs for a, b in zip(before.servers, after.servers, strict=True)]
    return {
        **crossed(before.worker, after.worker),
        "server_mean_over_max": sum(pairs) / len(pairs) / max(1, *pairs),
        "prefill_tokens_per_s": run.prefill_tokens_per_s,
        "decode_tokens_per_s": run.decode_tokens_per_s,
        "tokens_per_s": len(prompts) * new / max(one[-1] for one in run.times),
    }


def crossed(before: WorkerStats, after: WorkerStats) -> dict[str, float]:
    """What the attention workers sent between two moments; bytes as they counted them.

    Example: 10 rows and 80 pairs, 60 of them local, 320 bytes to other servers and back -> rate 0.75; 2 pairs
    and 32 bytes a token.
    """

    old, new = before.experts, after.experts
    rows = after.prefill_tokens + after.decode_tokens - before.prefill_tokens - before.decode_tokens
    pairs = sum(new.layer_pairs) - sum(old.layer_pairs)
    local = sum(new.local_pairs) - sum(old.local_pairs)
    remote = (pairs - local) / max(1, rows)
    return {
        "local_activation_rate": local / max(1, pairs),
        "remote_pairs_per_token": remote,
        "remote_bytes_per_token": (new.remote_bytes - old.remote_bytes) / max(1, rows),
        "rows": rows,
    }


# ---- prompts


def read(arguments: argparse.Namespace, profile: Profile) -> dict[str, list[Tokens]]:
    """Token ids of each domain's prompts, cut to --prompt-len, without those that the profile holds."""
    tokenizer = Tokenizer(files.resolve(arguments.model, None))
    found: dict[str, list[Tokens]] = {}
    for prompt in profiled.read(arguments.prompts):
        text = prompt.text
        tokens = tokenizer.encode(text) if isinstance(text, str) else text
        found.setdefault(prompt.topic, []).append(tokens[: arguments.prompt_len])
    return {
        domain: unknown(prompts, profile.routes, arguments.prompt_len) for domain, prompts in found.items()
    }


def unknown(prompts: Sequence[Tokens], routes: Routes, length: int) -> list[Tokens]:
    """Of prompts cut to `length` those with which no request of `routes` begins, each once.

    Example: a request 5 6 7 8, length 2: prompts 5 6, 5 7, 5 7 -> 5 7.
    """
    seen = set()
    for start, count in zip(routes.starts[:-1].tolist(), routes.prompts.tolist(), strict=True):
        seen.add(tuple(routes.tokens[start : start + min(count, length)].tolist()))
    return [list(tokens) for tokens in dict.fromkeys(map(tuple, prompts)) if tokens and tokens not in seen]


def mixed(domains: Mapping[str, Sequence[Tokens]], count: int, seed: int) -> list[Tokens]:
    """`count` prompts, as many of each domain, give or take one, drawn and put in order at random.

    Raises ConfigError where a domain has too few.
    """
    rng = random.Random(seed)
    found: list[Tokens] = []
    for number, (domain, prompts) in enumerate(domains.items()):
        wanted = count // len(domains) + (number < count % len(domains))
        if wanted > len(prompts):
            allowed = f"{wanted} or more that the profile does not hold, or a lower --concurrency"
            raise ConfigError.field(f"--prompts: prompts of {domain}", len(prompts), allowed)
        found += rng.sample(prompts, wanted)
    rng.shuffle(found)
    return found


# ---- command line


def show(found: dict[str, Any], console: Console) -> None:
    domains = ", ".join(f"{domain} ({count})" for domain, count in found["prompts"].items())
    what = f"{found['concurrency']} requests at once, evenly drawn from the prompts of {domains}"
    table = Table(title=f"two ranks, {what}; medians of rounds: {found['rounds']}")
    for column in ("placement", "dispatch"):
        table.add_column(column, no_wrap=True)
    columns = ("local", "remote pairs/token", "remote B/token", "servers mean/max")
    for column in (*columns, "prefill tok/s", "decode tok/s", "tok/s", "of first"):
        table.add_column(column, justify="right")
    base = found["rows"][0]["tokens_per_s"]
    for row in found["rows"]:
        table.add_row(
            *(row["placement"], row["dispatch"], f"{row['local_activation_rate']:.1%}"),
            *(f"{row['remote_pairs_per_token']:.2f}", f"{row['remote_bytes_per_token']:,.0f}"),
            f"{row['server_mean_over_max']:.2f}",
            *(f"{row[name]:.1f}" for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "tokens_per_s")),
            f"{row['tokens_per_s'] / base:.2f}x",
        )
    console.print(table)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", type=Path, required=True, help="of this model, by moesaic profile")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="files, each a domain")
    parser.add_argument("--solver", choices=[name for name in SOLVERS if name != VANILLA], default="ours")
    rules = ("round-robin", "affinity")
    parser.add_argument("--dispatch", nargs="+", choices=get_args(DispatchName), default=rules)
    parser.add_argument("--schedule", choices=("barrier", "lockstep", "async"), default="lockstep")
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--prompt-len", type=int, default=64, help="most tokens of a prompt")
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)


def quick(arguments: argparse.Namespace) -> None:
    arguments.concurrency, arguments.gen_len, arguments.rounds = 12, 8, 1
