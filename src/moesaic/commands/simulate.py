"""`moesaic simulate`: runs a scenario in virtual time and prints what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from moesaic.commands import simulate_picture, simulate_report
from moesaic.commands.plan import find_model
from moesaic.commands.simulate_options import Simulate
from moesaic.commands.writable import require_writable
from moesaic.core.errors import ConfigError
from moesaic.cost.sizes import KNOWN
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.scenario import Scenario, load
from moesaic.trace.parts import row_order

PROCESS = 1
"""The number that all rows have as their process."""


def run(options: Simulate, json: bool) -> int:
    """Simulate, and write what is wanted. Returns the exit code.

    Raises ConfigError for a wrong field, and for files that cannot be read or written.
    """
    require_writable("--plot", options.plot)
    require_writable("--trace", options.trace)
    scenario = load(options.scenario, options.changes)
    if options.topology is not None:
        topology = str(options.topology.absolute())
        links = replace(scenario.links, topology=topology, latency_us=None, gb_per_s=None)
        scenario = replace(scenario, links=links)
    trace = None if options.trace is None else Trace()
    model = find_model(_model(scenario))
    cluster = SimulatedCluster(scenario, model, None if trace is None else trace.span)
    figures = cluster.run()
    if trace is not None and options.trace is not None:
        _write("--trace", options.trace, trace.text())
    if options.plot is not None:
        _write("--plot", options.plot, simulate_picture.draw(figures))
    print(simulate_report.as_json(figures) if json else simulate_report.as_text(figures))
    return 0


def _model(scenario: Scenario) -> str:
    """The name of the model, or its path beside the scenario's file."""
    name = scenario.model
    path = scenario.path(name)
    return str(path) if name not in KNOWN and path.exists() else name


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError.field(flag, str(path), f"a file to write into ({error.strerror})") from error


class Trace:
    """Collects what every device did and when, in the format of `serve --trace`, for Perfetto."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        """Process of the cluster -> the number of its row."""
        self._events: list[str] = []

    def span(self, process: str, label: str, begin: float, end: float, numbers: dict[str, int]) -> None:
        """A run of a device. process: such as "attention worker 0". begin, end: seconds.

        numbers: shown with the run. Both times are rounded down to whole microseconds.
        """
        start = int(begin * 1e6)
        self._add("X", label, self._row(process), ts=start, dur=int(end * 1e6) - start, args=numbers)

    def text(self) -> str:
        """The file: one JSON object with an event on each line."""
        return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(self._events) + "\n]}\n"

    def _row(self, process: str) -> int:
        if process not in self._rows:
            number = self._rows[process] = len(self._rows) + 1
            if number == 1:
                self._add("M", "process_name", number, args={"name": "moesaic simulate"})
            self._add("M", "thread_name", number, args={"name": process})
            self._add("M", "thread_sort_index", number, args={"sort_index": row_order(process)})
        return self._rows[process]

    def _add(self, kind: str, name: str, row: int, **fields: object) -> None:
        event = {"ph": kind, "name": name, "pid": PROCESS, "tid": row, **fields}
        self._events.append(json.dumps(event, separators=(",", ":")))
