"""docs/papers.md has a row for each figure and table of the five papers, with commands that exist."""

from __future__ import annotations

import ast
import re
import shlex

import pytest
from scripts.stale_numbers import PAGE, ROOT, find_stale, read_rows, read_values

ROWS = list(read_rows(PAGE.read_text(encoding="utf-8")))
PAPERS = {
    "Asynchronous Expert Parallelism": (13, 3),
    "MoE-Lightning": (11, 7),
    "Speculative MoE": (8, 1),
    "Expert-as-a-Service": (13, 1),
    "Semantic Parallelism": (6, 6),
}
"""Paper -> how many figures and tables it has."""


def numbers(text: str, kind: str) -> set[int]:
    """The numbers after a kind. Example: "figures 1, 2; table 3" and "figure" -> 1, 2."""
    lists = re.findall(rf"{kind}s? ((?:\d+(?:, | and )?)+)", text)
    return {int(number) for part in lists for number in re.findall(r"\d+", part)}


@pytest.mark.parametrize("paper", PAPERS)
def test_no_figure_or_table_is_without_a_row(paper: str) -> None:
    subjects = [row.subjects for row in ROWS if row.paper == paper]
    for kind, count in zip(("figure", "table"), PAPERS[paper], strict=True):
        named = set().union(*(numbers(text, kind) for text in subjects))
        assert named == set(range(1, count + 1)), kind


@pytest.mark.parametrize("command", sorted({row.command for row in ROWS if row.command}))
def test_each_command_names_what_exists(command: str) -> None:
    program, first, *words = shlex.split(command)
    if program == "moesaic":
        assert (ROOT / "src" / "moesaic" / "commands" / f"{first}.py").exists()
        return
    source = (ROOT / first).read_text(encoding="utf-8")
    for flag in (word for word in words if word.startswith("--")):
        folder = (ROOT / first).parent
        sources = [source, *(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))]
        assert any(f'"{flag}"' in text for text in sources), flag
    if (figures := figures_of(source)) is not None:
        assert words[0] in figures


def figures_of(source: str) -> set[str] | None:
    """The figures that a script of `benchmarks/papers` names. None: it has no such table."""
    for part in ast.parse(source).body:
        if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "FIGURES":
            assert isinstance(part.value, ast.Dict)
            return {str(ast.literal_eval(key)) for key in part.value.keys if key is not None}
    return None


def test_quick_commands_have_numbers_to_check() -> None:
    quick = [row for row in ROWS if row.seconds is not None]
    assert len(quick) > 10
    assert all(row.command is not None and "--json" not in row.command for row in quick)


def test_numbers_are_found_in_what_is_printed() -> None:
    values = list(read_values([{"a": 0.1234, "word": "equal", "list": [1999.6, True]}, {"word": "equal"}]))
    assert sorted(values) == [0.1234, 2.0, 1999.6]
    assert find_stale("0.12x of 2,000, 12.3 % and 2 of those", values) == []
    assert find_stale("0.13x and 1,999, S1, v2.5", values) == ["0.13", "1,999"]


def test_a_row_ends_with_a_command_and_perhaps_its_seconds() -> None:
    page = "## P\n| what | the paper | ours | how | why they differ | command |\n"
    page += '| figure 1 | 2 | 3 | priced | – | `python a.py b --c "d e"` (4 s) |\n'
    page += "| figure 2 | – | – | – | – | – |\n"
    first, second = read_rows(page)
    assert (first.paper, first.subjects, first.ours, first.seconds) == ("P", "figure 1", "3", 4)
    assert first.command == 'python a.py b --c "d e"'
    assert (second.command, second.seconds) == (None, None)


def test_tables_of_other_pages_count_if_their_rows_end_with_a_quick_command() -> None:
    lines = "## One", "| a | b | command |", "| x | 12 | `moesaic plan demo` (3 s) |", "| y | 13 | `make` |"
    (row,) = read_rows("\n".join(lines))
    assert (row.subjects, row.ours, row.command, row.seconds) == ("x", "12", "moesaic plan demo", 3)
