"""Modelled devices: how long a run takes on hardware that is not here. A test instrument (`--paced FILE`)."""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.core.errors import ConfigError

FLAG = "--paced"


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

    def seconds(self, rows: float, experts: int = 0) -> float:
        """Seconds of a run of `rows` rows that reads the weights of `experts` experts.

        >>> curve = Curve(((128, 0.8), (256, 1.6)))
        >>> curve.seconds(1), curve.seconds(192), round(curve.seconds(512), 9)
        (0.8, 1.2, 3.2)
        """
        weights = self.per_expert * experts
        if rows <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1] + weights
        last = min(bisect_right(self.points, (rows, -math.inf)), len(self.points) - 1)
        (few, short), (many, long) = self.points[last - 1 : last + 1]
        return short + (rows - few) * (long - short) / (many - few) + weights


@dataclass(frozen=True)
class LinkModel:
    """The way from an attention worker to an expert server, and back."""

    latency: float
    """Seconds of one way."""
    bandwidth: float
    """Bytes/s of one direction of one connection. Messages pass one after another."""


@dataclass(frozen=True)
class PacedDevices:
    """The modelled devices of a cluster: all workers are alike, and all servers."""

    source: str
    """Where the figures are from."""
    attention: Curve
    """A run of an attention worker: what lies between the experts of two layers. Its rows are tokens."""
    experts: Curve
    """A run of an expert server. Its rows are (row, expert) pairs."""
    link: LinkModel
    dilation: float = 1.0
    """Factor of every duration. Real processes compute beside the modelled devices, and need the time."""


def read(path: Path) -> PacedDevices:
    """Read a file of modelled devices (TOML).

    Raises ConfigError that names the file, and the key with what is allowed.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError.field(FLAG, str(path), f"a file to read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{FLAG}: {path} is not a TOML file: {error}") from error
    return of_tables(tables, str(path))


def of_tables(tables: Mapping[str, Any], name: str) -> PacedDevices:
    """The modelled devices of parsed tables. Raises ConfigError that names the key. name: of the tables."""
    return _Tables(name).devices(tables)


@dataclass(frozen=True)
class _Tables:
    """Checks the tables of one file."""

    name: str

    def devices(self, tables: Mapping[str, Any]) -> PacedDevices:
        self._only(tables, "", "source", "dilation", "attention", "experts", "link")
        source = tables.get("source")
        if not isinstance(source, str) or not source:
            raise self._wrong("source", source, "a text that says where the figures are from")
        link = self._table(tables, "link", "latency_us", "gb_per_s")
        bandwidth = 1e9 * self._number(link, "link.gb_per_s", above=True)
        return PacedDevices(
            source,
            self._curve(tables, "attention"),
            self._curve(tables, "experts", "per_expert_ms"),
            LinkModel(1e-6 * self._number(link, "link.latency_us"), bandwidth),
            self._number({"dilation": 1.0, **tables}, "dilation", above=True),
        )

    def _curve(self, tables: Mapping[str, Any], name: str, *more: str) -> Curve:
        table = self._table(tables, name, "points_ms", *more)
        given, key = table.get("points_ms"), f"{name}.points_ms"
        allowed = "a list of [rows, milliseconds], both at least 0, by ascending rows"
        if not isinstance(given, list) or not given:
            raise self._wrong(key, given, allowed)
        for one in given:
            if not isinstance(one, list) or len(one) != 2 or not all(_is_number(number) for number in one):
                raise self._wrong(key, one, allowed)
        rows = [float(one[0]) for one in given]
        if rows != sorted(set(rows)):
            raise self._wrong(key, given, allowed)
        per_expert = self._number({"per_expert_ms": 0.0, **table}, f"{name}.per_expert_ms") if more else 0.0
        return Curve(tuple((float(r), 1e-3 * ms) for r, ms in given), 1e-3 * per_expert)

    def _table(self, tables: Mapping[str, Any], name: str, *keys: str) -> Mapping[str, Any]:
        found = tables.get(name)
        if not isinstance(found, dict):
            raise self._wrong(name, found, f"a table with {', '.join(keys)}")
        self._only(found, f"{name}.", *keys)
        return found

    def _number(self, table: Mapping[str, Any], key: str, above: bool = False) -> float:
        value: Any = table.get(key.rpartition(".")[2])
        if not _is_number(value) or (above and value == 0):
            raise self._wrong(key, value, "a number above 0" if above else "a number of at least 0")
        return float(value)

    def _only(self, table: Mapping[str, Any], before: str, *allowed: str) -> None:
        unknown = [key for key in table if key not in allowed]
        if unknown:
            raise ConfigError(
                f"{FLAG}: {self.name}: unknown {before}{unknown[0]}; allowed: {', '.join(allowed)}"
            )

    def _wrong(self, key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{FLAG}: {self.name}: {key}: got {value!r}; allowed: {allowed}")


def _is_number(value: object) -> bool:
    """Whether this is a finite number of at least 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(float(value)) and float(value) >= 0  # type: ignore[arg-type]
