"""benchmarks/README.md lists every script, with commands that the scripts understand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from .conftest import FOLDER

README = (FOLDER / "README.md").read_text()
QUESTIONS = README.partition("What these scripts need")[0]
COMMANDS = [shlex.split(line) for line in re.findall(r"\| `([\w/]+\.py[^`]*)` \|", QUESTIONS)]
FILES = [*FOLDER.iterdir(), *(FOLDER / "papers").iterdir()]
SCRIPTS = {str(path.relative_to(FOLDER)): path for path in sorted(FILES) if path.suffix in (".py", ".sh")}


def test_every_script_is_listed_and_no_other() -> None:
    named = {one.removeprefix("benchmarks/") for one in re.findall(r"[\w/]+\.(?:py|sh)\b", README)}
    assert {name for name in SCRIPTS if not name.startswith("peer_")} == named
    folders = {path.name for path in FOLDER.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(re.findall(r"`(\w+)/`", README))


def test_every_script_that_is_started_by_hand_answers_a_question() -> None:
    """But those that make what others need."""
    started = {name for name, path in SCRIPTS.items() if "__main__" in path.read_text()}
    made_by = {"make_checkpoint.py", "routings.py", "convert_gguf.py", "quantize_gguf.py"}
    by_hand = {name for name in started - made_by if not name.startswith("peer_")}
    assert {command[0] for command in COMMANDS} == by_hand


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_flag_exists(command: list[str]) -> None:
    words = [word for word in command[1:2] if word.islower() and word.isalpha() and word != "demo"]
    line = [sys.executable, str(FOLDER / command[0]), *words, "--help"]
    page = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    for flag in (word for word in command if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", page), flag
