"""What `make setup` says about an install without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.kernels import table

SETUP = (Path(__file__).parent.parent / "scripts" / "setup").read_text()
CHECK = SETUP.split("<<'END'\n")[1].split("\nEND\n")[0]
"""The Python in the script."""


@pytest.mark.parametrize("built", [True, False])
def test_it_says_in_one_line_that_a_compiler_is_missing(
    built: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "instruction_sets", lambda: ("portable",) if built else ())
    exec(CHECK, {})
    said = capsys.readouterr().out.splitlines()
    assert len(said) == (0 if built else 1)
    assert all("a C++17 compiler is missing" in line and "torch reference" in line for line in said)
