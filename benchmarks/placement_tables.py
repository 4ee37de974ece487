"""What `placements.py` found, as tables, and the ratios that its numbers are judged by."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]

LEVELS = ("token", "request", "rounds")
"""Of local activation rates; see `placements.py`."""
GOALS = {"speculative": (("metis", "kmeans"), 1.14, (8,)), "sem-moe": (("moetuner",), 1.15, (2, 4, 8))}
"""Solver -> whom its local activation rate is compared with, the better one counting, the margin that is
aimed at, and on how many ranks."""
OURS = "ours"
NEAR = 0.95
"""Share of the bound that `ours` should reach."""


def means(rows: Iterable[Row]) -> list[Row]:
    """One row for each routing, ranks and solver: means over seeds, of numbers; notes, each once.

    Example: seeds 0 and 1 with rates 0.4 and 0.6 -> 0.5, and 2 seeds.
    """
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["routing"], row["ranks"], row["solver"]), []).append(row)
    found = []
    for (routing, ranks, solver), same in groups.items():
        numbers = {
            name: statistics.fmean(row[name] for row in same)
            for name, value in same[0].items()
            if isinstance(value, float)
        }
        notes = list(dict.fromkeys(note for row in same for note in row["notes"]))
        known = {"routing": routing, "ranks": ranks, "solver": solver, "seeds": len(same)}
        found.append({**known, **numbers, "notes": notes})
    return found


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Of each routing, ranks and level, from `means`; None where a solver is missing.

    as_even: over the best of those whose ranks carry as even loads as ours, or evener.

    Example: ours 0.6, metis 0.5 (but less even), vanilla 0.4 -> of_best 1.2 (metis), as_even and
    best_of_vanilla 1.5.
    """
    cells: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["routing"], row["ranks"]), {})[row["solver"]] = row
    return [
        {"routing": routing, "ranks": ranks, "level": level, **_ratios(cell, level)}
        for (routing, ranks), cell in cells.items()
        for level in LEVELS
    ]


def _ratios(cell: dict[str, Row], level: str) -> Row:
    found: Row = {}
    for solver, (peers, _, _) in GOALS.items():
        best = max((cell[peer][level] for peer in peers if peer in cell), default=None)
        whole = solver in cell and all(peer in cell for peer in peers)
        found[solver] = cell[solver][level] / best if whole and best else None
    others = [row for name, row in cell.items() if name != OURS]
    if OURS in cell and others:
        ours, best = cell[OURS], max(others, key=lambda row: float(row[level]))
        even = [row[level] for row in others if row["mean_over_max"] >= ours["mean_over_max"]]
        found |= {
            "of_best": ours[level] / best[level],
            "best_other": best["solver"],
            "as_even": ours[level] / max(even) if even else None,
            "balance": ours["mean_over_max"],
            "best_other_balance": best["mean_over_max"],
        }
    if OURS in cell and level == "token" and "token_bound" in cell[OURS]:
        ours = cell[OURS]
        found["of_bound"] = ours["token"] / ours["token_bound"]
        found["fitted_of_bound"] = ours["fitted"] / ours["fitted_bound"]
    if "vanilla" in cell:
        top = max(row[level] for row in cell.values())
        found["best_of_vanilla"] = top / cell["vanilla"][level]
    return found


def verdict(found: Sequence[Row]) -> list[str]:
    """Lines about `ratios`: where goals are met and where not."""
    lines = []
    for solver, (peers, goal, ranks) in GOALS.items():
        told = [row for row in found if row[solver] and row["ranks"] in ranks and not uniform(row)]
        if told:
            name = f"{solver} / {' or '.join(peers)}, goal {goal:.2f}x"
            lines.append(_counted(name, told, [row for row in told if row[solver] < goal]))
    told = [row for row in found if "of_best" in row and not uniform(row)]
    if told:
        short = [row for row in told if row["of_best"] <= 1 or row["balance"] < row["best_other_balance"]]
        lines.append(_counted(f"{OURS} above the best other, balance equal or better", told, short))
        short = [row for row in told if row["as_even"] is not None and row["as_even"] < 1]
        lines.append(_counted(f"{OURS} at least the best of those as even as it", told, short))
    for name, words in (("of_bound", "held-out"), ("fitted_of_bound", "seen")):
        told = [row for row in found if name in row and not uniform(row)]
        if told:
            short = [row for row in told if row[name] < NEAR]
            lines.append(
                _counted(f"{OURS} at {NEAR:.0%} of the bound or more, {words} requests", told, short)
            )
    told = [row for row in found if uniform(row) and "best_of_vanilla" in row]
    if told:
        top = max(row["best_of_vanilla"] for row in told)
        lines.append(f"uniform routing, where nothing can be gained: the best of all is {top:.3f}x vanilla")
    return lines


def uniform(row: Row) -> bool:
    return str(row["routing"]).startswith("uniform")


def _counted(name: str, told: Sequence[Row], short: Sequence[Row]) -> str:
    where = "; ".join(f"{row['routing']} x{row['ranks']} {row['level']}" for row in short)
    return f"{name}: {len(told) - len(short)} of {len(told)} cells" + (f"; not {where}" if short else "")


# ---- tables


def show(found: dict[str, Any], console: Console) -> None:
    rows = means(found["rows"])
    for routing, sizes in found["sizes"].items():
        console.print(_results(routing, sizes, [row for row in rows if row["routing"] == routing]))
    for row in rows:
        for note in row["notes"]:
            console.print(f"{row['routing']}, {row['ranks']} ranks, {row['solver']}: {note}", highlight=False)
    told = ratios(rows)
    console.print(_judged(told))
    for line in verdict(told):
        console.print(line, highlight=False)
    for ranks in dict.fromkeys(row["ranks"] for row in found["transfer"]):
        console.print(_transfer(ranks, [row for row in found["transfer"] if row["ranks"] == ranks]))


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _results(routing: str, sizes: Sequence[Row], rows: Sequence[Row]) -> Table:
    size = {name: statistics.fmean(one[name] for one in sizes) for name in sizes[0]}
    model = f"{size['layers']:.0f} layers, {size['experts']:.0f} experts, top {size['top_k']:.0f}"
    learned = f"{size['learned_tokens']:,.0f} tokens of {size['learned_requests']:.0f} requests"
    others = f"{size['held_out_tokens']:,.0f} of {size['held_out_requests']:.0f}"
    title = f"{routing}: {model}; solved on {learned}, measured on {others}"
    title += f", {size['unseen']:.0%} with unseen ids; seeds: {len(sizes)}"
    rates = ("token", "of bound", "request", "rounds", "fitted", "of bound")
    balance = ("mean/max", "max/median", "tokens mean/max")
    table = _table(title, ("ranks", "solver"), (*rates, *balance, "seconds"))
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1]["ranks"] != row["ranks"]
        table.add_row(*_cells(row), end_section=last)
    return table


def _cells(row: Row) -> list[str]:
    def of_bound(level: str) -> str:
        bound = row.get(f"{level}_bound")
        return "" if bound is None else f"{row[level] / bound:.1%}"

    return [
        *(str(row["ranks"]), row["solver"]),
        *(f"{row['token']:.3f}", of_bound("token"), f"{row['request']:.3f}", f"{row['rounds']:.3f}"),
        *(f"{row['fitted']:.3f}", of_bound("fitted")),
        *(f"{row[name]:.3f}" for name in ("mean_over_max", "max_over_median", "tokens_mean_over_max")),
        f"{row['seconds']:.2f}",
    ]


def _judged(found: Sequence[Row]) -> Table:
    numbers = ("ours\n/ best", "ours\n/ as even", "mean/max", "of best", "ours\n/ bound", "fitted\n/ bound")
    goals = [f"{solver}\n/ {' or '.join(peers)}" for solver, (peers, _, _) in GOALS.items()]
    title = "ratios of local activation rates; of ours: to the best other, to the best as even, to the bounds"
    table = _table(
        title, ("routing", "ranks", "level", "best other"), (*numbers, *goals, "best of all\n/ vanilla")
    )
    names = ("of_best", "as_even", "balance", "best_other_balance", "of_bound", "fitted_of_bound")
    for index, row in enumerate(found):
        last = index + 1 == len(found) or found[index + 1]["routing"] != row["routing"]
        table.add_row(
            *(row["routing"], str(row["ranks"]), row["level"], row.get("best_other", "")),
            *(_ratio(row.get(name)) for name in (*names, *GOALS, "best_of_vanilla")),
            end_section=last,
        )
    return table


def _ratio(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}"


def _transfer(ranks: int, rows: Sequence[Row]) -> Table:
    domains = list(rows[0]["on"])
    title = (
        f"{ranks} ranks: local activation rate, token / request level, on held-out requests of each domain"
    )
    table = _table(title, ("solver", "solved on"), domains)
    for solver in dict.fromkeys(row["solver"] for row in rows):
        mine = [row for row in rows if row["solver"] == solver]
        for row in mine:
            rates = (row["on"][domain] for domain in domains)
            texts = [f"{one['token']:.3f} / {one['request']:.3f}" for one in rates]
            table.add_row(solver, row["solved_on"], *texts, end_section=row is mine[-1])
    return table
