"""The gallery shows what its script starts, and its pictures exist."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from scripts import gallery, page_pictures

from moesaic.commands import cli
from tests.support import browser, hosts

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "gallery.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```\n(.*?)```", PAGE, flags=re.DOTALL) for line in block.splitlines()
]
PICTURES = re.findall(r'<img src="(images/[^"]+)"', PAGE)
CHROMIUM = pytest.mark.skipif(browser.program() is None, reason="there is no Chromium on this machine")


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("moesaic")])
def test_its_commands_are_understood(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that has the files which the commands read."""
    monkeypatch.chdir(tmp_path)
    words = [cli.SHORT.get(word, word) for word in shlex.split(line)[1:]]
    for name in (*(f"{topic}.jsonl" for topic in gallery.TOPICS), "in.jsonl"):
        Path(name).touch()
    cli.app.parse_args(words, exit_on_error=False, print_error=False)


def test_its_programs_and_pictures_exist() -> None:
    others = [shlex.split(line) for line in COMMANDS if not line.startswith("moesaic")]
    assert all((ROOT / words[1]).is_file() for words in others) and len(others) == 3
    assert len(PICTURES) == len(set(PICTURES)) == 4
    for name in PICTURES:
        assert 0 < (ROOT / "docs" / name).stat().st_size <= gallery.MOST_BYTES


def test_the_script_starts_the_same_commands() -> None:
    assert f"moesaic {gallery.KILL}" in COMMANDS
    assert any(line.startswith(f"moesaic {gallery.HOSTS} ") for line in COMMANDS)
    roles = {role for _, role in gallery.JOINING}
    assert all(any(f"--role {role} " in line for line in COMMANDS) for role in roles)
    asked = " ".join(f"{name}.jsonl" for name in gallery.TOPICS)
    assert f"moesaic profile demo --prompts {asked} -o profile.npz" in COMMANDS


def test_speeds_are_left_out() -> None:
    said = "AMD: measured in 7 s\non-demand: a\nmemory: b\na.jsonl: 8 completed, 0 failed; 9 tokens in 1 s\n"
    assert gallery.told(said) == ["on-demand: a", "memory: b", "a.jsonl: 8 completed, 0 failed"]


@pytest.mark.slow
@CHROMIUM
def test_the_picture_of_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pictures, "FOLDER", tmp_path)
    gallery.topics()
    assert (tmp_path / "gallery-topics.png").stat().st_size > 5_000


@pytest.mark.full
@CHROMIUM
@pytest.mark.parametrize("name", ["kill", "memory", "hosts"])
def test_the_other_pictures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "hosts" and hosts.missing():
        pytest.skip(hosts.missing())
    monkeypatch.setattr(gallery, "FOLDER", tmp_path)
    getattr(gallery, name)()
    assert [file.stat().st_size > 5_000 for file in tmp_path.iterdir()] == [True]
    shutil.rmtree(tmp_path)
