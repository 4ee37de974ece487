"""The answers of single experts that an attention worker computes to find out who is at fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import model_configs, tiny_models

from moesaic.experts.answer_check import Recompute
from moesaic.kernels import table
from moesaic.models import registry


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = tiny_models.build("qwen3_moe", model_configs.qwen3(num_experts=4, num_experts_per_tok=2))
    return tiny_models.save(model, tmp_path)


def change(path: Path, part: str, value: float) -> None:
    """Set one weight of expert 1 of the first layer."""
    tensors = load_file(path / "model.safetensors")
    [name] = [name for name in tensors if f"layers.0.mlp.experts.1.{part}" in name]
    tensors[name].view(-1)[0] = value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def finite(path: Path, expert: int, mapped: bool = True) -> bool:
    layout = registry.expert_layout(path, table.pick("cpu", "auto"))
    row = np.ones(layout.hidden, dtype=np.float32)
    return Recompute(path, layout, mapped).is_finite(0, expert, row)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_weights_that_give_no_finite_answer(checkpoint: Path, value: float, mapped: bool) -> None:
    assert finite(checkpoint, 1, mapped)
    change(checkpoint, "gate_proj", value)
    change(checkpoint, "up_proj", value)
    assert not finite(checkpoint, 1, mapped)
    assert finite(checkpoint, 0, mapped)


def test_weights_that_cannot_be_read_blame_nobody(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = registry.expert_layout(checkpoint, table.pick("cpu", "auto"))
    (checkpoint / "model.safetensors").unlink()
    assert not Recompute(checkpoint, layout, True).is_finite(0, 1, np.ones(layout.hidden, dtype=np.float32))
    assert caplog.records[0].getMessage().startswith("cannot tell who is at fault")
