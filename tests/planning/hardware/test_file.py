from __future__ import annotations

import doctest
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import from_tables
from moesaic.cost.machines import MACHINES, machine
from moesaic.planning.hardware import file

MEASURED = {
    "seconds": 31.2,
    "direct": True,
    "threads": 2,
    "file": 'a "large" \\ file, größer',
    "disk": [{"repeated": False, "gib": 1.25}, {"repeated": True, "gib": 100.0}],
}


def test_worked_example() -> None:
    assert doctest.testmod(file).failed == 0 and doctest.testmod(file).attempted == 1


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_saved_is_read(name: str, tmp_path: Path) -> None:
    known = replace(machine(name), measurements=MEASURED)
    file.save(known, tmp_path / "this.toml")
    found = from_tables(tomllib.loads((tmp_path / "this.toml").read_text(encoding="utf-8")))
    assert found.measurements == MEASURED and found.name == known.name and found.source == known.source
    assert found.link.down_bandwidth == pytest.approx(known.link.down_bandwidth, rel=1e-5)
    assert found.fast.memory == pytest.approx(known.fast.memory, rel=1e-5)
    assert [one.name for one in tmp_path.iterdir()] == ["this.toml"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1, "0.1"), (1e22, "1e+22"), (100.0, "100.0"), (1e-7, "1e-07"), (7, "7"), (True, "true")],
)
def test_numbers_stay_what_they_are(value: float, text: str) -> None:
    written = file.as_toml({"a": {"b": value}})
    assert written == f"[a]\nb = {text}\n"
    found = tomllib.loads(written)["a"]["b"]
    assert found == value and type(found) is type(value)


def test_what_a_file_cannot_hold_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match="set in a hardware file"):
        file.as_toml({"a": {"b": {1}}})


@pytest.mark.parametrize("name", ["this.json", "none/this.toml", "folder.toml"])
def test_paths_that_cannot_be_written_are_refused_before(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match=r"--output-file: got .*; allowed: a file that ends in \.toml"):
        file.check(tmp_path / name)
    file.check(tmp_path / "this.toml")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "this.toml"
    path.write_text("old")

    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match="a file to write into .No space left on device"):
        file.save(machine("t4"), path)
    assert path.read_bytes() == b"old"
