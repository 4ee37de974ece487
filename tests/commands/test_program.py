"""Commands that are printed can be typed as they stand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moesaic.commands import doctor_model, program, starting


def test_it_is_a_path_unless_the_shell_finds_the_same_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / ".venv" / "bin" / "moesaic"
    own.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(own.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program.shutil, "which", lambda name: None)
    assert program.program() == "moesaic"  # started as python -m moesaic, from sources
    own.touch(0o755)
    assert program.program() == ".venv/bin/moesaic"
    monkeypatch.chdir("/")
    assert program.program() == str(own).removeprefix("/")
    monkeypatch.chdir(own.parent)
    assert program.program() == "./moesaic"
    monkeypatch.setattr(program.shutil, "which", lambda name: str(own))
    assert program.program() == "moesaic"
    monkeypatch.setattr(program.shutil, "which", lambda name: "/usr/bin/true")
    assert program.program() == "./moesaic"


@pytest.mark.parametrize(
    ("processes", "cores", "says"),
    [
        (9, 2, "moesaic: starts 9 processes for 2 cores: they take turns, and fewer"),
        (8, 2, ""),
        (5, 1, "1 core:"),
    ],
)
def test_many_processes_on_few_cores_are_told_in_one_line(
    processes: int, cores: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    starting.warn_of_many(processes, cores)
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == bool(says)


def test_the_command_that_doctor_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_model, "program", lambda: ".venv/bin/moesaic")
    options = doctor_model.Doctor("demo")
    command = doctor_model._Command(options, doctor_model.files.find("demo", Path()))
    assert command.serve() == ".venv/bin/moesaic serve demo"
