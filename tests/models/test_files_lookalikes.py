"""Directories that look like a model are named for what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.support import model_configs, tiny_models

from moesaic.core.errors import CheckpointError
from moesaic.kernels.table import pick
from moesaic.models import files, registry

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4999802720\n"


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        files.resolve(str(path))
    said = str(caught.value)
    assert said.startswith(f"model: {path}: ") and "\n" not in said
    return said


@pytest.mark.parametrize(
    "name",
    ["config.json", "model-00002-of-00002.safetensors", "tokenizer.json", "model.safetensors.index.json"],
)
def test_a_pointer_of_git_lfs(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"w" * 5000)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    (tmp_path / name).write_text(POINTER)
    assert f"{name} is a Git LFS pointer, not the file itself: run git lfs pull there" in refused(tmp_path)
    (tmp_path / name).write_text("{}" + POINTER)
    assert files.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("config", "base"),
    [
        (json.dumps({"base_model_name_or_path": "Qwen/Qwen3-30B-A3B"}), " of Qwen/Qwen3-30B-A3B;"),
        (json.dumps({"base_model_name_or_path": "a\nb"}), "adapter;"),
        ("[]", "adapter;"),
        ("{", "adapter;"),
    ],
)
def test_a_lora_adapter(tmp_path: Path, config: str, base: str) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"w")
    said = refused(tmp_path)
    assert "this is a LoRA adapter" in said and base in said and "give the merged model" in said


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    """One of the two is left from before, and programs take different ones."""
    path = tiny_models.save(tiny_models.build("mixtral", model_configs.mixtral()), tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors, path / "model-00001-of-00001.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}))
    with pytest.raises(CheckpointError, match="holds model.safetensors beside model.safetensors.index.json"):
        registry.load(path, pick("cpu"))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    registry.load(path, pick("cpu"))
    index.unlink()
    registry.load(path, pick("cpu"))
