"""Writes docs/where-to-look.md: which module answers which question about the code.

    python scripts/where_to_look.py            writes the page
    python scripts/where_to_look.py --check    exit code 1 when the page is not what would be written

A module that answers a question says so in its docstring, on a line of its own, such as
"Question: Who restarts a process?". Several modules may answer one question.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src") / "moesaic"
PAGE = Path("docs") / "where-to-look.md"
LONGEST_QUESTION = 20
NESTED_ROOMS = ("policy",)
"""Rooms whose folders have a heading each."""

HEAD = """# Where to look

This page says which module answers which question. Search it for your word.
Paths are those in `src/moesaic`. [ARCHITECTURE](../ARCHITECTURE.md) describes the rooms.
It also lists [all files that change](../ARCHITECTURE.md#to-add-) when you add something.
`python scripts/where_to_look.py` writes this page from the docstrings of the modules.
A module that answers a question has a line such as `Question: Who is preempted?` in its docstring.
"""

_QUESTION = re.compile(r"^Question: (.*)$", re.MULTILINE)


def docstring_of(file: Path) -> str:
    """The docstring of a module, or an empty string if it has none."""
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def read_questions(package: Path) -> dict[str, list[str]]:
    """The questions in the docstrings of a package, each with the paths of the modules that answer it."""
    modules: dict[str, list[str]] = defaultdict(list)
    for file in sorted(package.rglob("*.py")):
        for question in _QUESTION.findall(docstring_of(file)):
            modules[question].append(file.relative_to(package).as_posix())
    return dict(modules)


def find_problems(questions: dict[str, list[str]]) -> list[str]:
    """A line for each question that is too long, or that does not end with a question mark."""
    problems = [
        f"{modules[0]}: {question!r} has more than {LONGEST_QUESTION} words"
        for question, modules in questions.items()
        if len(question.split()) > LONGEST_QUESTION
    ]
    return problems + [
        f"{modules[0]}: {question!r} does not end with a question mark"
        for question, modules in questions.items()
        if not question.endswith("?")
    ]


def room_of(module: str) -> str:
    """The room under whose heading a module stands.

    Example: "experts/remote.py" -> "experts", "policy/fleet/silence.py" -> "policy/fleet", "llm.py" -> "".
    """
    folders = module.split("/")[:-1]
    return "/".join(folders[: 2 if folders[:1] and folders[0] in NESTED_ROOMS else 1])


def write_page(package: Path) -> str:
    """The text of the page, grouped by the room of the first module that answers a question."""
    rooms: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
    for question, modules in read_questions(package).items():
        rooms[room_of(modules[0])].append((question, modules))
    parts = [HEAD]
    for room, rows in sorted(rooms.items()):
        paragraph, _, _ = docstring_of(package / room / "__init__.py").partition("\n\n")
        purpose = " ".join(paragraph.split())
        parts.append(f"## {room or 'moesaic'}\n\n{purpose}\n\n| question | modules |\n|---|---|\n")
        parts[-1] += "".join(
            f"| {question} | {', '.join(f'`{module}`' for module in modules)} |\n"
            for question, modules in sorted(rows)
        )
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 when the page is an old one")
    check: bool = parser.parse_args().check
    problems = find_problems(read_questions(ROOT / PACKAGE))
    page, text = ROOT / PAGE, write_page(ROOT / PACKAGE)
    if not check:
        page.write_text(text, encoding="utf-8")
    elif not page.exists() or page.read_text(encoding="utf-8") != text:
        problems.append(f"{PAGE}: an old page; write it with: python scripts/where_to_look.py")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
