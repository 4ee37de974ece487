"""Where tensors lie, against what safetensors itself reads there."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import model_configs, tiny_models

from moesaic.core.errors import CheckpointError
from moesaic.models.headers import INDEX, SINGLE, Headers

TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_of_a_checkpoint(tmp_path: Path, dtype: torch.dtype, shards: int) -> None:
    model = tiny_models.build("mixtral", model_configs.mixtral(num_hidden_layers=1)).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="40KB" if shards > 1 else "1GB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) >= shards and (tmp_path / INDEX).exists() == (shards > 1)
    headers = Headers(tmp_path)
    for file in files:
        data = file.read_bytes()
        for name, tensor in load_file(file).items():
            place = headers.find(name, *tensor.shape)
            assert (place.file, place.dtype, place.shape) == (file, TYPES[dtype], tuple(tensor.shape))
            assert data[place.offset : place.offset + place.size] == bits(tensor)


def test_shapes_of_any_number_of_dimensions(tmp_path: Path) -> None:
    values = {"none": torch.tensor(3.0), "one": torch.rand(5), "three": torch.rand(2, 3, 4)}
    save_file(values, tmp_path / SINGLE)
    data = (tmp_path / SINGLE).read_bytes()
    for name, tensor in values.items():
        place = Headers(tmp_path).find(name, *tensor.shape)
        assert data[place.offset : place.offset + place.size] == tensor.numpy().tobytes()
        with pytest.raises(CheckpointError, match=f"tensor {name}: got F32"):
            Headers(tmp_path).find(name, *tensor.shape, 1)


def test_a_file_is_read_when_one_of_its_tensors_is_asked_for(tmp_path: Path) -> None:
    save_file({"here": torch.rand(2)}, tmp_path / "a.safetensors")
    listed = {"here": "a.safetensors", "there": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": listed}))
    headers = Headers(tmp_path)
    (tmp_path / "c.safetensors").write_bytes(b"")
    assert headers.find("here", 2).size == 8
    (tmp_path / "a.safetensors").unlink()
    assert headers.find("here", 2).size == 8, "a header is read once"
    refused(headers, f"{tmp_path / 'b.safetensors'}: not a safetensors file", "there")
    refused(headers, f"{tmp_path / INDEX}: tensor elsewhere is missing", "elsewhere")


# ---- what is refused: more in tests/experts/test_store.py


def refused(headers: Headers, message: str, name: str = "x", *shape: int) -> None:
    with pytest.raises(CheckpointError) as caught:
        headers.find(name, *shape)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def write(path: Path, entries: Any, data: bytes = b"", length: int | None = None) -> Headers:
    header = json.dumps(entries).encode()
    told = len(header) if length is None else length
    (path / SINGLE).write_bytes(struct.pack("<Q", told) + header + data)
    return Headers(path)


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert write(tmp_path, {"x": good}, bytes(8)).find("x", 2).size == 8
    refused(write(tmp_path, {"x": good}, bytes(7)), "8 bytes at [0, 8] of 7", "x", 2)
    refused(write(tmp_path, {"x": {**good, "dtype": "I64"}}, bytes(8)), "got I64 [2]; allowed: F32", "x", 2)
    refused(write(tmp_path, {"x": good}, bytes(8)), "got F32 [2]; allowed: F32, BF16, F16 [3]", "x", 3)
    refused(write(tmp_path, {"x": good}, bytes(8)), "tensor y is missing", "y", 2)
    refused(write(tmp_path, {"x": [1]}), "tensor x is missing")
    for content in ([], None, "x", 7, [["x", good]]):
        refused(write(tmp_path, content), f"its header is a {type(content).__name__}")
    refused(
        write(tmp_path, {"x": good}, bytes(8), length=10**18),
        f"its header has {10**18 + 8} bytes, but the file",
    )
    (tmp_path / SINGLE).unlink()
    refused(Headers(tmp_path), "not a safetensors file")


def test_torch_is_not_imported() -> None:
    code = "import sys, moesaic.models.headers; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
