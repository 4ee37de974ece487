"""`moesaic trace`: sums up a trace, and writes it as a page that opens offline."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moesaic.commands.html_page import data, document
from moesaic.commands.options import ShowTrace
from moesaic.commands.trace_script import SCRIPT, STYLE
from moesaic.commands.writable import require_writable
from moesaic.core.errors import ConfigError
from moesaic.trace import parts

KEYS = "Wheel or + and - zoom, drag or arrows move, up and down choose the next span, 0 shows all."


@dataclass(frozen=True)
class Span:
    """What a row did, in microseconds since the trace began."""

    name: str
    begin: int
    length: int
    depth: int
    """Number of spans around it."""
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A process, or a lane of one."""

    name: str
    spans: list[Span]


def run(options: ShowTrace, as_json: bool) -> int:
    """Print the sum of each row's spans and write the page. Returns the exit code.

    Raises ConfigError for a file that is no trace, and for a page that cannot be written.
    """
    require_writable("--html", options.html)
    rows = read(options.file)
    if options.html is not None:
        try:
            options.html.write_text(page(options.file.name, rows), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--html: cannot write {options.html}: {error.strerror}") from error
    if as_json:
        print(json.dumps({"rows": [{"row": row.name, "microseconds": sums(row)} for row in rows]}))
    else:
        Console(highlight=False).print(_table(rows))
    return 0


def read(file: Path) -> list[Row]:
    """The rows of a trace of `--trace` or `simulate --trace`, in the order that it asks for.

    If a run has not ended or was killed, these are the rows of its parts. Raises ConfigError if the file is
    no trace.
    """
    try:
        names: dict[int, str] = {}
        order: dict[int, int] = {}
        spans_by_track: dict[int, list[tuple[str, int, int, dict[str, Any]]]] = {}
        for event in _events(file):
            match event["ph"], event["name"]:
                case "M", "thread_name":
                    names[event["tid"]] = event["args"]["name"]
                case "M", "thread_sort_index":
                    order[event["tid"]] = event["args"]["sort_index"]
                case "X", name:
                    span = (name, event["ts"], event["dur"], event.get("args", {}))
                    spans_by_track.setdefault(event["tid"], []).append(span)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: this is not a trace of --trace ({type(error).__name__})") from error
    start = min((span[1] for spans in spans_by_track.values() for span in spans), default=0)
    tracks = sorted(names, key=lambda track_id: (order.get(track_id, 0), track_id))
    return [Row(names[track], _nest(spans_by_track.get(track, []), start)) for track in tracks]


def _events(file: Path) -> list[dict[str, Any]]:
    """The events of the parts of a trace if it has some, otherwise those of the file."""
    text = file.read_text(encoding="utf-8")
    part_files = sorted(parts.parts_folder(file).glob("*.json"))
    if part_files:
        return [json.loads(event) for part in part_files for event in parts.events(part)]
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def _nest(spans: list[tuple[str, int, int, dict[str, Any]]], start: int) -> list[Span]:
    """Spans by their begin, each with its depth. Of spans that begin together, the outer one is first."""
    result: list[Span] = []
    ends: list[int] = []
    for name, begin, length, arguments in sorted(spans, key=lambda span: span[1]):
        # Spans that have ended by now are not around this one.
        while ends and ends[-1] <= begin:
            ends.pop()
        result.append(Span(name, round(begin - start), round(length), len(ends), arguments))
        ends.append(begin + length)
    return result


def sums(row: Row) -> dict[str, int]:
    """Microseconds of the row's spans by name, the longest first. `layer 3` and `layer 4` are `layer`."""
    lengths: Counter[str] = Counter()
    for span in row.spans:
        lengths["layer" if span.name.startswith("layer ") else span.name] += span.length
    return dict(lengths.most_common())


def page(title: str, rows: list[Row]) -> str:
    """The trace as a page."""
    names = {name: number for number, name in enumerate(dict.fromkeys(s.name for r in rows for s in r.spans))}
    packed_rows = [
        {
            "name": row.name,
            "spans": [[names[s.name], s.begin, s.length, s.depth, s.arguments] for s in row.spans],
        }
        for row in rows
    ]
    label = "Spans of each process over time. The arrow keys choose one."
    parts = [
        f'<canvas id="trace" tabindex="0" role="img" aria-label="{label}"></canvas>',
        f'<p class="told" id="told" aria-live="polite">Point at a span.</p><p class="keys">{KEYS}</p>',
    ]
    script = f"const TRACE = {data({'names': list(names), 'rows': packed_rows})};{SCRIPT}"
    description = f"{len(rows)} rows, {sum(len(row.spans) for row in rows):,} spans, drawn by moesaic trace"
    return document(title, description, ["".join(parts)], STYLE, script)


def _table(rows: list[Row]) -> Table:
    caption = "A span inside another one counts for both."
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    for name in ("row", "span", "seconds", "share"):
        table.add_column(name, justify="left" if name in ("row", "span") else "right")
    end = max((span.begin + span.length for row in rows for span in row.spans), default=0)
    for row in rows:
        for number, (name, total) in enumerate(sums(row).items()):
            first = "" if number else row.name
            table.add_row(first, name, f"{total / 1e6:.3f}", f"{total / max(1, end):.1%}")
    return table
