"""The results as Markdown, for `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from scripts.gpu.plan import Found

Row = Sequence[object]


def as_markdown(report: Found) -> str:
    """Tables of a file that `make gpu` has written. What is missing in it is left out."""
    sections = {"identity": identity, "kernels": kernels, "speed": speed, "tests": tests}
    lines = [heading(report)]
    for name, part in report["parts"].items():
        show = sections.get(name, served)
        lines += ["", f"### {name[0].upper()}{name[1:]}", "", *show(part["cases"])]
        wrong = {case: found for case, found in part["cases"].items() if not found["ok"]}
        lines += (
            ["", *(f"- **{case}**: {found.get('error', 'not ok')}" for case, found in wrong.items())]
            if wrong
            else []
        )
    return "\n".join(lines)


def heading(report: Found) -> str:
    """The machine, in a line."""
    gpu, machine = report.get("gpu"), report.get("machine", {})
    where = machine.get("cpu", "unknown CPU")
    if gpu and "name" in gpu:
        where = (
            f"{gpu['count']} x {gpu['name']} ({gpu['bytes'] / 2**30:.0f} GiB), CUDA {gpu['cuda']}, {where}"
        )
    return f"{where}, torch {machine.get('torch', '?')}, in {report['seconds']:.0f} s."


def table(columns: Sequence[str], rows: Iterable[Row]) -> Iterator[str]:
    """The first column is text, the others are numbers."""
    yield f"| {' | '.join(columns)} |"
    yield f"|---|{'---:|' * (len(columns) - 1)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def identity(cases: Mapping[str, Found]) -> Iterator[str]:
    """By kernels and type: the models, and the tokens that are transformers' own."""
    groups: dict[tuple[str, str], list[Found]] = {}
    for case, found in cases.items():
        kernels, _, dtype = case.split(" | ")
        groups.setdefault((kernels, dtype), []).append(found)

    def row(key: tuple[str, str], those: list[Found]) -> Row:
        ways = [found[way] for found in those for way in ("recorded", "eager") if way in found]
        tokens = sum(one["tokens"] for one in those for way in ("recorded", "eager") if way in one)
        gap = max((way["largest_gap"] for way in ways), default=0.0)
        good = sum(bool(one["ok"]) for one in those)
        equal = sum(way["equal_tokens"] for way in ways)
        return ", ".join(key), len(those), good, f"{equal:,} of {tokens:,}", f"{gap:.3f}"

    columns = ("kernels, type", "checkpoints", "as promised", "tokens of transformers", "largest gap")
    yield from table(columns, (row(*one) for one in groups.items()))


def kernels(cases: Mapping[str, Found]) -> Iterator[str]:
    """Shares of the roof that bounds each operation, a column for each number of rows."""
    for case, found in cases.items():
        if "operations" not in found:
            continue
        roofs, shares = found["roofs"], dict[tuple[str, str], dict[int, str]]()
        for one in found["operations"]:
            share = f"{one['share_of_roof']:.0%}{' c' if one['bound'] == 'compute' else ''}"
            shares.setdefault((one["operation"], one["type"]), {})[one["rows"]] = share
        counts = sorted({rows for those in shares.values() for rows in those})
        peaks = f"{roofs['gb_per_s']:.0f} GB/s, {roofs['gflop_per_s'] / 1e3:.1f} TFLOP/s"
        yield f"{case}, {found['model']}: {peaks}"
        yield ""
        rows = (
            (f"{', '.join(key)}", *(those.get(one, "") for one in counts)) for key, those in shares.items()
        )
        yield from table(("share of the roof, rows (c: of computing)", *map(str, counts)), rows)
        yield ""


def speed(cases: Mapping[str, Found]) -> Iterator[str]:
    """Tokens/s by engine and number of requests."""
    rows = [
        (case, one["requests"], f"{one['prefill_tokens_per_s']:,.0f}", f"{one['decode_tokens_per_s']:,.0f}")
        for case, found in cases.items()
        for one in found.get("rows", ())
    ]
    yield from table(("engine", "requests", "prefill tokens/s", "decode tokens/s"), rows)


def tests(cases: Mapping[str, Found]) -> Iterator[str]:
    """Counts of results."""
    names = ("tests", "failures", "errors", "skipped")
    rows = ((case, *(found.get(name, "") for name in names)) for case, found in cases.items())
    yield from table(("", *names), rows)
    for found in cases.values():
        failed: dict[str, Any] = found.get("failed", {})
        yield from (f"- {name}: {' '.join(why.split())}" for name, why in failed.items())


def served(cases: Mapping[str, Found]) -> Iterator[str]:
    """Tokens/s of forms of `moesaic serve`."""
    rows = [
        (case, found["requests"], f"{found['output_tokens_per_s']:,.0f}", found["equal_answers"])
        for case, found in cases.items()
        if "output_tokens_per_s" in found
    ]
    yield from table(("", "requests", "output tokens/s", "answers of the first form"), rows)
