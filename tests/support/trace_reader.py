"""Reads a trace as a viewer does, as rows of nested spans."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.trace.parts import events

Event = dict[str, Any]


@dataclass(frozen=True)
class Span:
    name: str
    begin: int
    """Begin of the span in microseconds."""
    end: int
    args: dict[str, Any]

    @property
    def layer(self) -> int | None:
        """The layer that the span computes."""
        return int(self.name.split()[1]) if self.name.startswith("layer ") else None


@dataclass
class Row:
    """One row of a process."""

    process: str
    pid: int
    spans: list[Span] = field(default_factory=list)
    """The spans in the order of the file."""

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    @property
    def layers(self) -> list[Span]:
        return [span for span in self.spans if span.layer is not None]


def joined(file: Path) -> list[Event]:
    """The events of a whole trace."""
    found: list[Event] = json.loads(file.read_text())["traceEvents"]
    return found


def part(file: Path) -> list[Event]:
    """The events of one process's part."""
    return [json.loads(event) for event in events(file)]


def rows(found: Iterable[Event]) -> list[Row]:
    """The rows in the order that the trace asks for."""
    by_thread: dict[int, Row] = {}
    order: dict[int, int] = {}
    for event in found:
        thread = event["tid"]
        match event["ph"], event["name"]:
            case "M", "thread_name":
                by_thread[thread] = Row(event["args"]["name"], thread)
            case "M", "thread_sort_index":
                order[thread] = event["args"]["sort_index"]
            case "X", name:
                end = event["ts"] + event["dur"]
                by_thread[thread].spans.append(Span(name, event["ts"], end, event["args"]))
    return [by_thread[thread] for thread in sorted(by_thread, key=lambda one: (order[one], one))]


def check_nesting(row: Row) -> None:
    """Perfetto drops a span that begins in another one and ends after it. Where two begin at the same time
    the first one in the file is the outer one."""
    open_spans: list[Span] = []
    for span in sorted(row.spans, key=lambda one: one.begin):
        while open_spans and open_spans[-1].end <= span.begin:
            open_spans.pop()
        assert span.begin <= span.end
        assert not open_spans or span.end <= open_spans[-1].end, (row.process, open_spans[-1], span)
        open_spans.append(span)
