"""JSON Schema's own test suite: which instances a grammar accepts."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLMatcher
from rich.console import Console
from rich.table import Table

from moesaic.core.errors import RequestError
from moesaic.core.structured_outputs import StructuredOutputsParams
from moesaic.text.structured.grammar import check, make_grammar
from moesaic.text.structured.token_filter import GrammarFilter
from moesaic.text.structured.vocabulary import Vocabulary

END, WIDTH = 256, 257
BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b"<end>"], frozenset({END}))


@dataclass
class Counts:
    """Of one file."""

    schemas: int = 0
    refused: int = 0
    reasons: set[str] = field(default_factory=set)
    right: int = 0
    """Instances that both accept or both refuse."""
    missed: int = 0
    """Valid instances that the grammar cannot write."""
    wrong: int = 0
    """Instances that are not valid, which the grammar can write."""


@dataclass
class Report:
    files: dict[str, Counts]

    def asdict(self) -> dict[str, Any]:
        return {name: asdict(one) | {"reasons": sorted(one.reasons)} for name, one in self.files.items()}

    def show(self) -> None:
        columns = ("keyword", "schemas", "refused", "right", "missed", "wrong", "why refused")
        table = Table(*columns, title="instances of the standard's tests")
        for name, one in sorted(self.files.items()):
            numbers = (one.schemas, one.refused, one.right, one.missed, one.wrong)
            table.add_row(name, *map(str, numbers), "; ".join(sorted(one.reasons))[:60])
        fields = ("schemas", "refused", "right", "missed", "wrong")
        totals = [sum(getattr(one, name) for one in self.files.values()) for name in fields]
        table.add_row("all", *map(str, totals))
        Console(width=150).print(table)


def run(folder: Path) -> Report:
    files: defaultdict[str, Counts] = defaultdict(Counts)
    tokenizer = BYTES.build_tokenizer(WIDTH, (END,))
    for file in sorted(folder.glob("*.json")):
        counts = files[file.stem]
        for group in json.loads(file.read_text(encoding="utf-8")):
            counts.schemas += 1
            form = StructuredOutputsParams(json=json.dumps(group["schema"]))
            try:
                check(form, {})
            except RequestError as error:
                counts.refused += 1
                counts.reasons.add(str(error).removeprefix("structured_outputs.json: "))
                continue
            matcher = LLMatcher(tokenizer, make_grammar(form, {}), log_level=0)
            for test in group["tests"]:
                accepted = _accepts(matcher.deep_copy(), test["data"])
                counts.right += accepted == test["valid"]
                counts.missed += test["valid"] and not accepted
                counts.wrong += accepted and not test["valid"]
    return Report(dict(files))


def _accepts(matcher: Any, instance: Any) -> bool:
    """Whether the instance, with its properties in the order of the test, can be the whole answer."""
    tokens = list(json.dumps(instance, ensure_ascii=False).encode())
    return GrammarFilter(matcher, WIDTH).valid([*tokens, END]) == len(tokens) + 1
