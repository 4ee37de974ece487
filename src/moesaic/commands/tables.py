"""Tables that several reports print."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

CUT = "…"
"""What rich writes in place of the rest of a word."""


def pairs(title: str, rows: Mapping[str, str]) -> Table:
    """A table of names and what belongs to each."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def print_whole(console: Console, table: Table) -> None:
    """Prints a table. A narrow console breaks lines between words, where it would cut the words."""
    if any(CUT in segment.text for segment in console.render(table)):
        table.padding = (0, 0)
        for column in table.columns:
            texts = [str(column.header), *map(str, column.cells)]
            column.width = max(len(word) for text in texts for word in text.split())
    console.print(table)


def numbers(title: str, first: str, *columns: str) -> Table:
    """An empty table whose columns, but for the first one, are aligned on the right."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table
