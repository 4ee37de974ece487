"""The report of `moesaic place`, as tables or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from moesaic.commands.options import Place
from moesaic.commands.place_links import LinkReport
from moesaic.commands.processes import in_text
from moesaic.core.profile import Profile, Routes
from moesaic.policy.placement.holdout import PlacementMeasures
from moesaic.policy.placement.locality import Locality

NUMBER_BYTES = 4
"""Bytes of one number of a row that is sent between ranks (float32)."""


@dataclass(frozen=True)
class Trial:
    """The measurement of a solver on requests that it did not see."""

    solver: str
    seconds: float
    """Seconds that the solver took."""
    measurement: PlacementMeasures
    notes: tuple[str, ...]
    links: LinkReport | None = None
    """What the links carry. None without --topology."""


@dataclass(frozen=True)
class WrittenTables:
    """The written file of tables of tokens."""

    file: Path
    nbytes: int
    """Size of the tables in memory, in bytes."""


@dataclass(frozen=True)
class WrittenPlacement:
    """The written files, and how their placement was solved."""

    solver: str
    file: Path
    tables: WrittenTables | None
    """None for a placement of another engine."""
    seconds: float
    """Seconds that the solver took on the whole profile."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The result of `moesaic place`."""

    options: Place
    profile: Profile
    learned_requests: int
    held_out_routes: Routes
    unseen_share: float
    """Share of the held-out tokens whose id no solver saw."""
    trials: Sequence[Trial]
    skip_notes: Sequence[str]
    """A line for each solver that could not run."""
    written_placement: WrittenPlacement | None


# ---- for machines


def as_json(report: Report) -> str:
    """The report as one line of JSON. Bytes are null if the profile does not have the length of a row."""
    profile, options, placement = report.profile, report.options, report.written_placement
    fields: dict[str, Any] = {
        "profile": str(options.file),
        "model": profile.model,
        "ranks": options.ranks,
        "redundant_experts": options.redundant_experts,
        "seed": options.seed,
        "learned_requests": report.learned_requests,
        "held_out_requests": report.held_out_routes.requests,
        "held_out_tokens": len(report.held_out_routes.tokens),
        "unseen_tokens": report.unseen_share,
        "nearest_known": profile.nearest is not None,
        "solvers": [_trial(trial, profile.hidden) for trial in report.trials],
        "skipped": list(report.skip_notes),
        "written": None,
    }
    if placement is not None:
        tables = placement.tables
        fields["written"] = {
            "solver": placement.solver,
            "format": options.format,
            "placement": str(placement.file),
            "tables": None if tables is None else str(tables.file),
            "seconds": placement.seconds,
            "tables_bytes": None if tables is None else tables.nbytes,
            "notes": placement.notes,
        }
    return json.dumps(fields)


def _trial(trial: Trial, hidden: int) -> dict[str, Any]:
    levels = {"token": trial.measurement.token, "request": trial.measurement.request}
    return {
        "solver": trial.solver,
        "seconds": trial.seconds,
        **{f"{name}_level": _level(level, hidden) for name, level in levels.items()},
        "notes": trial.notes,
        "links": None if trial.links is None else trial.links.as_json(hidden * NUMBER_BYTES),
    }


def _level(level: Locality, hidden: int) -> dict[str, Any]:
    skew = level.max_over_median
    rows = {
        "pairs": level.remote_bytes(1, 1),
        "deduplicated": level.remote_bytes(1, 1, deduplicate=True),
        "partial": level.remote_bytes(1, 1, deduplicate=True, partial=True),
    }
    row_bytes = hidden * NUMBER_BYTES
    return {
        "local_activation_rate": level.rate,
        "local_activation_rate_of_layers": level.activation.tolist(),
        "balancedness": level.balancedness,
        "max_over_median": skew if math.isfinite(skew) else None,
        "remote_rows_per_token": rows,
        "remote_bytes_per_token": {name: n * row_bytes for name, n in rows.items()} if hidden else None,
    }


# ---- for people


def as_text(report: Report) -> str:
    """The report for people: facts, a table of the measurements, notes, and the written files."""
    lines = [in_text(_facts(report)), "", in_text(_table(report))]
    row_bytes = report.profile.hidden * NUMBER_BYTES
    for trial in report.trials:
        if trial.links is not None:
            lines += ["", in_text(trial.links.table(trial.solver, row_bytes))]
    lines += [f"{trial.solver}: {note}" for trial in report.trials for note in trial.notes]
    if any(trial.links is not None and not trial.links.is_colocated for trial in report.trials):
        lines.append("no worker has a server of its own, so local, remote and dedup. do not apply here")
    lines += report.skip_notes
    if report.profile.nearest is None:
        lines.append("unseen ids stay unknown: --model MODEL finds their nearest known ids")
    placement = report.written_placement
    if placement is None:
        lines.append("no placement was written: give --solver and --output-file to write one")
    else:
        lines += [f"{placement.solver}, on the whole profile: {note}" for note in placement.notes]
        if placement.tables is None:
            lines.append(_sglang_command(placement.file, report))
        else:
            lines.append(f"wrote {placement.file} and {placement.tables.file.name}")
        if report.options.plot is not None:
            lines.append(f"drew {report.options.plot}")
        lines.append(
            f"the written placement is solved by {placement.solver} on the whole profile, in "
            f"{placement.seconds:.1f} s; the table's are solved on a share of the requests"
        )
    return "\n".join(lines)


def _sglang_command(file: Path, report: Report) -> str:
    """How SGLang takes the written file."""
    flags = [f"--ep-size {report.options.ranks}", f"--init-expert-location {file}"]
    if copies := report.options.redundant_experts:
        flags.append(f"--ep-num-redundant-experts {copies}")
    return f"wrote {file}, for SGLang's {' '.join(flags)}"


def _facts(report: Report) -> Table:
    profile, options = report.profile, report.options
    copies = f" and {options.redundant_experts} redundant copies" if options.redundant_experts else ""
    held_out_text = (
        f"{report.held_out_routes.requests:,} requests, {len(report.held_out_routes.tokens):,} tokens"
    )
    rows = {
        "model": profile.model,
        "experts": f"{profile.num_experts}{copies} in each of {len(profile.layers)} layers",
        "ranks": f"{options.ranks}",
        "solved on": f"{report.learned_requests:,} requests",
        "measured on": f"{held_out_text}, {report.unseen_share:.1%} with unseen ids",
        "remote": _unit(profile),
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _unit(profile: Profile) -> str:
    unit = "bytes" if profile.hidden else "rows"
    return f"{unit} per token to other ranks and back; dedup.: once per rank"


def _table(report: Report) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("solver")
    table.add_column("level")
    for name in ("local", "mean/max", "max/median", "remote", "dedup.", "solved in"):
        table.add_column(name, justify="right")
    for trial in report.trials:
        first = True
        for name, level in (("token", trial.measurement.token), ("request", trial.measurement.request)):
            seconds = f"{trial.seconds:.1f} s" if first else ""
            table.add_row(trial.solver if first else "", name, *_cells(level, report.profile.hidden), seconds)
            first = False
    return table


def _cells(level: Locality, hidden: int) -> list[str]:
    sizes = (hidden, NUMBER_BYTES) if hidden else (1, 1)
    remote = [level.remote_bytes(*sizes, deduplicate=deduplicate) for deduplicate in (False, True)]
    return [
        f"{level.rate:.1%}",
        f"{level.balancedness:.2f}",
        f"{level.max_over_median:.2f}",
        *(f"{number:,.0f}" if hidden else f"{number:,.1f}" for number in remote),
    ]
