"""Which of a folder's schemas are taken, and whether a model's answers to them are valid."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moesaic import LLM, SamplingParams, StructuredOutputsParams
from moesaic.core.errors import RequestError
from moesaic.core.request import FinishReason
from moesaic.text.structured.grammar import check

PROMPT = "{"
VALUES = ("const", "default", "enum", "examples")
"""Keywords that contain no schemas."""
AT_ONCE = 16
QUOTES = re.compile(r'(?<!\\)(?:\\\\)*"')


@dataclass
class Report:
    schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Reason -> schemas."""
    compile_seconds: list[float] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)
    """Finish reason -> answers."""
    in_text: int = 0
    """Cut answers that end inside of a string."""
    invalid: list[str] = field(default_factory=list)
    """Schemas whose whole answer the validator refuses, with its reason."""
    not_validated: Counter[str] = field(default_factory=Counter)
    """Why the validator could not read a schema -> schemas."""

    def asdict(self) -> dict[str, Any]:
        return dict(vars(self))

    def show(self) -> None:
        table = Table("what", "schemas", title=f"{self.schemas} schemas")
        for reason, count in self.refused.most_common():
            table.add_row(f"refused: {reason}", str(count))
        for reason, count in self.finished.most_common():
            table.add_row(f"answers that ended by {reason}", str(count))
        if self.in_text:
            table.add_row("of the cut ones end inside of a string", str(self.in_text))
        for reason, count in self.not_validated.most_common():
            table.add_row(f"the validator does not read it: {reason}", str(count))
        table.add_row("whole answers that the validator refuses", str(len(self.invalid)))
        console = Console()
        console.print(table)
        times = sorted(self.compile_seconds)
        if times:
            middle, last = 1000 * times[len(times) // 2], 1000 * times[-1]
            console.print(f"checking a schema took {middle:.1f} ms in the median, {last:.0f} ms at most")
        for line in self.invalid:
            console.print(line, markup=False)


def run(model: str, folder: Path, budget: int, most: int | None, closed: bool, strings: int | None) -> Report:
    report = Report()
    found = {name: _bounded(schema, strings) for name, schema in _schemas(folder)[:most]}
    report.schemas = len(found)
    llm = LLM(model, max_model_len=budget + 16, max_num_seqs=AT_ONCE)
    taken: dict[str, StructuredOutputsParams] = {}
    for name, schema in found.items():
        begin = time.perf_counter()
        try:
            form = StructuredOutputsParams(json=schema, disable_additional_properties=closed)
            check(form, llm.tokenizer.special_tokens)
        except RequestError as error:
            report.refused[_reason(str(error))] += 1
        else:
            taken[name] = form
            report.compile_seconds.append(time.perf_counter() - begin)
    names = list(taken)
    for start in track(range(0, len(names), AT_ONCE), "answers", console=Console(stderr=True)):
        part = names[start : start + AT_ONCE]
        params = [
            SamplingParams(max_tokens=budget, temperature=1.0, seed=index, structured_outputs=taken[name])
            for index, name in enumerate(part)
        ]
        for name, answer in zip(part, llm.generate([PROMPT] * len(part), params), strict=True):
            reason = answer.outputs[0].finish_reason
            assert reason is not None
            report.finished[reason.value] += 1
            if reason is FinishReason.STOP:
                _validate(report, name, found[name], answer.text)
            else:
                report.in_text += len(QUOTES.findall(answer.text)) % 2
    return report


def _schemas(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Files that are JSON Schemas, by name."""
    found = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            schema = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, OSError):
            continue
        if isinstance(schema, dict) and schema.keys() & {
            "type",
            "properties",
            "$ref",
            "oneOf",
            "anyOf",
            "allOf",
        }:
            found.append((str(file.relative_to(folder)), schema))
    return found


def _bounded(schema: Any, most: int | None) -> Any:
    """The schema whose strings have at most so many characters, unless it bounds them itself."""
    if isinstance(schema, list):
        return [_bounded(one, most) for one in schema]
    if not isinstance(schema, dict) or most is None:
        return schema
    found = {name: one if name in VALUES else _bounded(one, most) for name, one in schema.items()}
    kinds = found.get("type")
    text = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    return {"maxLength": most, **found} if text and not found.keys() & {"pattern", "format"} else found


def _validate(report: Report, name: str, schema: dict[str, Any], text: str) -> None:
    try:
        validator = jsonschema_rs.validator_for(schema, validate_formats=False)
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        report.not_validated[_reason(str(error))] += 1
        return
    try:
        validator.validate(json.loads(text))
    except ValueError as error:  # also jsonschema_rs.ValidationError
        report.invalid.append(f"{name}: {' '.join(str(error).split())[:200]}")


def _reason(message: str) -> str:
    """A message without the names and numbers of one schema."""
    line = " ".join(message.split()).removeprefix("structured_outputs.json: ")
    if line.startswith("Unimplemented keys"):
        return line
    if "regex" in line:
        return f"{line.partition('regex')[0]}regex …"
    return re.sub(r"https?://\S+|\"[^\"]*\"|'[^']*'|\d+", "…", line)[:70]
