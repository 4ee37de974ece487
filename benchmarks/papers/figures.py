"""What the scripts of this folder share: their command line, and how they show a figure.

A script names its figures, each with what the paper states and how ours differs. `--json` prints one object
a line, else there is a table with both texts below it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moesaic.core.errors import MoesaicError

Row = dict[str, Any]
WIDE = 180
"""Characters of a line that goes to a file."""

sys.path.append(str(Path(__file__).parent.parent))  # the scripts of benchmarks/, such as routings.py


@dataclass(frozen=True)
class Figure:
    """A figure or a table of a paper."""

    name: str
    """Such as "figure 9"."""
    rows: Callable[[argparse.Namespace], Iterator[Row]]
    """Computes our rows."""
    states: str
    """What the paper states."""
    differs: str = ""
    """How ours differs, what our models cannot give, and what the paper's figures would need."""


def main(
    text: str | None,
    figures: Mapping[str, Figure],
    add: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """The figure that the command line names. text: the script's own; add: adds its arguments."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=list(figures))
    add(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    figure = figures[options.figure]
    try:
        if options.json:
            for row in figure.rows(options):
                print(json.dumps(shown(row)), flush=True)
        else:
            _table(figure, list(figure.rows(options)))
    except MoesaicError as error:
        raise SystemExit(f"{parser.prog}: {error}") from error


def shown(row: Row) -> Row:
    """The row with four significant digits, and whole numbers from 1,000 on."""

    def one(value: Any) -> Any:
        if not isinstance(value, float):
            return value
        return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")

    return {name: one(value) for name, value in row.items()}


def _table(figure: Figure, rows: list[Row]) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=figure.name, title_justify="left", box=SIMPLE_HEAD)
    for name in names:
        texts = any(isinstance(row.get(name), str) for row in rows)
        table.add_column(name.replace("_", " "), justify="left" if texts else "right")
    for row in rows:
        table.add_row(*(_cell(shown(row).get(name)) for name in names))
    console.print(table)
    console.print(f"The paper: {figure.states}", highlight=False)
    if figure.differs:
        console.print(f"Ours: {figure.differs}", highlight=False)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
