"""Checkpoints that other programs quantised have the numbers that these programs make of them.

tests/support/golden_tools.py wrote the files, in environments with auto-round, gptqmodel and llm-compressor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.support import golden_tools, tiny_models
from tests.support.model_driver import Driver

from moesaic.core.errors import CheckpointError
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.checkpoint import Checkpoint

FILES = {file.stem: file for file in golden_tools.files()}
kernels = table.pick("cpu", "auto")


def metadata(case: str) -> dict[str, Any]:
    with safe_open(FILES[case], "pt") as file:
        return {key: json.loads(file.metadata()[key]) for key in (golden_tools.CONFIG, golden_tools.MATRICES)}


def unpacked(case: str, to: Path, **changes: Any) -> Path:
    """The checkpoint of a file as a directory. changes: of quantization_config."""
    to.mkdir()
    config = metadata(case)[golden_tools.CONFIG]
    config["quantization_config"] |= changes
    (to / "config.json").write_text(json.dumps(config))
    save_file(load_file(FILES[case]), to / "model.safetensors", {"format": "pt"})
    return to


def dequantised(case: str, path: Path) -> dict[str, torch.Tensor]:
    """The quantised matrices as moesaic reads them."""
    checkpoint = Checkpoint(path)
    return {
        name: checkpoint.tensor(f"{name}.weight", rows, columns, dtype=torch.float32)
        for name, (rows, columns, _) in metadata(case)[golden_tools.MATRICES].items()
    }


def test_the_files_are_those_of_three_programs() -> None:
    formats = [metadata(case)[golden_tools.CONFIG]["quantization_config"] for case in FILES]
    assert {one["quant_method"] for one in formats} == {"gptq", "awq", "auto-round", "compressed-tensors"}
    assert {one.get("desc_act") for one in formats} >= {True, False}
    assert {one.get("checkpoint_format") for one in formats} >= {"gptq", "gptq_v2"}
    assert {one.get("packing_format") for one in formats} >= {
        "auto_round:gptqmodel", "auto_round:auto_gptq", "auto_round:auto_awq",
    }  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_matrices_are_those_that_the_program_dequantises(case: str, tmp_path: Path) -> None:
    found = dequantised(case, unpacked(case, tmp_path / "quantised"))
    wanted = metadata(case)[golden_tools.MATRICES]
    assert any(".experts." in name for name in wanted) and any(".self_attn." in name for name in wanted)
    for name, (_, _, digest) in wanted.items():
        assert golden_tools.digest(found[name]) == digest, name


@pytest.mark.parametrize("case", FILES)
def test_a_model_computes_with_these_matrices(case: str, tmp_path: Path) -> None:
    path = unpacked(case, tmp_path / "quantised")
    matrices = dequantised(case, path)
    others = {
        name: one.float()
        for name, one in load_file(FILES[case]).items()
        if name.rpartition(".")[0] not in matrices
    }
    (tmp_path / "plain").mkdir()
    config = metadata(case)[golden_tools.CONFIG]
    del config["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    plain = others | {f"{name}.weight": one for name, one in matrices.items()}
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    tokens = tiny_models.prompt(20, golden_tools.VOCAB)
    logits = [Driver(registry.load(each, kernels)).prefill(tokens) for each in (path, tmp_path / "plain")]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert logits[0].std() > 0.1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"packing_format": "auto_round:mlx"}, "packing_format: got 'auto_round:mlx'"),
        ({"data_type": "mx_fp"}, "data_type: got 'mx_fp'"),
        ({"bits": 2}, "bits: got 2; allowed: 4"),
    ],
)
def test_what_auto_round_names_and_moesaic_cannot_read_is_one_line(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    case = next(case for case in FILES if "auto-round-auto_round-" in case)
    with pytest.raises(CheckpointError) as refused:
        registry.load(unpacked(case, tmp_path / "quantised", **changes), kernels)
    assert says in str(refused.value) and "\n" not in str(refused.value)
