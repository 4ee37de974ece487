from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.core.errors import ConfigError
from moesaic.jobs.profiling.prompts import Prompt, read


def lines(path: Path, *found: object) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    return path


def test_the_shapes_of_prompts(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "maths.jsonl",
        {"question": "1 + 1?", "answer": "2"},
        {"task_id": "a/0", "prompt": "def f():", "canonical_solution": "pass"},
        {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]},
        {"text": "a", "topic": "x", "category": "y"},
        {"prompt": [5, 6], "domain": "z"},
    )
    assert read([file]) == [
        Prompt("1 + 1?", "maths"),
        Prompt("def f():", "maths"),
        Prompt("First.", "writing"),
        Prompt("a", "x"),
        Prompt([5, 6], "z"),
    ]


def test_of_several_files_each_is_a_topic(tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", *({"prompt": str(i), "topic": "t"} for i in range(5)))
    two = tmp_path / "two.txt"
    two.write_text('first\n\n  {"prompt": "second"}  \n')
    assert read([one, two], max_prompts=2) == [
        Prompt("0", "one"),
        Prompt("1", "one"),
        Prompt("first", "two"),
        Prompt('  {"prompt": "second"}  ', "two"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "p.jsonl, line 2: not JSON"),
        ("[1]", "p.jsonl, line 2: got list; allowed: an object"),
        ('{"answer": "2"}', "p.jsonl, line 2: has none of prompt, question, text, turns"),
        ('{"prompt": ""}', "p.jsonl, line 2: prompt: got ''; allowed: text that is not empty"),
        ('{"prompt": [1, "a"]}', "line 2: prompt: got"),
        ('{"turns": []}', "line 2: turns: got '[]'"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ConfigError) as raised:
        read([file])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_without_prompts(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.txt.*allowed: a file with at least one prompt"):
        read([tmp_path / "empty.txt"])
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.txt: not UTF-8"):
        read([tmp_path / "binary.txt"])
