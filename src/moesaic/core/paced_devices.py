"""Modelled devices: how long a run takes on hardware that is not here. A test instrument (`--paced FILE`).

Question: How do real processes get the timing of hardware that is not here (`--paced`)?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moesaic.core.curves import Curve, DeviceCurves, TableChecker, Thresholds, read_tables

FLAG = "--paced"


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
    thresholds: Thresholds = field(default_factory=Thresholds)
    """The thresholds that `DeviceCurves` gets."""

    @property
    def curves(self) -> DeviceCurves:
        """The curves by which these processes decide what runs alone, with the dilation."""
        attention, experts = self.attention.times(self.dilation), self.experts.times(self.dilation)
        return DeviceCurves(self.source, attention, experts, thresholds=self.thresholds)


def read(path: Path) -> PacedDevices:
    """Read a file of modelled devices (TOML).

    Raises ConfigError that names the file, and the key with what is allowed.
    """
    return parse_tables(read_tables(FLAG, path), str(path))


def parse_tables(tables: Mapping[str, Any], name: str) -> PacedDevices:
    """The modelled devices of parsed tables. Raises ConfigError that names the key. name: of the tables."""
    checks = TableChecker(FLAG, name)
    checks.check_keys(tables, "", "source", "dilation", "attention", "experts", "link", "thresholds")
    curves = checks.device_curves(tables)
    link = checks.table(tables, "link", "latency_us", "gb_per_s")
    bandwidth = 1e9 * checks.number(link, "link.gb_per_s", positive=True)
    devices = PacedDevices(
        curves.source,
        curves.attention,
        curves.experts,
        LinkModel(1e-6 * checks.number(link, "link.latency_us"), bandwidth),
        thresholds=curves.thresholds,
    )
    return replace(devices, dilation=checks.number({"dilation": 1.0, **tables}, "dilation", positive=True))
