"""The settings of `simulate`. Its command line is generated from them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


@dataclass(frozen=True)
class Simulate:
    """Run a cluster in virtual time, without a model or hardware."""

    scenario: Path
    """TOML file with the model, devices, workers, requests and faults; see docs/planning.md."""
    _: KW_ONLY
    changes: Annotated[tuple[str, ...], Parameter(name="--set")] = ()
    """KEY=VALUE for a field of the file, such as workers.count=8. May be given several times."""
    topology: Path | None = None
    """File of hosts and the links between them (.toml or .json), in place of the file's links."""
    plot: Path | None = None
    """Draw throughput, queues, utilisation and waiting into this SVG file."""
    trace: Path | None = None
    """Write what every device did and when into this file, for Perfetto (https://ui.perfetto.dev)."""
