"""The benchmark of structured output, on a few schemas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import FOLDER

SUITE = [
    {
        "description": "integers",
        "schema": {"type": "integer", "maximum": 3},
        "tests": [{"data": 3, "valid": True}, {"data": 4, "valid": False}, {"data": "a", "valid": False}],
    },
    {"description": "none", "schema": {"not": {}}, "tests": [{"data": 3, "valid": False}]},
]


def measured(*line: str) -> Any:
    """What the script prints for machines."""
    command = [sys.executable, str(FOLDER / "structured.py"), "--json", *line]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.full
def test_instances_and_answers_are_counted(tmp_path: Path) -> None:
    (tmp_path / "maximum.json").write_text(json.dumps(SUITE), encoding="utf-8")
    found = measured("suite", str(tmp_path))
    assert found["maximum"] == {
        "schemas": 2,
        "refused": 1,
        "reasons": ["at not: an answer cannot be made to keep to this keyword"],
        "right": 3,
        "missed": 0,
        "wrong": 0,
    }
    schemas = tmp_path / "schemas"
    schemas.mkdir()
    number = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
    (schemas / "a.json").write_text(json.dumps(number), encoding="utf-8")
    (schemas / "b.json").write_text(json.dumps({"type": "string", "not": {}}), encoding="utf-8")
    long = {"type": "string", "minLength": 500}
    (schemas / "c.json").write_text(json.dumps(long), encoding="utf-8")
    cut = measured("schemas", "demo", str(schemas), "--closed", "--budget", "20")
    assert cut["in_text"] == 1
    (schemas / "c.json").write_text(json.dumps({"type": "string"}), encoding="utf-8")
    found = measured("schemas", "demo", str(schemas), "--closed", "--budget", "80", "--strings", "4")
    assert found["finished"] == {"stop": 2} and found["in_text"] == 0
    (schemas / "c.json").unlink()
    found = measured("schemas", "demo", str(schemas), "--closed", "--budget", "80")
    assert found["schemas"] == 2 and found["refused"] == {
        "at not: an answer cannot be made to keep to this keyword": 1
    }
    assert found["finished"] == {"stop": 1} and found["invalid"] == []


@pytest.mark.slow
def test_speeds_are_compared() -> None:
    options = ("--requests", "1", "2", "--new", "8", "--rounds", "2")
    found = measured("speed", "demo", *options)
    assert [one["requests"] for one in found["speeds"]] == [1, 2]
    assert all(one["least"] <= one["ratio"] <= one["most"] for one in found["speeds"])


@pytest.mark.slow
def test_a_vocabulary_beyond_the_logits_is_refused() -> None:
    command = [sys.executable, str(FOLDER / "structured.py"), "speed", "demo", "--vocabulary", "5000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("--vocabulary: got 5000; allowed: at most the 4096 logits of demo\n")
