"""`latency`: p50 and p99 of each collective, and of rows to their experts and back by local share.

An all-to-all-v is `dispatch` and `combine_pairs`: rows in one packet with what says which they are, once to
each rank; an answer for each pair back, put in its place. The experts between take no time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from grouped import processes, routes
from grouped.processes import Call, slowest, task_folder, timed
from moesaic.experts.collectives.group import Group
from moesaic.experts.collectives.one_shot import OneShotGroup
from moesaic.experts.collectives.routing import Route, combine_pairs, dispatch
from moesaic.transport.peers import Peers

DENSE = ("all-reduce", "reduce-scatter", "all-gather")
GLOO = "gloo "
"""Prefix of the names of gloo's operations."""


def exchange_name(share: float) -> str:
    """Example: "all-to-all 0.2"."""
    return f"all-to-all {share:g}"


# ---- a rank


def on_rank(peers: Peers, task: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """For each number of rows: times of each operation, and bytes of one call of ours."""
    if task["gloo"]:
        from grouped import gloo

        gloo.join(folder, peers.rank, peers.size)
    group = OneShotGroup(peers)
    found = []
    for done, rows in enumerate(task["rows"]):
        processes.report(group.rank, done, len(task["rows"]))
        ours = operations(group, rows, task)
        counted = {name: _counted(group, once) for name, once in ours.items()}
        theirs = _gloo(group, rows, task) if task["gloo"] else {}
        times = timed(group, ours | theirs, task["rounds"], task["seconds"])
        found.append({"times": times, "bytes": counted})
    if task["gloo"]:
        gloo.leave()
    return found


def operations(group: Group, rows: int, task: dict[str, Any]) -> dict[str, Call]:
    """Our operations, by name."""
    hidden = task["hidden"]
    whole = np.ones((rows, hidden), np.float32)
    mine = np.ones((int((_drawn(group, rows, 0.5, task).homes == group.rank).sum()), hidden), np.float32)
    dense: dict[str, Call] = {
        "all-reduce": lambda: group.all_reduce(whole),
        "reduce-scatter": lambda: group.reduce_scatter(whole),
        "all-gather": lambda: group.all_gather(mine),
    }
    return dense | {
        exchange_name(share): exchange(group, _drawn(group, rows, share, task), hidden)
        for share in task["shares"]
    }


def exchange(group: Group, drawn: routes.Drawn, hidden: int) -> Call:
    """Sends rows to their experts and the answers back."""
    mine = drawn.homes == group.rank
    route = Route(drawn.experts[mine], drawn.owners[mine])
    rows = np.ones((int(mine.sum()), hidden), np.float32)
    weights = np.ones(route.owners.shape, np.float32)
    here = drawn.owners == group.rank
    counts = [int(here[drawn.homes == rank].sum()) for rank in range(group.size)]
    answers = [np.ones((count, hidden), np.float32) for count in counts]

    def once() -> None:
        dispatch(group, route, rows, weights)
        combine_pairs(group, route, answers)

    return once


def _gloo(group: Group, rows: int, task: dict[str, Any]) -> dict[str, Call]:
    from grouped import gloo

    found = {GLOO + name: once for name, once in gloo.operations(rows, task["hidden"]).items()}
    for share in task["shares"]:
        there, back = legs(_drawn(group, rows, share, task), group.rank, group.size)
        found[GLOO + exchange_name(share)] = gloo.all_to_all(task["hidden"], there, back)
    return found


def legs(drawn: routes.Drawn, rank: int, size: int) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Rows that one rank sends to and receives from each other one: there, and back."""
    there, back = {"sent": [0] * size, "received": [0] * size}, {"sent": [0] * size, "received": [0] * size}
    for other in set(range(size)) - {rank}:
        asked = drawn.owners[drawn.homes == rank] == other
        asking = drawn.owners[drawn.homes == other] == rank
        there["sent"][other], back["received"][other] = int(asked.any(axis=1).sum()), int(asked.sum())
        there["received"][other], back["sent"][other] = int(asking.any(axis=1).sum()), int(asking.sum())
    return there, back


def _drawn(group: Group, rows: int, share: float, task: dict[str, Any]) -> routes.Drawn:
    return routes.draw(rows, task["top_k"], task["experts"], group.size, share, task["seed"])


def _counted(group: Group, once: Call) -> dict[str, int]:
    before = group.traffic
    once()
    after = group.traffic
    return {
        "payload": after.payload - before.payload,
        "metadata": after.metadata - before.metadata,
    }


# ---- the parent


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of ranks, width, number of rows and operation."""
    found: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True)) as progress:
        shapes = [(size, hidden) for size in arguments.ranks for hidden in arguments.hidden]
        bar = progress.add_task("measuring", total=len(shapes) * len(arguments.rows))
        for number, (size, hidden) in enumerate(shapes):
            task = {name: getattr(arguments, name) for name in ("rows", "shares", "rounds", "seconds")}
            task |= {"kind": "latency", "hidden": hidden, "gloo": not arguments.no_gloo}
            task |= {name: getattr(arguments, name) for name in ("top_k", "experts", "seed")}
            base = number * len(arguments.rows)
            with task_folder(task) as folder:
                ranks = processes.run(folder, size, _advance(progress, bar, base))
            for rows, each in zip(arguments.rows, zip(*ranks, strict=True), strict=True):
                found += [{"ranks": size, "hidden": hidden, "rows": rows, **row} for row in _rows(each)]
        progress.update(bar, completed=len(shapes) * len(arguments.rows))
    _add_forms(found, arguments)
    return found


def _advance(progress: Progress, bar: TaskID, base: int) -> Callable[[int, int], None]:
    return lambda done, _: progress.update(bar, completed=base + done)


def _rows(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table for one number of rows, from what all ranks found."""
    found = []
    for name in ranks[0]["times"]:
        times = slowest([rank["times"][name] for rank in ranks])
        p50, p99 = (np.percentile(times, [50, 99]) * 1e6).round(1).tolist()
        row = {"operation": name, "calls": len(times), "p50_us": p50, "p99_us": p99}
        counted = [rank["bytes"][name] for rank in ranks if name in rank["bytes"]]
        for kind in counted[0] if counted else ():
            row[f"{kind}_bytes"] = sum(one[kind] for one in counted) / len(ranks)
        found.append(row)
    return found


def _add_forms(found: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Beside the bytes that were counted, those of the closed forms; and the local share that was reached."""
    for row in found:
        size, hidden, rows = row["ranks"], row["hidden"], row["rows"]
        forms = routes.closed_forms(rows, hidden, size)
        for share in arguments.shares:
            if row["operation"].removeprefix(GLOO) != exchange_name(share):
                continue
            drawn = routes.draw(rows, arguments.top_k, arguments.experts, size, share, arguments.seed)
            row["local_share"] = drawn.local_share
            forms[row["operation"]] = routes.all_to_all(drawn, hidden, size)
            row["without_deduplication"] = routes.all_to_all(drawn, hidden, size, once=False)
        if row["operation"] in forms:
            row["closed_form"] = forms[row["operation"]]


def show(found: list[dict[str, Any]], console: Console) -> None:
    for size, hidden in dict.fromkeys((row["ranks"], row["hidden"]) for row in found):
        these = [row for row in found if (row["ranks"], row["hidden"]) == (size, hidden)]
        names = [one for one in dict.fromkeys(row["operation"] for row in these) if not one.startswith(GLOO)]
        by = {(row["rows"], row["operation"]): row for row in these}
        console.print(_times(f"{size} ranks, rows of {hidden} float32", names, by))
        console.print(_bytes(f"{size} ranks, rows of {hidden} float32", names, by))


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column("rows", justify="right")
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _times(shape: str, names: Sequence[str], by: dict[tuple[int, str], dict[str, Any]]) -> Table:
    table = _table(f"{shape}: p50 / p99 in us", names)
    table.caption = (
        "of all-reduce: our p50 over that of our all-reduce. Few pairs only come near a local share"
    )
    for rows in dict.fromkeys(rows for rows, _ in by):
        base = by[rows, "all-reduce"]["p50_us"]
        table.add_row(str(rows), "ours", *(_cell(by[rows, name]) for name in names))
        theirs = [by.get((rows, GLOO + name)) for name in names]
        if all(theirs):
            table.add_row("", "gloo", *(_cell(row) for row in theirs if row))
        ratios = (f"{by[rows, name]['p50_us'] / base:.2f}x" for name in names)
        table.add_row("", "of all-reduce", *ratios, end_section=True)
    return table


def _bytes(shape: str, names: Sequence[str], by: dict[tuple[int, str], dict[str, Any]]) -> Table:
    table = _table(f"{shape}: payload bytes per rank, there and back", names)
    table.caption = (
        "closed form of an all-to-all: a row for each other rank, and one back for each pair there"
    )
    for rows in dict.fromkeys(rows for rows, _ in by):
        for label, key in (
            ("counted", "payload_bytes"),
            ("closed form", "closed_form"),
            ("not de-duplicated", "without_deduplication"),
            ("metadata", "metadata_bytes"),
        ):
            cells = (f"{by[rows, name][key]:,.0f}" if key in by[rows, name] else "" for name in names)
            number = str(rows) if label == "counted" else ""
            table.add_row(number, label, *cells, end_section=label == "metadata")
    return table


def _cell(row: dict[str, Any]) -> str:
    return f"{row['p50_us']:,.0f} / {row['p99_us']:,.0f}"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 512])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 2048], help="numbers of a row")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.4, 0.6, 0.8, 0.9])
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1000, help="calls of each operation")
    parser.add_argument("--seconds", type=float, default=3.0, help="the most that those of one may take")
    parser.add_argument("--seed", type=int, default=0, help="of the routes")
    parser.add_argument("--no-gloo", action="store_true")


def quick(arguments: argparse.Namespace) -> None:
    arguments.ranks, arguments.rows, arguments.hidden = [2], [1, 16], [1024]
    arguments.rounds, arguments.seconds = 50, 0.5
