"""Whatever stands in config.json, it is understood or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import model_configs, tiny_models

from moesaic.core.errors import MoesaicError
from moesaic.kernels.table import pick
from moesaic.models import registry
from moesaic.models.files import generation_defaults

VALUES = (None, True, "x", [1], {}, {"a": 1}, -1, 0, 7, 1.5, float("nan"))
LARGEST = 10_000
"""Tokens of a context whose table of angles a test may build."""


def broken_by(path: Path, config: dict[str, Any]) -> str | None:
    """How reading the checkpoint with this config went wrong, other than by a refusal in one line."""
    (path / "config.json").write_text(json.dumps(config))
    try:
        generation_defaults(path)
        if registry.read_spec(path).max_position <= LARGEST:
            registry.load(path, pick("cpu"))
    except MoesaicError as error:
        return repr(error) if "\n" in str(error) else None
    except Exception as error:
        return repr(error)
    return None


def changed(config: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    """`config` with another value of a key, `rope_parameters.factor` being one within another."""
    first, _, second = name.partition(".")
    return {**config, first: {**config[first], second: value} if second else value}


LATER = (
    "internvl-qwen3",
    "glm4v",
    "qwen3-longrope",
    "mellum",
    "exaone",
    "minimax",
    "ernie",
    "granite",
    "hy3",
    "dots",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *("qwen3-llama3-tied", "deepseek-full"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("mixtral-linear", *LATER)),
    ],
)
def test_no_value_of_any_key_breaks_the_reader(case: str, tmp_path: Path) -> None:
    path = tiny_models.save(tiny_models.build(*model_configs.CASES[case]), tmp_path)
    config = json.loads((path / "config.json").read_text())
    parts = [part for part in ("rope_parameters", "text_config") if part in config]
    inner = [f"{part}.{name}" for part in parts for name in config[part]]
    names = [*config, *inner, "rope_scaling", "quantization_config", "head_dim", "sliding_window"]
    went_wrong = {
        (name, repr(value)): how
        for name in names
        for value in VALUES
        if (how := broken_by(path, changed(config, name, value))) is not None
    }
    assert not went_wrong
