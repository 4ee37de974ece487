"""`ablation`: bytes and milliseconds of one exchange, without shuffle, placement, de-duplication, one packet.

Rows and their experts are a profile's: solver and tables have seen a fifth of the requests, rows are drawn
from the others. A step takes a batch through all layers. The experts between take no time; planning a
shuffle, and telling each other where rows were, does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import routings
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from grouped import processes
from grouped.exchange import CASES, BatchOrder, Exchange, Variant
from grouped.processes import Call, slowest, task_folder, timed
from moesaic.core.profile import Profile, Routes
from moesaic.core.tables import Tables
from moesaic.experts.collectives.group import Group
from moesaic.experts.collectives.one_shot import OneShotGroup
from moesaic.experts.collectives.packets import Packet
from moesaic.policy.placement import predict
from moesaic.policy.placement.solvers import SOLVERS
from moesaic.runtime.group.experts import GroupCounts
from moesaic.runtime.group.forecast import ExpectedRanks
from moesaic.transport.peers import Peers

SHARE = 0.2
"""The share of the requests that serves as the profile."""
TWICE = "all-reduce twice"
"""The form of the same name, which moves no token. It is here for comparison."""


# ---- a rank


def on_rank(peers: Peers, task: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """For each number of rows: seconds of the steps, and bytes and pairs of one pass over all batches."""
    group = OneShotGroup(peers)
    with np.load(folder / "rows.npz") as file:
        tokens, experts = file["tokens"], file["experts"].astype(np.int64)
    tables = {kind: Tables.load(folder / f"{kind}.npz") for kind in ("solved", "vanilla")}
    found = []
    for done, rows in enumerate(task["rows"]):
        processes.report(group.rank, done, len(task["rows"]))
        count = task["batches"]
        batches = [
            (tokens[first : first + rows].astype(np.int64), experts[first : first + rows])
            for first in range(0, rows * count, rows)
        ]
        steps = {
            name: Steps(peers, group, variant, tables, batches, task["hidden"])
            for name, variant in CASES.items()
        }
        counted = {name: one.counted() for name, one in steps.items()}
        calls: dict[str, Call] = {name: one.step for name, one in steps.items()}
        calls[TWICE] = all_reduces(group, rows, task["hidden"], experts.shape[1])
        counted[TWICE] = _bytes(group, calls[TWICE], 1)
        found.append({"times": timed(group, calls, task["rounds"], task["seconds"]), "counted": counted})
    return found


class Steps:
    """Runs one variant on one rank, batch after batch."""

    def __init__(
        self,
        peers: Peers,
        group: Group,
        variant: Variant,
        tables: dict[str, Tables],
        batches: Sequence[tuple[Any, Any]],
        hidden: int,
    ) -> None:
        """batches: token ids [n] and experts [n, layers, k]."""
        chosen = tables["solved" if variant.placement else "vanilla"]
        self._group, self._batches, self._turn = group, batches, 0
        self._layers = chosen.layers
        tokens, experts = batches[0]
        most = experts.shape[0] * experts.shape[2]
        scratch = np.ones((most, hidden), np.float32)

        def answer(packet: Packet) -> Any:
            return scratch[: int(np.count_nonzero(packet.experts >= 0))]

        forecast = ExpectedRanks(group, GroupCounts(), chosen) if variant.shuffle else BatchOrder(group)
        owners = chosen.experts.astype(np.int64)
        self._exchange = Exchange(peers, group, variant, forecast, owners, answer, lambda hidden, *_: hidden)
        self._weights = np.full((len(tokens), experts.shape[2]), 1 / experts.shape[2], np.float32)
        self._rows = np.ones((len(tokens), hidden), np.float32)

    def step(self) -> None:
        """Run all layers of the next batch."""
        tokens, experts = self._batches[self._turn % len(self._batches)]
        self._turn += 1
        self._exchange.begin(tokens)
        for index, number in enumerate(self._layers):
            self._exchange.layer(number, index, experts[:, index], self._weights, self._rows)

    def counted(self) -> dict[str, float]:
        """The bytes of this rank and its pairs in one step, as means over all batches."""
        found = _bytes(self._group, self.step, len(self._batches))
        local, pairs = self._exchange.local_pairs, self._exchange.pairs
        return found | {"local_pairs": local / len(self._batches), "pairs": pairs / len(self._batches)}


def all_reduces(group: Group, rows: int, hidden: int, layers: int) -> Call:
    """Runs two all-reduces for each layer."""
    whole = np.ones((rows, hidden), np.float32)

    def once() -> None:
        for _ in range(2 * layers):
            group.all_reduce(whole)

    return once


def _bytes(group: Group, once: Call, times: int) -> dict[str, float]:
    """The bytes that a call makes this rank send, as a mean over some calls."""
    before = group.traffic
    for _ in range(times):
        once()
    after = group.traffic
    return {
        "exchange": (after.all_to_all - before.all_to_all) / times,
        "payload": (after.payload - before.payload) / times,
        "metadata": (after.metadata - before.metadata) / times,
    }


# ---- the parent


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of ranks, number of rows and case."""
    profile = Profile.load(arguments.profile) if arguments.profile else made_up(arguments)
    train, test = profile.routes.split(SHARE, arguments.seed)
    found: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True)) as progress:
        for size in arguments.ranks:
            task = {
                name: getattr(arguments, name) for name in ("rows", "rounds", "seconds", "batches", "hidden")
            }
            with task_folder({"kind": "ablation", **task}) as folder:
                bar = progress.add_task(f"placing on {size} ranks", total=None)
                write(profile.with_routes(train), test, folder, size, arguments, _advance(progress, bar))
                progress.update(bar, description=f"measuring {size} ranks", completed=0)
                ranks = processes.run(folder, size, _advance(progress, bar))
                progress.update(bar, completed=len(arguments.rows), total=len(arguments.rows))
            layers = len(profile.layers)
            for rows, each in zip(arguments.rows, zip(*ranks, strict=True), strict=True):
                found += [{"ranks": size, "rows": rows, **row} for row in summary(each, rows, layers)]
    return found


def _advance(progress: Progress, bar: TaskID) -> Callable[[int, int], None]:
    return lambda done, total: progress.update(bar, completed=done, total=total)


def made_up(arguments: argparse.Namespace) -> Profile:
    return routings.generate(routings.SHAPES[0], arguments.layers, arguments.requests, arguments.seed)


def write(
    profile: Profile,
    test: Routes,
    folder: Path,
    size: int,
    arguments: argparse.Namespace,
    advance: Callable[[int, int], None],
) -> None:
    """Write the files that the ranks read: both placements with their tables, and rows of `test`."""
    for kind, solver in (("solved", arguments.solver), ("vanilla", "vanilla")):
        clusters = SOLVERS[solver](profile, size, arguments.seed, advance)
        predict.build(profile, clusters).save(folder / f"{kind}.npz")
    wanted = arguments.batches * max(arguments.rows)
    drawn = np.random.default_rng(arguments.seed).choice(len(test.tokens), wanted, wanted > len(test.tokens))
    np.savez(folder / "rows.npz", tokens=test.tokens[drawn], experts=test.experts[drawn])


def summary(ranks: Sequence[dict[str, Any]], rows: int, layers: int) -> list[dict[str, Any]]:
    """The figures of all ranks for one number of rows, for one exchange, which is one layer of a step."""
    found = []
    for name in ranks[0]["times"]:
        times = slowest([rank["times"][name] for rank in ranks]) / layers
        counted = [rank["counted"][name] for rank in ranks]
        totals = {key: sum(one[key] for one in counted) for key in counted[0]}
        row = {"case": name, "steps": len(times), "ms": float(np.median(times) * 1e3)}
        for kind in ("exchange", "payload", "metadata"):
            row[f"{kind}_bytes_per_row"] = totals[kind] / layers / rows
        if "pairs" in totals:
            row["local_share"] = totals["local_pairs"] / totals["pairs"]
        found.append(row)
    return found


def show(found: list[dict[str, Any]], console: Console) -> None:
    for size in dict.fromkeys(row["ranks"] for row in found):
        table = Table(title=f"{size} ranks: one feed-forward exchange; bytes of a row, of all ranks together")
        table.add_column("rows", justify="right")
        table.add_column("")
        for column in (
            "local share",
            "all-to-all",
            "payload",
            "of all four",
            "metadata",
            "ms",
            "of all four",
        ):
            table.add_column(column, justify="right")
        these = [row for row in found if row["ranks"] == size]
        for row in these:
            base = next(one for one in these if one["rows"] == row["rows"])
            first = row is base
            table.add_row(
                str(row["rows"]) if first else "",
                row["case"],
                f"{row['local_share']:.3f}" if "local_share" in row else "",
                f"{row['exchange_bytes_per_row']:,.0f}",
                f"{row['payload_bytes_per_row']:,.0f}",
                f"{row['payload_bytes_per_row'] / base['payload_bytes_per_row']:.2f}x",
                f"{row['metadata_bytes_per_row']:,.0f}",
                f"{row['ms']:.3f}",
                f"{row['ms'] / base['ms']:.2f}x",
                end_section=row["case"] == TWICE,
            )
        console.print(table)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", type=Path, nargs="?", help="default: what routings.py makes up")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 128, 512], help="of a batch")
    parser.add_argument("--hidden", type=int, default=2048, help="numbers of a row")
    parser.add_argument("--solver", choices=sorted(SOLVERS), default="ours")
    parser.add_argument("--batches", type=int, default=16, help="that are drawn")
    parser.add_argument("--rounds", type=int, default=200, help="steps of each case")
    parser.add_argument("--seconds", type=float, default=20.0, help="the most that those of one may take")
    parser.add_argument("--layers", type=int, default=8, help="of what is made up")
    parser.add_argument("--requests", type=int, default=800, help="of what is made up")
    parser.add_argument("--seed", type=int, default=0)


def quick(arguments: argparse.Namespace) -> None:
    arguments.ranks, arguments.rows, arguments.hidden = [2], [16, 64], 1024
    arguments.layers, arguments.requests, arguments.batches = 4, 60, 4
    arguments.rounds, arguments.seconds = 20, 1.0
