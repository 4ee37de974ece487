"""Runs the quick commands of pages anew, and names the numbers that they no longer print.

    python -m scripts.stale_numbers                 # those of up to 60 seconds
    python -m scripts.stale_numbers --seconds 5

A row of docs/papers.md ends with a command and, if it is quick, with its seconds: `python SCRIPT` (10 s).
Each number in the row's column "ours" has to be one that the command prints with --json, rounded as it stands
there, or how often it prints a word. So a number that stands there by chance is not noticed. Rows of other
tables count too if they end like this: then all numbers between their first and last cell are checked.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "papers.md"
PAGES = PAGE, ROOT / "docs" / "planning.md"
COMMAND = re.compile(r"`((?:python|moesaic) [^`]+)`(?: \((\d+) s\))?")
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")
COLUMNS = 6


@dataclass(frozen=True)
class PageRow:
    """A row of the page's tables."""

    paper: str
    """The heading above it."""
    subjects: str
    """Figures and tables that it is about."""
    ours: str
    command: str | None
    seconds: int | None
    """What the command takes. None: it is not quick."""


def read_rows(page: str) -> Iterator[PageRow]:
    """The rows of all tables with six columns, and those of others that end with a quick command."""
    paper = ""
    for line in page.splitlines():
        if line.startswith("## "):
            paper = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or cells[0] == "what":
            continue
        given = COMMAND.search(cells[-1])
        seconds = None if given is None or given[2] is None else int(given[2])
        if len(cells) == COLUMNS:
            yield PageRow(paper, cells[0], cells[2], given and given[1], seconds)
        elif given is not None and seconds is not None:
            yield PageRow(paper, cells[0], " ".join(cells[1:-1]), given[1], seconds)


def read_values(printed: Any) -> Iterator[float]:
    """All numbers in parsed JSON, and how often each text is in it."""
    texts: Counter[str] = Counter()

    def walk(part: Any) -> Iterator[float]:
        if isinstance(part, dict | list):
            for item in part.values() if isinstance(part, dict) else part:
                yield from walk(item)
        elif isinstance(part, str):
            texts[part] += 1
        elif isinstance(part, int | float) and not isinstance(part, bool):
            yield float(part)

    yield from walk(printed)
    yield from map(float, texts.values())


def find_stale(cell: str, values: list[float]) -> list[str]:
    """The numbers of a cell that none of the values rounds to. A value of 0.5 is also 50 %."""
    stale = []
    for given in NUMBER.findall(cell):
        number, decimals = float(given.replace(",", "")), len(given.partition(".")[2])
        if not any(round(abs(one), decimals) == number for value in values for one in (value, 100 * value)):
            stale.append(given)
    return stale


@cache
def run_command(command: str) -> list[float]:
    """What a command prints with --json. Several rows may have the same one. Raises CalledProcessError."""
    program, *words = shlex.split(command)
    line = [sys.executable, *(["-m", "moesaic"] if program == "moesaic" else []), *words, "--json"]
    printed = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(text) for text in printed.splitlines()]
    return [value for row in rows for value in read_values([row])] + [*read_values(rows)]


def main() -> None:
    """Run the quick commands. Exits with 1 if a number is stale."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60, help="run commands of up to so many seconds")
    limit = parser.parse_args().seconds
    num_stale = 0
    for row in (row for page in PAGES for row in read_rows(page.read_text(encoding="utf-8"))):
        if row.command is None or row.seconds is None or row.seconds > limit:
            continue
        stale = find_stale(row.ours, run_command(row.command))
        num_stale += len(stale)
        print(
            f"{row.paper}, {row.subjects}: {'stale: ' + ', '.join(stale) if stale else 'as printed'}",
            flush=True,
        )
    sys.exit(1 if num_stale else 0)


if __name__ == "__main__":
    main()
