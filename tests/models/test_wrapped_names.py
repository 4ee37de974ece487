"""Text models inside of models that see images: what is read, what is skipped, and what is refused."""

from __future__ import annotations

import doctest
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import model_configs, tiny_models
from tests.support.model_driver import Driver

from moesaic.core.errors import CheckpointError
from moesaic.core.text_config import read_text_config
from moesaic.cost.reading import read
from moesaic.kernels.table import pick
from moesaic.models import registry, wrapped_names
from moesaic.models.files import generation_defaults

Published = Callable[..., tuple[Any, Path]]
AROUND = ("internvl-qwen3", "kimi-deepseek3", "glm4v", "qwen3.5-images", "qwen3-vl")
TOKENS = tiny_models.prompt(23, model_configs.VOCAB)


@pytest.fixture
def copy(published: Published, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(published(name, torch.float32)[1], tmp_path / name))


def rename(path: Path, *pairs: tuple[str, str]) -> Path:
    """Changes how names of tensors begin."""
    tensors = load_file(path / "model.safetensors")
    for old, new in pairs:
        tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, path / "model.safetensors")
    return path


def logits(path: Path) -> torch.Tensor:
    return Driver(registry.load(path, pick("cpu"))).prefill(TOKENS)


@pytest.mark.parametrize("name", AROUND)
def test_both_forms_of_names_give_the_same_bits(name: str, copy: Callable[[str], Path]) -> None:
    path = copy(name)
    wanted = logits(path)
    spare = ("spare.", "model.language_model.")
    rename(path, ("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
    assert torch.equal(logits(path), wanted)
    rename(path, ("language_model.model.", "spare."), ("language_model.lm_head.", "lm_head."), spare)
    assert torch.equal(logits(path), wanted)


@pytest.mark.parametrize("name", AROUND)
def test_sizes_are_those_of_the_text_model(name: str, copy: Callable[[str], Path]) -> None:
    path = copy(name)
    raw = json.loads((path / "config.json").read_text())
    text = read_text_config(raw)
    assert text["model_type"] in registry.MODELS and "vision_config" not in text
    assert read(raw, "x") == read(text, "x")
    spec, sizes = registry.read_spec(path), read(raw, "x")
    assert (spec.hidden_size, len(spec.moe_layers)) == (sizes.hidden, sizes.moe_layers)


def test_ids_that_end_a_text_may_be_in_either_part(copy: Callable[[str], Path]) -> None:
    path = copy("glm4v")
    raw = json.loads((path / "config.json").read_text())
    (path / "generation_config.json").unlink(missing_ok=True)
    for changes, wanted in (({}, (7,)), ({"eos_token_id": [3, 5]}, (3, 5))):
        text = raw["text_config"] | {"eos_token_id": 7}
        (path / "config.json").write_text(json.dumps(raw | {"text_config": text} | changes))
        assert generation_defaults(path).eos_token_ids == wanted


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("internvl-qwen3", {"attention_sinks": 4}, "attention_sinks: got 4"),
        ("internvl-qwen3", {"text_config": [1]}, "text_config: got [1]; allowed: an object"),
        ("internvl-qwen3", {"text_config": {"model_type": "llama"}}, "text_config.model_type: got 'llama'"),
        ("glm4v", {"text_config": {"model_type": [1]}}, "text_config.model_type: got [1]"),
        ("internvl-qwen3", {"quantization_config": {"quant_method": "hqq"}}, "got quant_method 'hqq'"),
        ("internvl-qwen3", {"tie_word_embeddings": False}, "tensor lm_head.weight is missing"),
        ("kimi-deepseek3", {"tie_word_embeddings": "no"}, "tie_word_embeddings: got 'no'"),
    ],
)
def test_what_is_not_understood_is_named(
    name: str, changes: dict[str, Any], words: str, copy: Callable[[str], Path]
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
        registry.load(tiny_models.edit(copy(name), **changes), pick("cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tensor", ["model.language_model.layers.0.extra.weight", "audio_tower.weight"])
def test_other_tensors_are_not_skipped(tensor: str, copy: Callable[[str], Path]) -> None:
    path = copy("glm4v")
    save_file(
        load_file(path / "model.safetensors") | {tensor: torch.zeros(4)},
        path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match="is not expected by this model"):
        registry.load(path, pick("cpu"))


def test_tensors_about_images_are_refused_in_a_text_model(published: Published, tmp_path: Path) -> None:
    path = Path(shutil.copytree(published("qwen3", torch.float32)[1], tmp_path / "qwen3"))
    extra = {"visual.norm.weight": torch.zeros(4)}
    save_file(load_file(path / "model.safetensors") | extra, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor visual.norm.weight is not expected"):
        registry.load(path, pick("cpu"))


def test_a_name_that_both_have_stays() -> None:
    both = ["language_model.model.norm.weight", "model.norm.weight"]
    assert wrapped_names.plain_names(both) == {name: name for name in both}
    assert doctest.testmod(wrapped_names).failed == 0
