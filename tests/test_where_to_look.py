"""docs/where-to-look.md is what scripts/where_to_look.py writes from the docstrings of the modules."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import where_to_look
from scripts.where_to_look import PACKAGE, PAGE, ROOT

QUESTIONS = where_to_look.read_questions(ROOT / PACKAGE)
ASKED_BY_STRANGERS = {
    "preempted": "policy/scheduling/batching.py",
    "added model families": "models/families.py",
    "added solver": "policy/placement/solvers/solver.py",
    "added kernel": "kernels/table.py",
    "added flag": "config/worker.py",
    "schedule added": "runtime/in_memory.py",
    "transport added": "transport/listening.py",
    "transport rows": "transport/calls.py",
    "metrics added": "server/metrics.py",
    "endpoints added": "server/app.py",
    "how many KV blocks": "runtime/cache_size.py",
    "wire expert request": "experts/wire.py",
    "SIGTERM": "server/run.py",
}
"""Words of a question that a newcomer has -> a module that the page must name for it."""


def test_the_page_is_what_the_docstrings_say() -> None:
    written = (ROOT / PAGE).read_text(encoding="utf-8")
    assert written == where_to_look.write_page(ROOT / PACKAGE), "run: python scripts/where_to_look.py"


def test_the_questions_are_short() -> None:
    assert where_to_look.find_problems(QUESTIONS) == []


@pytest.mark.parametrize("words", ASKED_BY_STRANGERS)
def test_a_stranger_finds_the_module(words: str) -> None:
    rows = [
        modules
        for question, modules in QUESTIONS.items()
        if all(word.lower() in question.lower() for word in words.split())
    ]
    assert any(ASKED_BY_STRANGERS[words] in modules for modules in rows)


def test_modules_that_answer_one_question_are_listed_together(tmp_path: Path) -> None:
    for name, text in {
        "fast/__init__.py": '"""Quick things.\n\nMore of them.\n"""\n',
        "fast/one.py": '"""One.\n\nQuestion: Who is first?\nQuestion: Which is which?\n"""\n',
        "slow/__init__.py": '"""Slow things."""\n',
        "slow/two.py": '"""Two.\n\nQuestion: Who is first?\n"""\n',
        "three.py": "Question = 3\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = where_to_look.write_page(tmp_path).splitlines()
    start = lines.index("## fast")
    assert lines[start + 2] == "Quick things."
    assert lines[start + 6 :] == [
        "| Which is which? | `fast/one.py` |",
        "| Who is first? | `fast/one.py`, `slow/two.py` |",
    ]


def test_what_is_wrong_with_a_question_is_told() -> None:
    long = "word " * 20 + "word?"
    (too_long,) = where_to_look.find_problems({long: ["core/x.py"]})
    (no_mark,) = where_to_look.find_problems({"Who.": ["core/x.py"]})
    assert too_long == f"core/x.py: {long!r} has more than 20 words"
    assert no_mark == "core/x.py: 'Who.' does not end with a question mark"


@pytest.mark.parametrize(
    ("module", "room"),
    [("experts/remote.py", "experts"), ("policy/fleet/silence.py", "policy/fleet"), ("llm.py", "")],
)
def test_rooms(module: str, room: str) -> None:
    assert where_to_look.room_of(module) == room
