"""The directory of a new checkpoint: whose it is, and when it is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.jobs.quantizing.directory import RECORD, WORK, Directory
from moesaic.jobs.quantizing.formats import Tensor
from moesaic.models import files

SETTINGS = {"model": "abc", "--group-size": 32}
TENSORS = [Tensor("a", "F32", (2,), 8), Tensor("b", "I32", (1,), 4)]


def test_it_is_a_checkpoint_when_all_is_written(tmp_path: Path) -> None:
    source, path = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "config.json").write_text("{}")
    (source / "numbers").write_bytes(b"skip" + torch.tensor([1.0, 2.0]).numpy().tobytes())
    with Directory(path, SETTINGS) as directory:
        with directory.writing("x.safetensors", TENSORS) as file:
            file.put("b", b"\1\0\0\0")
            with pytest.raises(CheckpointError, match=r"no config\.json"):
                files.resolve(str(path))
            assert not directory.has_file("x.safetensors")
            assert list(file.copy("a", source / "numbers", 4, 6)) == [6, 2]
        assert directory.has_file("x.safetensors") and not directory.is_finished
        directory.finish(source, {"model_type": "x"}, {"x.safetensors": TENSORS})
        assert directory.is_finished
    assert files.resolve(str(path)) == path
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json", "model.safetensors.index.json", RECORD, "tokenizer.json", "x.safetensors",
    ]  # fmt: skip
    found = load_file(path / "x.safetensors")
    assert found["a"].tolist() == [1.0, 2.0] and found["b"].tolist() == [1]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 12}, "weight_map": {"a": "x.safetensors", "b": "x.safetensors"},
    }  # fmt: skip


def test_a_file_that_fails_in_the_middle_has_no_name(tmp_path: Path) -> None:
    with Directory(tmp_path / "out", SETTINGS) as directory:
        with pytest.raises(ZeroDivisionError), directory.writing("x.safetensors", TENSORS):
            raise ZeroDivisionError
        assert not directory.has_file("x.safetensors")
        with pytest.raises(AssertionError, match="not written"), directory.writing("y.safetensors", TENSORS):
            pass
        assert not directory.has_file("y.safetensors")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [RECORD, WORK]


def test_another_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(
            ConfigError, match=r"DIRECTORY: got .* allowed: a directory that does not exist yet"
        ):
            Directory(path, SETTINGS)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    with Directory(tmp_path, SETTINGS):
        pass
    with Directory(tmp_path, SETTINGS):
        pass
    with pytest.raises(ConfigError) as refused:
        Directory(tmp_path, SETTINGS | {"--group-size": 64})
    assert f"{tmp_path} was begun with --group-size 32, now 64; allowed: the same settings" in str(
        refused.value
    )


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Directory(tmp_path, SETTINGS), pytest.raises(ConfigError, match="another process is writing it"):
        Directory(tmp_path, SETTINGS).__enter__()
    with Directory(tmp_path, SETTINGS):
        pass


def test_a_source_that_ends_early_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"12345")
    with (
        Directory(tmp_path / "out", SETTINGS) as directory,
        pytest.raises(ConfigError, match="tensor a: the file ends within it"),
        directory.writing("x.safetensors", TENSORS) as file,
    ):
        list(file.copy("a", tmp_path / "short", 0))
