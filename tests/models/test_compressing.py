"""Checkpoints whose experts are compressed: the same numbers come back, and all else is as it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.models.test_quantized import CASES, FORMATS
from tests.support import model_configs, quantizers, tiny_models

from moesaic.core.errors import CheckpointError
from moesaic.core.weight_types import row_bytes
from moesaic.kernels import compressed_layout
from moesaic.models import compressing, fingerprint
from moesaic.models.checkpoint import INDEX, SINGLE
from moesaic.models.compressing import Sizes, compress

SHARD = "20KB"
"""Largest file of a checkpoint that has several."""
EXPERT = re.compile(r".*\.experts\.\d+\.\w+\.weight")
Tensors = dict[str, torch.Tensor]
Build = Callable[..., Path]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def write(case: str = "mixtral", dtype: torch.dtype = torch.bfloat16, shard: str = "1GB") -> Path:
        model = tiny_models.build(*model_configs.CASES[case]).to(dtype)
        model.save_pretrained(tmp_path / "model", max_shard_size=shard)
        return tmp_path / "model"

    return write


def tensors(path: Path) -> Tensors:
    """Of all files, that an index names where there is one."""
    files = [SINGLE]
    if (path / INDEX).is_file():
        files = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in load_file(path / file).items()}


def run(path: Path, directory: Path, threads: int = 2) -> Sizes:
    """What `compress` returns. Its progress grows to the end."""
    shown: list[tuple[int, int]] = []
    sizes = compress(path, directory, threads, lambda done, total: shown.append((done, total)))
    assert shown == sorted(shown) and shown[-1] == (sizes.bytes_before, sizes.bytes_before)
    return sizes


def check(path: Path, directory: Path) -> int:
    """That every expert's matrix comes back and every other tensor is the same; returns how many came."""
    before, after = tensors(path), tensors(directory)
    assert before.keys() == after.keys()
    matrices = 0
    for name, tensor in before.items():
        found = after[name]
        if EXPERT.fullmatch(name):
            rows, columns = tensor.shape
            assert found.dtype == torch.uint8 and found.shape == (rows, row_bytes("compressed", columns))
            back = compressed_layout.decompress(found.numpy(), columns)
            assert np.array_equal(back, tensor.view(torch.uint16).numpy())
            matrices += 1
        else:
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            assert torch.equal(found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    return matrices


def places(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """Of each tensor: where it begins in the file, and what the header says."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    return [(8 + length + e["data_offsets"][0], e) for n, e in header.items() if n != "__metadata__"]


@pytest.mark.parametrize("case", ["mixtral", "qwen3-bias-dense-layers", "deepseek-full"])
@pytest.mark.parametrize("piece", [compressing.PIECE, 300], ids=["whole", "pieces"])
def test_every_number_comes_back(
    case: str, piece: int, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressing, "PIECE", piece)
    path, out = build(case), tmp_path / "out"
    sizes = run(path, out)
    assert check(path, out) == sizes.matrices > 0
    assert sizes.bytes_before == sum(tensor.nbytes for tensor in tensors(path).values())
    assert sizes.bytes_after == sum(tensor.nbytes for tensor in tensors(out).values())
    before, after = (json.loads((one / "config.json").read_text()) for one in (path, out))
    how = {"quant_method": "moesaic-compressed", "compressed_from": fingerprint.compute_fingerprint(path)}
    assert after == {**before, "quantization_config": how}
    assert fingerprint.origin(out) == fingerprint.origin(path) != fingerprint.compute_fingerprint(out)
    with safe_open(out / SINGLE, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_shards_and_their_index_stay(build: Build, tmp_path: Path) -> None:
    path, out = build("qwen3", shard=SHARD), tmp_path / "out"
    out.mkdir()  # empty
    sizes = run(path, out)
    assert check(path, out) == sizes.matrices == 3 * 12 * 3
    before, after = (json.loads((one / INDEX).read_text()) for one in (path, out))
    assert len(set(before["weight_map"].values())) > 2
    assert after["weight_map"] == before["weight_map"]
    assert after["metadata"] == {**before["metadata"], "total_size": sizes.bytes_after}
    for name in set(before["weight_map"].values()):
        assert load_file(path / name).keys() == load_file(out / name).keys()


def test_every_tensor_is_aligned(build: Build, tmp_path: Path) -> None:
    """With other types between the matrices, and sizes that are no multiples of anything."""
    path, out = build(), tmp_path / "out"
    held = tensors(path)
    held["model.norm.weight"] = held["model.norm.weight"].float()
    held["a"], held["b"] = torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.int8)
    held["c"], held["d"] = torch.ones(1, dtype=torch.float64), torch.ones(0, dtype=torch.float32)
    save_file(held, path / SINGLE)
    run(path, out)
    check(path, out)
    found = places(out / SINGLE)
    assert found[0][0] % 64 == 0
    widths = {"U8": 32, "F64": 8, "F32": 4, "BF16": 2, "I8": 1}  # compressed rows: vectors of 32 bytes
    assert {entry["dtype"] for _, entry in found} == set(widths)
    assert all(begin % widths[entry["dtype"]] == 0 for begin, entry in found)


def test_small_files_come_along_weights_in_other_layouts_do_not(build: Build, tmp_path: Path) -> None:
    path = build()
    for name in ("tokenizer.json", "chat_template.jinja", "merges.txt", "consolidated.safetensors", "a.bin"):
        (path / name).write_text(f"of {name}")
    out = path / "out"  # within the model's own directory
    run(path, out)
    small = {"tokenizer.json", "chat_template.jinja", "merges.txt"}
    assert {file.name for file in out.iterdir()} == {SINGLE, "config.json", "generation_config.json"} | small
    assert all((out / name).read_text() == f"of {name}" for name in small)


def replaced(path: Path, file: str, name: str, tensor: torch.Tensor | None) -> None:
    """Writes a shard with another tensor of this name, or with none."""
    held = load_file(path / file)
    del held[name]
    save_file(held if tensor is None else {**held, name: tensor}, path / file, metadata={"format": "pt"})


def refused(path: Path, directory: Path) -> str:
    """The one line; nothing was written."""
    beside = sorted(directory.parent.iterdir())
    with pytest.raises(CheckpointError) as caught:
        compress(path, directory, 2, lambda done, total: None)
    assert sorted(directory.parent.iterdir()) == beside
    assert "\n" not in str(caught.value)
    return str(caught.value)


GATE = "model.layers.0.block_sparse_moe.experts.0.w1.weight"


@pytest.mark.parametrize(("dtype", "named"), [(torch.float32, "F32"), (torch.float16, "F16")])
def test_other_types_are_refused(dtype: torch.dtype, named: str, build: Build, tmp_path: Path) -> None:
    said = refused(build(dtype=dtype), tmp_path / "out")
    assert f"tensor {GATE}: got {named} [40, 48]; allowed: BF16 [40, 48]" in said


def test_one_matrix_of_another_type_shape_or_none_is_refused(build: Build, tmp_path: Path) -> None:
    path, out = build(), tmp_path / "out"
    replaced(path, SINGLE, GATE, torch.zeros(40, 47, dtype=torch.bfloat16))
    assert f"tensor {GATE}: got shape [40, 47]; allowed: [40, 48]" in refused(path, out)
    replaced(path, SINGLE, GATE, torch.zeros(40, 136, dtype=torch.uint8))
    assert f"tensor {GATE}: got shape [40, 136]; allowed: [40, 160]" in refused(path, out)
    replaced(path, SINGLE, GATE, None)
    assert f"tensor {GATE} is missing" in refused(path, out)


@pytest.mark.parametrize(("name", "form"), [("qwen3", "packed int4"), ("gpt-oss", "mxfp4")])
def test_quantised_models_are_refused_with_a_reason(name: str, form: str, tmp_path: Path) -> None:
    source = tiny_models.save(tiny_models.build(*CASES[name]), tmp_path / "source", torch.bfloat16)
    path, _ = quantizers.quantize(source, tmp_path, FORMATS[form])
    said = refused(path, tmp_path / "out")
    assert "is quantised; allowed: experts in bf16. The compressed form takes 12 bits a number, more" in said


def test_what_is_compressed_or_has_no_experts_is_refused(build: Build, tmp_path: Path) -> None:
    path, out = build("qwen3"), tmp_path / "out"
    run(path, out)
    assert "compressed already" in refused(out, tmp_path / "again")
    dense = tiny_models.build("qwen3_moe", model_configs.qwen3(mlp_only_layers=[0, 1, 2]))
    dense.to(torch.bfloat16).save_pretrained(path)
    assert "this model has no routed experts to compress" in refused(path, tmp_path / "again")


def test_nothing_is_left_of_what_fails_in_the_middle(build: Build, tmp_path: Path) -> None:
    path, out = build("qwen3", shard=SHARD), tmp_path / "out"
    where = json.loads((path / INDEX).read_text())["weight_map"]
    second = sorted(set(where.values()))[1]
    name = next(name for name in sorted(where) if where[name] == second and EXPERT.fullmatch(name))
    bits = np.random.default_rng(0).integers(0, 2**16, load_file(path / second)[name].shape, dtype=np.uint16)
    replaced(path, second, name, torch.from_numpy(bits).view(torch.bfloat16))
    said = refused(path, out)
    assert f"{second}: tensor {name}: " in said and "allowed: at most 15" in said


def test_a_form_that_loses_something_is_never_written(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours: no one line."""
    right, path = compressed_layout.decompress, build()
    monkeypatch.setattr(compressed_layout, "decompress", lambda stored, columns: right(stored, columns) ^ 1)
    with pytest.raises(AssertionError, match="would come back with other bits"):
        run(path, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
