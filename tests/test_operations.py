"""The table of states in docs/operations.md: each row names the test that makes its state, or has none."""

from __future__ import annotations

from pathlib import Path

from tests.cluster import test_lasting_states

PAGE = Path(__file__).parents[1] / "docs" / "operations.md"
NOT_TESTED = "not tested"


def read_rows() -> list[list[str]]:
    """The cells of each row, without the head."""
    section = PAGE.read_text().partition("\n## States that last\n")[2]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_each_state_names_its_test_and_each_test_its_state() -> None:
    rows = read_rows()
    named = [row[-1].strip("`") for row in rows if row[-1] != NOT_TESTED]
    tests = {name for name in vars(test_lasting_states) if name.startswith("test_")}
    assert len(named) == len(set(named)) and set(named) == tests
    assert len(rows) > len(named) > 10, "some are not tested, and the page says so"


def test_each_state_says_everything() -> None:
    for row in read_rows():
        assert len(row) == 6 and all(row), row
