"""What runs of an offload benchmark come to: medians, agreement of tokens, a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from offloading.watching import Outcome

COLUMNS = (
    *("tok/s", "of it", "prefill s", "decode s", "link busy", "read GiB", "GiB/s"),
    *("resident MiB", "charged MiB", "equal", "parts at"),
)


def summarise(name: str, batch: int, runs: Sequence[Outcome], reference: Outcome) -> dict[str, Any]:
    """One row: medians of the rounds, the largest peaks, the first round's tokens beside the reference's."""

    def median(pick: Callable[[Outcome], float | None]) -> float | None:
        values = [value for run in runs if (value := pick(run)) is not None]
        return statistics.median(values) if values else None

    def largest(pick: Callable[[Outcome], int | None]) -> int | None:
        return max((value for run in runs if (value := pick(run)) is not None), default=None)

    first = runs[0]
    same, apart = agreement(reference.tokens, first.tokens)
    return {
        "contender": name,
        "batch": batch,
        "ended": first.ended,
        "why": first.why,
        "tokens": first.generated,
        "tokens_per_s": median(lambda run: run.throughput),
        "projected_tokens_per_s": median(lambda run: run.projected),
        "prefill_s": median(lambda run: run.prefill_seconds),
        "decode_s": median(lambda run: run.decode_seconds),
        "seconds": median(lambda run: run.seconds),
        "link_busy": median(lambda run: run.measured.get("link_busy")),
        "read_bytes": median(lambda run: run.read),
        "resident_bytes": largest(lambda run: run.resident),
        "charged_bytes": largest(lambda run: run.charged),
        "equal": same,
        "compared": len(first.tokens.keys() & reference.tokens.keys()),
        "parts_at": statistics.median(apart) if apart else None,
        "runs": [_run(run) for run in runs],
    }


def _run(run: Outcome) -> dict[str, Any]:
    more = {"prefill_s": run.prefill_seconds, "throughput": run.throughput, "generated": run.generated}
    return {name: value for name, value in vars(run).items() if name != "tokens"} | more


def agreement(
    mine: Mapping[int, Sequence[int]], theirs: Mapping[int, Sequence[int]]
) -> tuple[int, list[int]]:
    """How many answers are equal as far as both go, and the first difference of each of the others.

    Example: {0: [1, 2, 3], 1: [4, 5]} beside {0: [1, 2], 1: [4, 6]} -> 1, [1].
    """
    apart = []
    both = mine.keys() & theirs.keys()
    for prompt in sorted(both):
        pairs = zip(mine[prompt], theirs[prompt], strict=False)
        place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if place is not None:
            apart.append(place)
    return len(both) - len(apart), apart


def show(rows: Sequence[dict[str, Any]], settings: Mapping[str, str], console: Console) -> None:
    limit = (
        "no limit" if settings["no_limit"] == "True" else f"cap {settings['cap']} + {settings['libraries']}"
    )
    table = Table(title=f"RAM over disk, {limit}, greedy, medians")
    table.add_column("batch", justify="right")
    table.add_column("contender", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    base = {row["batch"]: _rate(row) for row in reversed(rows)}
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        last = after is None or after["batch"] != row["batch"]
        table.add_row(str(row["batch"]), row["contender"], *_cells(row, base[row["batch"]]), end_section=last)
    console.print(table)
    if prices := _prices(rows):
        console.print(prices)
    for row in rows:
        if row["ended"] != "done":
            line = f"{row['contender']} at {row['batch']}: {row['ended']}, {row['tokens']} tokens"
            why = f" ({row['why']})" if row["why"] else ""
            console.print(line + why, soft_wrap=True, highlight=False, markup=False)


def _prices(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Phases of runs that were planned, in the median of both predictions; None where there are none."""
    table = Table(
        title="predicted, with the planned link and with that of the run itself", title_justify="left"
    )
    for column in (
        "batch",
        "contender",
        "phase",
        "predicted s",
        "at this link",
        "measured s",
        "ratios",
        "GiB/s",
    ):
        table.add_column(column, justify="left" if column in ("contender", "phase") else "right")
    for row in rows:
        for name in ("prefill", "decode"):
            told = [run["measured"][name] for run in row["runs"] if name in run["measured"]]
            if told:
                table.add_row(str(row["batch"]), row["contender"], name, *_priced(told))
    return table if table.row_count else None


def _priced(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """told: the predictions of each round."""

    def median(name: str) -> float:
        return statistics.median(one[name] or 0.0 for one in told)

    planned, again = median("predicted_seconds"), median("predicted_at_link_seconds")
    took, speed = median("measured_seconds"), median("link_bytes_per_s") / 2**30
    ratios = f"{planned / took:.2f}, {again / took:.2f}"
    return [f"{planned:.1f}", f"{again:.1f}", f"{took:.1f}", ratios, f"{speed:.2f}"]


def _rate(row: Mapping[str, Any]) -> float:
    """Tokens/s of the whole job."""
    rate: float = row["projected_tokens_per_s"] or row["tokens_per_s"]
    return rate


def _cells(row: Mapping[str, Any], base: float) -> list[str]:
    def number(value: float | None, form: str, unit: float = 1.0) -> str:
        return "" if value is None else format(value / unit, form)

    rate, seconds = _rate(row), row["seconds"]
    speed = row["read_bytes"] / seconds if row["read_bytes"] is not None and seconds else None
    return [
        _tokens_per_s(row),
        f"{base / rate:.2f}x" if base and rate else "",
        number(row["prefill_s"], ".1f"),
        number(row["decode_s"], ".1f"),
        number(row["link_busy"], ".0%"),
        number(row["read_bytes"], ".1f", 2**30),
        number(speed, ".2f", 2**30),
        number(row["resident_bytes"], ".0f", 2**20),
        number(row["charged_bytes"], ".0f", 2**20),
        f"{row['equal']}/{row['compared']}" if row["compared"] else "",
        number(row["parts_at"], ".0f"),
    ]


def _tokens_per_s(row: Mapping[str, Any]) -> str:
    """Example: 3.21; of a run that was ended <0.52 ~0.61."""
    if row["ended"] == "done":
        return f"{row['tokens_per_s']:.2f}"
    if not row["seconds"]:
        return str(row["ended"])
    projected = row["projected_tokens_per_s"]
    return f"<{row['tokens_per_s']:.2f}" + (f" ~{projected:.2f}" if projected else "")
