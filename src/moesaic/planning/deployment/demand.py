"""What a deployment is planned for: the requests, their routing, and the latencies that are wanted."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.core.errors import ConfigError
from moesaic.jobs.bench.lengths import TraceRow, read_trace
from moesaic.planning.sim.fields import read
from moesaic.planning.sim.scenario import ObjectivesTable, RoutingTable, WorkloadTable

FLAG, SLO = "--workload", "--slo"
ROWS = 100_000
"""Maximum number of rows of a trace that are read."""
_PART = re.compile(r"(?P<name>ttft|itl)=(?P<value>\d+(\.\d+)?)(?P<unit>ms|s)")
_SLO_FORM = "ttft=TIME, itl=TIME or both, such as ttft=2s,itl=50ms"


@dataclass(frozen=True)
class Demand:
    """The requests that a deployment has to serve."""

    workload: WorkloadTable
    routing: RoutingTable
    folder: Path
    """Paths of the tables are relative to it."""
    prompt: float
    """Mean tokens of a prompt."""
    answer: float
    """Mean tokens of an answer."""
    longest: int
    """Tokens of the longest request, prompt and answer."""
    rate: float | None
    """Requests per second. None: clients send one request after another."""

    @property
    def context(self) -> float:
        """Mean number of cached tokens of a request while it generates."""
        return self.prompt + self.answer / 2

    @property
    def rows_per_token(self) -> float:
        """Rows that are computed for each generated token, those of prompts included."""
        return 1 + self.prompt / self.answer if self.workload.prefill else 1.0

    def describe(self) -> str:
        """The requests in words."""
        lengths = f"prompts of {self.prompt:.0f} tokens and answers of {self.answer:.0f} on average"
        if self.rate is None:
            return f"{self.workload.clients} clients; {lengths}"
        return f"{self.rate:.3g} requests/s, {self.rate * self.answer:,.0f} tokens/s; {lengths}"


def load(path: Path) -> Demand:
    """The requests of a file: a trace (CSV), or TOML with the tables [workload] and [routing] of a scenario.

    A TOML file without tables has the fields of [workload]. Raises ConfigError that names the field.
    """
    if path.suffix.lower() == ".csv":
        return parse({"workload": {"kind": "trace", "file": path.name}}, path.parent)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError.field(FLAG, str(path), f"a file to read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{FLAG}: {path}: not a TOML file and no .csv: {error}") from error
    # A file with the fields of [workload] alone needs no heading.
    if "workload" not in tables and "routing" not in tables:
        tables = {"workload": tables}
    return parse(tables, path.parent)


def parse(tables: dict[str, Any], folder: Path) -> Demand:
    """The requests of parsed tables. Raises ConfigError that names the field."""
    for name in tables:
        if name not in ("workload", "routing"):
            raise ConfigError.field(f"{FLAG}: {name}", tables[name], "only the tables workload, routing")
    try:
        work = read(WorkloadTable, tables.get("workload", {}), "workload.")
        routing = read(RoutingTable, tables.get("routing", {}), "routing.")
    except ConfigError as error:
        raise ConfigError(f"{FLAG}: {error}") from error
    for kind, name in (("poisson", "rate"), ("closed", "clients"), ("trace", "file")):
        if work.kind == kind and getattr(work, name) is None:
            raise ConfigError(f"{FLAG}: workload.{name}: it is missing, with workload.kind {kind!r}")
    if (routing.kind == "profile") != (routing.file is not None):
        raise ConfigError.field(
            f"{FLAG}: routing.file", routing.file, "a profile, with routing.kind 'profile'"
        )
    if work.file is not None:
        return _read_trace_demand(work, routing, folder)
    prompt, answer = sum(work.prompt) / 2, sum(work.answer) / 2
    longest = work.prompt[1] + work.answer[1]
    return Demand(work, routing, folder, prompt, answer, longest, work.rate)


def _read_trace_demand(work: WorkloadTable, routing: RoutingTable, folder: Path) -> Demand:
    assert work.file is not None
    try:
        rows = read_trace(folder / work.file, work.requests or ROWS, work.speed)
    except ConfigError as error:
        raise ConfigError(FLAG + str(error).removeprefix("--trace")) from error
    prompts, answers = [row.input_tokens for row in rows], [row.output_tokens for row in rows]
    return Demand(
        work,
        routing,
        folder,
        sum(prompts) / len(rows),
        sum(answers) / len(rows),
        max(row.input_tokens + row.output_tokens for row in rows),
        _rate(rows),
    )


def _rate(rows: list[TraceRow]) -> float:
    """Mean requests per second of recorded arrivals."""
    # A trace of one request has no duration, which would make its rate infinite.
    return len(rows) / max(rows[-1].arrival, 1e-3)


def parse_objectives(slo_text: str | None) -> ObjectivesTable:
    """The latencies of `--slo`. Example: "ttft=2s,itl=50ms" -> 2000 and 50 milliseconds.

    Raises ConfigError for a text of another form.
    """
    latencies: dict[str, float] = {}
    for part in () if slo_text is None else slo_text.replace(" ", "").split(","):
        match = _PART.fullmatch(part)
        if match is None or match["name"] in latencies or not float(match["value"]):
            raise ConfigError.field(SLO, slo_text, _SLO_FORM)
        latencies[match["name"]] = float(match["value"]) * (1000 if match["unit"] == "s" else 1)
    return ObjectivesTable(ttft_ms=latencies.get("ttft"), itl_ms=latencies.get("itl"))
