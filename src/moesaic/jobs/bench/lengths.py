"""The lengths of prompts and answers. Pure functions, except for reading the trace."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moesaic.core.errors import ConfigError

Mix = Literal["short", "medium", "reasonable"]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Range:
    """Integers from low to high, both included, with equal probability."""

    low: int
    high: int

    def draw(self, count: int, rng: np.random.Generator) -> Integers:
        return rng.integers(self.low, self.high, count, endpoint=True)


MIXES: dict[Mix, tuple[Range, Range]] = {
    "short": (Range(30, 70), Range(70, 130)),
    "medium": (Range(50, 150), Range(50, 250)),
    "reasonable": (Range(100, 300), Range(100, 500)),
}
"""Lengths of prompts and answers in the evaluation of asynchronous expert parallelism."""


def range_around(length: int, ratio: float) -> Range:
    """`length` plus or minus its share `ratio`, at least 1. Example: (100, 0.5) -> 50 to 150."""
    return Range(max(1, round(length * (1 - ratio))), max(1, round(length * (1 + ratio))))


@dataclass(frozen=True)
class TraceRow:
    """A request of a recorded workload."""

    arrival: float
    input_tokens: int
    output_tokens: int


COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
"""Columns of a CSV file."""
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")
"""Fields of a line of a Mooncake trace. The time is in milliseconds."""


def read_trace(path: Path, limit: int, scale: float = 1.0, length_scale: float = 1.0) -> list[TraceRow]:
    """The first `limit` requests of a trace, with arrivals `scale` times as fast and lengths `length_scale`
    times as long.

    A file that ends with .jsonl has Mooncake's form, any other is CSV. Times count from the first row. Raises
    ConfigError if a column or a number is missing.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = _json_rows(path, file) if path.suffix == ".jsonl" else _rows(path, csv.DictReader(file))
            rows = list(islice(lines, limit))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: {path}: {error}") from error
    if not rows:
        raise ConfigError.field("--trace", str(path), "a CSV or JSONL file with at least one row")
    rows.sort(key=lambda row: row.arrival)
    first = rows[0].arrival
    return [
        TraceRow(
            (row.arrival - first) / scale,
            max(1, round(row.input_tokens * length_scale)),
            max(1, round(row.output_tokens * length_scale)),
        )
        for row in rows
    ]


def _rows(path: Path, reader: csv.DictReader[str]) -> Iterator[TraceRow]:
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"--trace: {path} lacks the column {missing[0]}; needed: {', '.join(COLUMNS)}")
    for row in reader:
        try:
            arrival, input_tokens, output_tokens = (float(row[name]) for name in COLUMNS)
            yield TraceRow(arrival, int(input_tokens), int(output_tokens))
        except (TypeError, ValueError, OverflowError) as error:
            place = f"{path} line {reader.line_num}"
            raise ConfigError(f"--trace: {place}: got {list(row.values())}; allowed: numbers") from error


def _json_rows(path: Path, lines: Iterable[str]) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            milliseconds, input_tokens, output_tokens = (float(fields[name]) for name in MOONCAKE_FIELDS)
            yield TraceRow(milliseconds / 1000, int(input_tokens), int(output_tokens))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            allowed_values = f"an object with the numbers {', '.join(MOONCAKE_FIELDS)}"
            place = f"{path} line {number}"
            raise ConfigError(
                f"--trace: {place}: got {line.strip()[:80]}; allowed: {allowed_values}"
            ) from error
