"""What a process that solves a placement is asked, and what it answers, as files in one folder.

job.json, profile.npz, present.json, present.npz (tables, if there are any)     written by who asks
homes.json, placement.json, tables.npz, then answer.json                        written by the process
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from moesaic.core.placement import Placement
from moesaic.core.profile import Profile
from moesaic.core.tables import Tables
from moesaic.policy.placement.locality import Rule
from moesaic.policy.placement.online import Forecast
from moesaic.policy.placement.online_solution import Fleet, Solution, solve


@dataclass(frozen=True)
class Job:
    """A placement to solve."""

    profile: Profile
    present: Placement
    tables: Tables | None
    fleet: Fleet
    solver: str = "ours"
    rule: Rule = "affinity"

    def save(self, folder: Path) -> None:
        """Write the files. Raises OSError."""
        self.profile.save(folder / "profile.npz", compress=False)  # it is read once, on this host
        (folder / "present.json").write_text(self.present.to_json(), encoding="utf-8")
        if self.tables is not None:
            self.tables.save(folder / "present.npz")
        order = {"fleet": asdict(self.fleet), "solver": self.solver, "rule": self.rule}
        (folder / "job.json").write_text(json.dumps(order), encoding="utf-8")


def answer(folder: Path) -> None:
    """Solve the job in `folder`, and write the answer's files."""
    order = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    fleet = order["fleet"]
    capacities = {int(server): weight for server, weight in fleet["capacities"].items()}
    tables = folder / "present.npz"
    solution = solve(
        Profile.load(folder / "profile.npz"),
        Placement.from_json((folder / "present.json").read_text(encoding="utf-8")),
        Tables.load(tables) if tables.exists() else None,
        Fleet(
            tuple(fleet["ranks"]),
            capacities,
            fleet["redundant"],
            fleet["min_replicas"],
            tuple(map(tuple, fleet["prices"])),
            tuple(fleet["hosts"]),
        ),
        order["solver"],
        order["rule"],
    )
    (folder / "homes.json").write_text(solution.homes.to_json(), encoding="utf-8")
    (folder / "placement.json").write_text(solution.placement.to_json(), encoding="utf-8")
    solution.tables.save(folder / "tables.npz")
    forecasts = {"before": asdict(solution.old_forecast), "after": asdict(solution.new_forecast)}
    (folder / "answer.json").write_text(json.dumps(forecasts), encoding="utf-8")


def read(folder: Path) -> Solution:
    """Read the answer in `folder`. Raises OSError if there is none."""
    forecasts = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    return Solution(
        homes=Placement.from_json((folder / "homes.json").read_text(encoding="utf-8")),
        placement=Placement.from_json((folder / "placement.json").read_text(encoding="utf-8")),
        tables=Tables.load(folder / "tables.npz"),
        old_forecast=Forecast(**forecasts["before"]),
        new_forecast=Forecast(**forecasts["after"]),
    )
