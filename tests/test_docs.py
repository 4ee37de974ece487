"""The Markdown files keep the rules of docs/how-we-write.md, and scripts/prose.py finds what breaks them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import prose

MOST_ENTRIES = 26
"""Folders and files directly in src/moesaic. A newcomer reads all of them."""
LONG = " ".join(["word"] * (prose.LONGEST_SENTENCE + 1)) + "."


def broken(root: Path, name: str, text: str) -> list[str]:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    return list(prose.problems(root))


def test_every_page_keeps_the_rules() -> None:
    assert list(prose.problems()) == []


def test_it_looks_at_every_page() -> None:
    names = {path.relative_to(prose.ROOT).as_posix() for path in prose.files()}
    assert {*prose.LINES, "CHANGELOG.md", "docs/decisions/README.md", "training/README.md"} <= names


def test_the_rooms_of_the_architecture_exist() -> None:
    tree = (prose.ROOT / "ARCHITECTURE.md").read_text().split("```\n")[1]
    rooms = [line.split()[0] for line in tree.splitlines()]
    package = prose.ROOT / "src" / "moesaic"
    assert [room for room in rooms if not (package / room).exists()] == []
    folders = {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    files = {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    assert {room.strip("/") for room in rooms if room.count("/") < 2} == folders | files
    assert sum(1 for path in package.iterdir() if path.name != "__pycache__") <= MOST_ENTRIES


def test_the_files_that_pages_name_exist() -> None:
    """A path in code quotes begins at the project, the package or the page, or it ends one of the package."""
    package = prose.ROOT / "src" / "moesaic"
    ends = tuple(path.relative_to(package).as_posix() for path in package.rglob("*.*"))

    def exists(name: str, page: Path) -> bool:
        return any((root / name).exists() for root in (prose.ROOT, package, page.parent)) or any(
            end.endswith(f"/{name}") for end in ends
        )

    gone: list[str] = []
    for page in prose.files():
        if not page.relative_to(prose.ROOT).as_posix().startswith(prose.LAB):
            names = re.findall(r"`((?:\w+/)+\w+\.(?:py|h|svg|md)|(?:\w+/){2,})`", page.read_text())
            gone += [f"{page.name}: {name}" for name in names if not exists(name, page)]
    assert gone == []


def test_the_names_of_the_architecture_exist() -> None:
    """A file in code quotes is one of the project, and a name is a word of its code."""
    text = (prose.ROOT / "ARCHITECTURE.md").read_text()
    folders = [prose.ROOT / name for name in ("src/moesaic", "tests", "scripts")]
    paths = [path for folder in folders for path in folder.rglob("*.*")]
    files = {path.name for path in paths}
    named = set(re.findall(r"`(?:\w+/)*(\w+\.(?:py|pyi|h|cpp|js))`", text))
    assert named - files == set()
    code = [path.read_text() for path in paths if path.suffix == ".py"]
    words = {word for source in code for word in re.findall(r"\w+", source)}
    names = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", text)
    parts = {part for name in names if name not in named for part in name.split(".")}
    assert parts - words == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two words.", ["One.", "Two words."]),
        (
            "A sentence\nover two lines. `Code here` starts one.",
            ["A sentence over two lines.", "Code starts one."],
        ),
        ("# Heading\n\n- an item\n- a 0.5 B model\n", ["an item", "a 0.5 B model"]),
        ("Text.\n\n```\nCode. No sentence.\n```\n| a | table. |\n", ["Text."]),
        ("See [this page](a.md), then stop.", ["See this page, then stop."]),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert prose.sentences(text) == expected


def test_the_mean_counts_words() -> None:
    assert prose.mean(["Two words.", "One - two, three four."]) == 3.0
    assert prose.mean([]) == 0.0


def test_anchors_are_those_of_the_host() -> None:
    text = "# One\n## The peers' `kernels`, in 12 bits\n```\n# no heading\n```\n## One\n"
    assert prose.anchors(text) == {"one", "the-peers-kernels-in-12-bits", "one-1"}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("README.md", LONG, f"README.md: a sentence of {prose.LONGEST_SENTENCE + 1} words"),
        ("README.md", " ".join(["word"] * 20) + ".", "README.md: sentences have 20.0 words on average"),
        ("README.md", "line\n" * 101, "README.md: 101 lines; allowed: 100"),
        ("ARCHITECTURE.md", "line\n" * 121, "ARCHITECTURE.md: 121 lines; allowed: 120"),
        ("ARCHITECTURE.md", f"| {'word ' * 21}|", "ARCHITECTURE.md: a row of 21 words"),
        ("CHANGELOG.md", "x" * 101, "CHANGELOG.md: a line of 101 characters"),
        ("docs/page.md", LONG, "docs/page.md: a sentence of"),
        ("docs/page.md", "[text](gone.md)", "docs/page.md: link gone.md: there is no such file"),
        ("docs/page.md", "# Here\n[text](#there)", "docs/page.md: link #there: the page has no such heading"),
        ("tests/README.md", '<img src="gone.svg">', "tests/README.md: link gone.svg: there is no such file"),
    ],
)
def test_what_breaks_a_rule_is_told(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (line,) = [line for line in broken(tmp_path, name, text) if line.startswith(expected)]
    assert line


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("docs/lab/note.md", LONG),
        ("training/README.md", LONG),
        (
            "docs/page.md",
            "# Here\nA [link](#here), [another](page.md#here) and [a third](https://example.org/x#y).",
        ),
        ("docs/page.md", "```\n[text](gone.md)\n```\n"),
        (".venv/docs/page.md", "[text](gone.md)"),
    ],
)
def test_what_keeps_the_rules_is_left_alone(tmp_path: Path, name: str, text: str) -> None:
    assert broken(tmp_path, name, text) == []
