"""How far the bound and `ours` are from the best placement, where that is known: small layers of routings.py.

    python benchmarks/optimum.py
    python benchmarks/optimum.py --experts 12 --ranks 4 --ids 60 --seeds 0 1 2

An instance is one layer of made-up routing with few experts, of which only the --ids most frequent token ids
count. An integer program over all placements with equally many experts on each rank finds its optimum
(`placement_bounds/exact.py`). `ours` runs without a cap on loads, as the bound knows none. A row is the mean
of those instances of a shape that were solved in --seconds each:

    optimum          local activation rate of the best placement, on the counts themselves
    bound / optimum  how loose the upper bound is: what no solver can make up for
    ours / optimum   how far the search falls short
    ours / bound     the share of the bound that placements.py prints
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import routings
from placement_bounds.bounds import bound
from placement_bounds.exact import exact
from rich.console import Console
from rich.table import Table

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Counts
from moesaic.policy.placement.solvers.annealing import AnnealingSearch, dense, place

LIKE = routings.SHAPES[0]
"""The shape whose decay and noise the small layers have."""
LAYERS = 3


@dataclass(frozen=True)
class Found:
    """The results of one instance."""

    experts: int
    ranks: int
    optimum: float
    bound: float
    ours: float
    seconds: float
    """Seconds of the integer program."""


def small(experts: int, top_k: int, ids: int, seed: int) -> list[Counts]:
    """Layers with `experts` each, and only their most frequent `ids` token ids."""
    made = routings.generate(replace(LIKE, experts=experts, top_k=top_k), LAYERS, 200, seed)
    frequent = np.argsort(-np.bincount(made.routes.tokens, minlength=made.vocab_size), kind="stable")[:ids]
    there = np.isin(made.routes.tokens, frequent)
    tokens, chosen = made.routes.tokens[there].astype(np.int64), made.routes.experts[there]
    return [
        Counts.from_pairs(tokens, chosen[:, layer].astype(np.int64), made.vocab_size, experts)
        for layer in range(LAYERS)
    ]


def solved(counts: Counts, experts: int, ranks: int, arguments: argparse.Namespace) -> Found | None:
    """The optimum, or None if it was not proved in time."""
    begun = time.perf_counter()
    try:
        optimum, _ = exact(counts, experts, ranks, arguments.seconds)
    except TimeoutError:
        return None
    seconds = time.perf_counter() - begun
    rows = dense(counts, experts)
    labels = place(counts, experts, ranks, np.random.default_rng(0), AnnealingSearch(spare=1.0, evener=None))
    held = np.eye(ranks)[labels]
    return Found(
        experts=experts,
        ranks=ranks,
        optimum=optimum,
        bound=bound(rows.astype(np.float64), ranks, arguments.bound_rounds),
        ours=float((rows @ held).max(axis=1).sum() / rows.sum()),
        seconds=seconds,
    )


def show(rows: list[Found], unsolved: dict[tuple[int, int], int], console: Console) -> None:
    """Show one row for each number of experts and ranks."""
    table = Table()
    names = ("experts", "ranks", "solved", "optimum", "bound / optimum", "most", "ours / optimum", "least")
    for name in (*names, "ours / bound", "seconds"):
        table.add_column(name, justify="right")
    for shape in unsolved:
        mine = [row for row in rows if (row.experts, row.ranks) == shape]
        count = f"{len(mine)} of {len(mine) + unsolved[shape]}"
        table.add_row(str(shape[0]), str(shape[1]), count, *(_numbers(mine) if mine else []))
    console.print(table)


def _numbers(rows: list[Found]) -> list[str]:
    loose = [row.bound / row.optimum for row in rows]
    reached = [row.ours / row.optimum for row in rows]
    found = [
        statistics.fmean(row.optimum for row in rows),
        *(statistics.fmean(loose), max(loose)),
        *(statistics.fmean(reached), min(reached)),
        statistics.fmean(row.ours / row.bound for row in rows),
    ]
    return [*(f"{one:.3f}" for one in found), f"{statistics.fmean(row.seconds for row in rows):.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 12, 16])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--top-k", type=int, default=3)
    parser.add_argument("--ids", type=int, default=40, help="token ids of an instance")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--seconds", type=float, default=60.0, help="for one integer program")
    parser.add_argument("--bound-rounds", type=int, default=400)
    arguments = parser.parse_args()
    rows: list[Found] = []
    unsolved: dict[tuple[int, int], int] = {}
    for experts, ranks, seed in product(arguments.experts, arguments.ranks, arguments.seeds):
        if ranks >= experts:
            continue
        for counts in small(experts, arguments.top_k, arguments.ids, seed):
            try:
                found = solved(counts, experts, ranks, arguments)
            except ConfigError:  # more groups than an integer program is solved for
                break
            unsolved[experts, ranks] = unsolved.get((experts, ranks), 0) + (found is None)
            rows += [found] if found else []
    show(rows, unsolved, Console(width=140))


if __name__ == "__main__":
    main()
