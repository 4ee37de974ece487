"""The README cannot rot: its commands and its Python run, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
BIN = Path(sys.executable).parent


def commands() -> list[list[str]]:
    """Each `moesaic ...` line of the README's console blocks, continued lines joined."""
    text = "\n".join(body for language, body in BLOCKS if language in ("console", "sh"))
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("moesaic ")]


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_two_commands_open_it() -> None:
    first = next(body for _, body in BLOCKS)
    assert [line.split("#")[0].strip() for line in first.strip().splitlines()] == ["make demo", "make test"]
    targets = (ROOT / "Makefile").read_text()
    assert "\ndemo:" in targets and "\ntest:" in targets


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_flag_of_every_command_exists(command: list[str]) -> None:
    words = [word for word in command[1:] if not word.startswith("-")]
    group = words[:2] if words[0] in ("bench", "hardware") else words[:1]
    page = subprocess.run([BIN / "moesaic", *group, "--help"], capture_output=True, text=True, check=True)
    for flag in (word.split("=")[0] for word in command if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", page.stdout), flag


@pytest.mark.slow
def test_the_commands_that_end_by_themselves_run(tmp_path: Path) -> None:
    for command in commands():
        if "run-batch" in command or "doctor" in command:
            line = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", '
            (tmp_path / "in.jsonl").write_text(line + '"prompt": "1 + 1 =", "max_tokens": 4}}\n')
            done = subprocess.run(
                [BIN / command[0], *command[1:]], cwd=tmp_path, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("source", [body for language, body in BLOCKS if language == "python"])
def test_its_python_runs(source: str) -> None:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r'src="([^"]+)"', README)
    for link in links:
        assert link.startswith("http") or (ROOT / link).exists(), link


def test_the_tree_it_shows_exists() -> None:
    tree = next(body for _, body in BLOCKS if body.startswith("src/moesaic/"))
    for line in tree.splitlines()[1:]:
        name = line.split()[0].rstrip("/") if line.strip() else ""
        if name:
            inside = ROOT / "src" / "moesaic" / name
            assert inside.exists() or (ROOT / name).exists(), name
