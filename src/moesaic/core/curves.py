"""How long a run takes, by its rows: the curves of a device, and files of them (`--schedule-policy-file`)."""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from moesaic.core.errors import ConfigError

FLAG = "--schedule-policy-file"


@dataclass(frozen=True)
class Curve:
    """Seconds of a run of a device, by its rows.

    Between two points the curve is a straight line. Below the first point it is level. Beyond the last one
    the last line goes on.
    """

    points: tuple[tuple[float, float], ...]
    """(rows, seconds), by ascending rows."""
    per_expert: float = 0.0
    """Seconds to read the weights of one expert, added for each expert that a run chooses."""

    def seconds(self, rows: float, experts: float = 0) -> float:
        """Seconds of a run of `rows` rows that reads the weights of `experts` experts.

        >>> curve = Curve(((128, 0.8), (256, 1.6)))
        >>> [round(curve.seconds(rows), 9) for rows in (1, 192, 512)]
        [0.8, 1.2, 3.2]
        """
        weights = self.per_expert * experts
        if rows <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1] + weights
        last = min(bisect_right(self.points, (rows, -math.inf)), len(self.points) - 1)
        (few, short), (many, long) = self.points[last - 1 : last + 1]
        return short + (rows - few) * (long - short) / (many - few) + weights

    def times(self, factor: float) -> Curve:
        """The curve of a device on which everything takes `factor` times as long."""
        points = tuple((rows, factor * seconds) for rows, seconds in self.points)
        return Curve(points, factor * self.per_expert)


@dataclass(frozen=True)
class Thresholds:
    """Numbers of rows that decide what runs alone. None: the device's curves decide (`minimum_batch`)."""

    separate_rows: int | None = None
    """Rows of a worker from which a run begins although other rows are with the experts."""
    told_rows: int | None = None
    """Rows of a request above which a worker hears of each part of its answer."""
    waited_pairs: int | None = None
    """Mean (row, expert) pairs of a call below which a server's clients wait for each other."""
    queue_pairs: int | None = None
    """(row, expert) pairs of an expert from which its queue runs alone; 0: every queue does."""


@dataclass(frozen=True)
class DeviceCurves:
    """The curves of an attention worker and of an expert server."""

    source: str
    """Where the figures are from."""
    attention: Curve
    """A run of an attention worker: what lies between the experts of two layers. Its rows are tokens."""
    experts: Curve
    """A run of an expert server. Its rows are (row, expert) pairs."""
    shares_cores: bool = False
    """Whether workers and servers compute on the same cores. Then a worker that waits leaves its cores to
    others. Where each has a device of its own, the device is idle meanwhile."""
    thresholds: Thresholds = Thresholds()
    """What is given in place of what follows from the curves."""


def read(path: Path) -> DeviceCurves:
    """Read a file of curves (TOML). A file of `--paced` is one too.

    Raises ConfigError that names the file, and the key with what is allowed.
    """
    checks, tables = TableChecker(FLAG, str(path)), read_tables(FLAG, path)
    checks.check_keys(
        tables, "", "source", "shared", "attention", "experts", "thresholds", "link", "dilation"
    )
    return checks.device_curves(tables)


def read_tables(flag: str, path: Path) -> Mapping[str, Any]:
    """The tables of a TOML file. Raises ConfigError that names the flag and the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError.field(flag, str(path), f"a file to read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {path} is not a TOML file: {error}") from error


@dataclass(frozen=True)
class TableChecker:
    """Checks the tables of one file. Every method raises ConfigError that names the key."""

    flag: str
    name: str

    def device_curves(self, tables: Mapping[str, Any]) -> DeviceCurves:
        """The curves of a file."""
        source, shared = tables.get("source"), tables.get("shared", False)
        if not isinstance(source, str) or not source:
            raise self.wrong("source", source, "a text that says where the figures are from")
        if not isinstance(shared, bool):
            raise self.wrong("shared", shared, "true, false")
        attention, experts = self.curve(tables, "attention"), self.curve(tables, "experts", "per_expert_ms")
        return DeviceCurves(source, attention, experts, shared, self.thresholds(tables))

    def curve(self, tables: Mapping[str, Any], name: str, *further_keys: str) -> Curve:
        """The curve of a table with points_ms. further_keys: per_expert_ms, where it is allowed."""
        table = self.table(tables, name, "points_ms", *further_keys)
        points, key = table.get("points_ms"), f"{name}.points_ms"
        allowed = "a list of [rows, milliseconds], both at least 0, by ascending rows"
        if not isinstance(points, list) or not points:
            raise self.wrong(key, points, allowed)
        for one in points:
            if not isinstance(one, list) or len(one) != 2 or not all(_is_number(number) for number in one):
                raise self.wrong(key, one, allowed)
        rows = [float(one[0]) for one in points]
        if rows != sorted(set(rows)):
            raise self.wrong(key, points, allowed)
        per_expert = (
            self.number({"per_expert_ms": 0.0, **table}, f"{name}.per_expert_ms") if further_keys else 0.0
        )
        return Curve(tuple((float(r), 1e-3 * ms) for r, ms in points), 1e-3 * per_expert)

    def thresholds(self, tables: Mapping[str, Any]) -> Thresholds:
        """The table `thresholds`, which may be missing."""
        names = [field.name for field in fields(Thresholds)]
        table = self.table({"thresholds": {}, **tables}, "thresholds", *names)
        for name, value in table.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise self.wrong(f"thresholds.{name}", value, "an integer of at least 0")
        return Thresholds(**table)

    def table(self, tables: Mapping[str, Any], name: str, *keys: str) -> Mapping[str, Any]:
        """A table with no other keys than these."""
        value = tables.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, value, f"a table with {', '.join(keys)}")
        self.check_keys(value, f"{name}.", *keys)
        return value

    def number(self, table: Mapping[str, Any], key: str, positive: bool = False) -> float:
        """A number of at least 0, or above 0."""
        value: Any = table.get(key.rpartition(".")[2])
        if not _is_number(value) or (positive and value == 0):
            raise self.wrong(key, value, "a number above 0" if positive else "a number of at least 0")
        return float(value)

    def check_keys(self, table: Mapping[str, Any], prefix: str, *keys: str) -> None:
        """Refuses other keys than these."""
        unknown = [key for key in table if key not in keys]
        if unknown:
            raise ConfigError(
                f"{self.flag}: {self.name}: unknown {prefix}{unknown[0]}; allowed: {', '.join(keys)}"
            )

    def wrong(self, key: str, value: object, allowed_values: str) -> ConfigError:
        """The error of a key."""
        return ConfigError(f"{self.flag}: {self.name}: {key}: got {value!r}; allowed: {allowed_values}")


def _is_number(value: object) -> bool:
    """Whether this is a finite number of at least 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(float(value)) and float(value) >= 0  # type: ignore[arg-type]
