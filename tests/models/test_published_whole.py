"""Config files as their makers published them: each goes through doctor, and as a tiny model to tokens.

The files in the folder `published` have every key of the original. They are called ORGANIZATION--NAME.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import shrunk, tiny_models
from tests.support.model_driver import Driver

from moesaic.commands import doctor_model
from moesaic.commands.model_options import Doctor
from moesaic.commands.model_report import judge
from moesaic.core.text_config import WRAPPERS
from moesaic.kernels.table import pick
from moesaic.models import registry
from moesaic.models.families import MODELS

FOLDER = Path(__file__).parent / "published"
FILES = {file.stem.replace("--", "/"): file for file in sorted(FOLDER.glob("*.json"))}
REFUSED = {name for name in FILES if name.endswith("NVFP4")}
"""Checkpoints of ModelOpt."""
NOT_HERE = {
    *("dbrx", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "granitemoe", "hy_v3", "lfm2_moe", "mellum"),
    *("olmoe", "qwen2_moe", "qwen3_5_moe_text", "solar_open", "internvl"),
}
"""Families of which no whole published config is here."""
FAST = ("MiniMaxAI/MiniMax-M2.7", "moonshotai/Kimi-K2.5", "zai-org/GLM-4.5V")
COMPARED = sorted(FILES.keys() - REFUSED)


QUANTISED = [name for name in COMPARED if shrunk.find_quantization(json.loads(FILES[name].read_text()))]


def read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(FILES[name].read_text())
    return config


@pytest.mark.parametrize("name", FILES)
def test_doctor_judges_a_published_config(name: str, tmp_path: Path) -> None:
    report = doctor_model.examine_model(Doctor(str(FILES[name]), hardware="none"), tmp_path)
    if name in REFUSED:
        assert judge(report).startswith("not supported: ") and "ModelOpt checkpoint" in judge(report)
        return
    assert not report.problems, report.problems
    assert report.spec is not None and report.sizes is not None and report.sizes_error is None


def test_each_family_has_a_published_config_or_is_named() -> None:
    kinds = {read(name)["model_type"] for name in COMPARED}
    assert kinds | NOT_HERE == MODELS.keys() | WRAPPERS.keys()
    assert not kinds & NOT_HERE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in COMPARED]
)
def test_a_tiny_model_of_a_published_config_has_transformers_tokens(name: str, tmp_path: Path) -> None:
    theirs, path = shrunk.write(read(name), tmp_path)
    tokens = tiny_models.prompt(24, shrunk.VOCABULARY)
    ours = Driver(registry.load(path, pick("cpu")))
    assert ours.greedy(tokens, 12) == tiny_models.reference_greedy(theirs, tokens, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISED)
def test_a_tiny_quantised_model_has_the_tokens_of_its_dequantised_weights(name: str, tmp_path: Path) -> None:
    theirs, path = shrunk.write_quantised(read(name), tmp_path)
    parts = (
        load_file(path / "model.safetensors").keys()
        - load_file(tmp_path / "plain" / "model.safetensors").keys()
    )
    assert any("experts" in part for part in parts)
    tokens = tiny_models.prompt(24, shrunk.VOCABULARY)
    ours = Driver(registry.load(path, pick("cpu")))
    logits = ours.prefill(tokens)
    torch.testing.assert_close(logits, tiny_models.reference_logits(theirs, tokens), rtol=1e-3, atol=1e-3)
