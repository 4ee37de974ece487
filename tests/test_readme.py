"""README and quickstart cannot rot: their commands and their Python run. test_docs.py checks their links."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.commands import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README + QUICKSTART, flags=re.MULTILINE | re.DOTALL)
BIN = Path(sys.executable).parent
ENDING = ("profile", "place", "plan", "run-batch", "bench throughput", "doctor")
"""Commands that end by themselves; the others serve, or need a server at a fixed port."""
QUICKER = {"place": ("--solver", "kmeans")}
"""Flags that are added to a command. The solver that it takes by itself has tests of its own."""
BODY = {"model": "demo", "prompt": "1 + 1 =", "max_tokens": 4}
ASKED = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY}
PROMPTS = ("Tom has 3 apples and buys 4 more.", "def add(a, b):")


def commands() -> list[list[str]]:
    """Each `moesaic ...` line of the console blocks of both pages, continued lines joined."""
    text = "\n".join(body for language, body in BLOCKS if language in ("console", "sh"))
    lines = text.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines if line.startswith("moesaic ")]
    return list({" ".join(words): words for words in found}.values())


def programs() -> dict[str, list[str]]:
    """The scripts behind the figures of README and docs/benchmarks.md, and the flags that these give them."""
    found: dict[str, list[str]] = {}
    text = (README + BENCHMARKS).replace("\\\n", " ")
    for script, rest in re.findall(r"python benchmarks/(\w+)\.py([^`\n]*)", text):
        flags = [word for word in shlex.split(rest) if word.startswith("-")]
        found.setdefault(script, []).extend(flags)
    return found


def source(name: str, seen: set[str]) -> str:
    """The text of a module or package of benchmarks/, and of those there that it imports."""
    folder = ROOT / "benchmarks"
    files = sorted((*folder.glob(f"{name}.py"), *folder.glob(f"{name}/*.py")))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    seen.add(name)
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, flags=re.MULTILINE)) - seen
    return text + "".join(source(other, seen) for other in sorted(imported) if other not in seen)


def check_flags(page: str, command: list[str]) -> None:
    for flag in (word.split("=")[0] for word in command if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", page), flag


def test_the_two_commands_open_it() -> None:
    first = next(body for _, body in BLOCKS)
    clone, *commands = [line.split("#")[0].strip() for line in first.strip().splitlines()]
    assert clone.startswith("git clone ") and commands == ["make demo", "make test"]
    targets = (ROOT / "Makefile").read_text()
    assert "\ndemo:" in targets and "\ntest:" in targets


@functools.cache
def help_of(*group: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as page:
        assert cli.main([*group, "--help"]) == 0
    return page.getvalue()


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_flag_of_every_command_exists(command: list[str]) -> None:
    words = [word for word in command[1:] if not word.startswith("-")]
    group = words[:2] if words[0] in ("bench", "cluster", "hardware") else words[:1]
    check_flags(help_of(*group), command)


@pytest.mark.parametrize("script", programs())
def test_every_flag_of_every_program_behind_a_number_exists(script: str) -> None:
    assert (ROOT / "benchmarks" / f"{script}.py").exists()
    check_flags(source(script, set()), programs()[script])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_that_end_by_themselves_run(
    tmp_path: Path, quick_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(ASKED) + "\n")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    monkeypatch.chdir(tmp_path)
    ran, typed = set(), False
    for command in commands():  # in their order: place reads what profile wrote
        name = next((name for name in ENDING if command[1:][: len(name.split())] == name.split()), None)
        if name is not None:
            words = [*command[1:], *QUICKER.get(name, ())]
            if words == ["doctor"]:  # one as a person types it; the others need not import all again
                subprocess.run([BIN / command[0], *words], check=True, stdout=subprocess.DEVNULL)
                typed = True
            else:
                assert cli.main(words) == 0, command
            ran.add(name)
    assert ran == set(ENDING) and typed
    assert {"out.jsonl", "profile.npz", "placement.json"} <= {file.name for file in tmp_path.iterdir()}


@pytest.mark.slow
def test_the_program_behind_make_demo_answers_and_ends(tmp_path: Path) -> None:
    """Here pip has no package index, so the small checkpoint answers."""
    assert "scripts/demo.py" in (ROOT / "Makefile").read_text()
    line = [sys.executable, str(ROOT / "scripts" / "demo.py")]
    environment = os.environ | {
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "XDG_CACHE_HOME": str(tmp_path),
    }
    environment.pop("PIP_FIND_LINKS", None)
    done = subprocess.run(line, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "pip could not download" in done.stderr
    assert "the small checkpoint inside the package" in done.stdout
    rates = re.findall(
        r"^\[(\d+) tokens, first after \d+ ms, then [\d.]+ tokens/s\]$", done.stdout, re.MULTILINE
    )
    assert len(rates) == 2 and all(int(tokens) > 1 for tokens in rates)


@pytest.mark.slow
@pytest.mark.parametrize("source", [body for language, body in BLOCKS if language == "python"])
def test_its_python_runs(source: str) -> None:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
