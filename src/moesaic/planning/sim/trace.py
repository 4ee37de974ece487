"""What every device of a simulation did and when, in the format of `serve --trace`, for Perfetto."""

from __future__ import annotations

import json

from moesaic.trace.parts import order_of

PROCESS = 1
"""The number that all rows have as their process."""


class Trace:
    """Collects the runs of all devices."""

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
            self._add("M", "thread_sort_index", number, args={"sort_index": order_of(process)})
        return self._rows[process]

    def _add(self, kind: str, name: str, row: int, **fields: object) -> None:
        event = {"ph": kind, "name": name, "pid": PROCESS, "tid": row, **fields}
        self._events.append(json.dumps(event, separators=(",", ":")))
