from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.support import model_configs, tiny_models

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import ExpertLayout
from moesaic.experts.store import INDEX, SINGLE, Store, _convert_numbers
from moesaic.kernels import table
from moesaic.models import registry

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUT = ExpertLayout({1: "m.experts"}, "gate", "up", "down", 3, 2, 2, 1, "float32")
"""Two experts of hidden size 3 and width 2 in layer 1."""


def at(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(int(address), num_bytes)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# ---- the same bits as the models' loader


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with a dense layer, in one of the types."""
    path = tmp_path_factory.mktemp("checkpoint")
    model = tiny_models.build(
        "qwen3_moe", model_configs.qwen3(num_experts=4, num_experts_per_tok=2, mlp_only_layers=[1])
    )
    return tiny_models.save(model, path, request.param)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_bits_of_the_models_loader(checkpoint: Path, dtype: str, mapped: bool) -> None:
    kernels = table.pick("cpu", "auto")
    layout = registry.expert_layout(checkpoint, kernels, "cpu", dtype)
    assert layout.layers == (0, 2)
    store = Store(checkpoint, layout, mapped)
    wanted = {0: [1, 3], 2: [0]}
    store.load(wanted)
    assert store.resident_experts == wanted
    for layer, weights in registry.load_experts(checkpoint, kernels, wanted, "cpu", dtype).items():
        addresses = store.table(layer)
        for line, part in enumerate((weights.gate_proj, weights.up_proj, weights.down_proj)):
            for expert, tensor in enumerate(part):
                if tensor is None:
                    assert addresses[line, expert] == 0
                else:
                    assert at(addresses[line, expert], tensor.nbytes) == bits(tensor)


def test_experts_that_come_and_go_take_the_same_memory(checkpoint: Path) -> None:
    """Not mapped: whoever comes next lies where one lay that is gone, and the files are not mapped at all."""
    layout = registry.expert_layout(checkpoint, table.pick("cpu", "auto"), "cpu", "auto")
    store = Store(checkpoint, layout, use_mmap=False)
    store.load({0: [0, 1]})
    first = {int(store.table(0)[0, expert]) for expert in (0, 1)}
    for wanted in ([1, 2], [2, 3], [0, 3], [0, 1]):
        store.keep_only({0: wanted})
        store.load({0: wanted})
        assert store.resident_experts == {0: wanted}
        assert {int(store.table(0)[0, expert]) for expert in wanted} == first
    assert str(checkpoint) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("kind", [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
@given(data=st.binary(min_size=4, max_size=64).map(lambda data: data[: len(data) // 4 * 4]))
def test_conversions_are_those_of_torch(kind: tuple[str, torch.dtype], data: bytes) -> None:
    """Bit by bit, for every number there is; what is no number stays none."""
    name, dtype = kind
    part = np.frombuffer(data, dtype=np.uint8)
    tensor = torch.frombuffer(bytearray(data), dtype=dtype)
    for stored, wide in (("F32", torch.float32), ("BF16", torch.bfloat16)):
        found = torch.frombuffer(bytearray(_convert_numbers(part, name, stored).tobytes()), dtype=wide)
        wanted = tensor.to(wide)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert bits(found[~wanted.isnan()]) == bits(wanted[~wanted.isnan()])


# ---- how files may look


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Of LAYOUT, all numbers different."""
    found, first = {}, 0.0
    for expert in range(2):
        for name, rows, columns in LAYOUT.tensors(1, expert):
            values = torch.arange(first, first + rows * columns)
            found[name], first = values.reshape(rows, columns).to(dtype), first + rows * columns
    return found


def write(path: Path, entries: dict[str, Any], data: bytes, padding: int = 0) -> None:
    """A safetensors file by hand; `padding`: spaces behind its header."""
    header = json.dumps(entries).encode() + b" " * padding
    (path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + data)


def by_hand(values: dict[str, torch.Tensor]) -> tuple[dict[str, Any], bytes]:
    """Header and data of float32 tensors."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in values.items():
        end = len(data) + tensor.nbytes
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), end]}
        data += bits(tensor)
    return entries, data


def held(path: Path, layout: ExpertLayout = LAYOUT) -> bool:
    """Whether a store of both experts has the numbers of `tensors`."""
    store = Store(path, layout)
    store.load({1: [0, 1]})
    values = tensors(torch.float32 if layout.dtype == "float32" else torch.bfloat16)
    return all(
        at(address, values[name].nbytes) == bits(values[name])
        for expert in range(2)
        for address, (name, _, _) in zip(store.table(1)[:, expert], layout.tensors(1, expert), strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_file(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file(tensors(dtype), tmp_path / SINGLE)
    assert held(tmp_path) and held(tmp_path, replace(LAYOUT, dtype="bfloat16"))


def test_several_files(tmp_path: Path) -> None:
    """Each tensor in another one."""
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors().items()):
        weight_map[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, tmp_path / weight_map[name])
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert held(tmp_path)


@pytest.mark.parametrize("padding", range(8))
def test_numbers_may_lie_at_any_address(tmp_path: Path, padding: int) -> None:
    write(tmp_path, *by_hand(tensors()), padding)
    assert held(tmp_path)
    store = Store(tmp_path, LAYOUT)
    store.load({1: [0, 1]})
    assert not (store.table(1) % np.uint64(4)).any(), "kernels read whole numbers"


def test_weights_in_their_own_type_stay_in_the_file(tmp_path: Path) -> None:
    """The addresses lie in the mapping of the file: servers of one host share its pages."""
    save_file(tensors(), tmp_path / SINGLE)
    store = Store(tmp_path, LAYOUT)
    store.load({1: [0]})
    maps = Path("/proc/self/maps").read_text().splitlines()
    [line] = [line for line in maps if str(tmp_path) in line]
    begin, end = (int(word, 16) for word in line.split()[0].split("-"))
    assert all(begin <= address < end for address in store.table(1)[:, 0].tolist())


def test_take_and_keep(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / SINGLE)
    store = Store(tmp_path, LAYOUT)
    assert store.resident_experts == {} and not store.table(1).any()
    store.load({1: [0]})
    before = store.table(1).copy()
    store.load({1: [1, 0]})
    assert store.resident_experts == {1: [0, 1]}
    assert (store.table(1)[:, 0] == before[:, 0]).all(), "what is held is not read again"
    store.keep_only({1: [1, 7]})
    assert (
        store.resident_experts == {1: [1]} and not store.table(1)[:, 0].any() and store.table(1)[:, 1].all()
    )
    store.keep_only({})
    assert store.resident_experts == {}


# ---- what is refused


def test_experts_that_do_not_exist(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / SINGLE)
    store = Store(tmp_path, LAYOUT)
    for wanted, message in (
        ({0: [0]}, "layer 0 has no routed experts"),
        ({1: [2]}, "experts: got 2; allowed: 0 to 1"),
        ({1: [-1]}, "experts: got -1; allowed: 0 to 1"),
    ):
        with pytest.raises(CheckpointError, match=message):
            store.load(wanted)
    assert store.resident_experts == {}


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        held(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


NAME = "m.experts.1.down.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: None, f"tensor {NAME} is missing"),
        (lambda entry: [], f"tensor {NAME} is missing"),
        (lambda entry: {**entry, "shape": [2, 3]}, r"got F32 \[2, 3\]; allowed: F32, BF16, F16 \[3, 2\]"),
        (lambda entry: {**entry, "shape": None}, "got F32 None"),
        (lambda entry: {**entry, "dtype": "F64"}, r"got F64 \[3, 2\]; allowed: F32"),
        (lambda entry: {**entry, "dtype": ["F32"]}, r"got \['F32'\]"),
        (lambda entry: {"shape": [3, 2]}, "got None"),
        (lambda entry: {**entry, "dtype": "F16"}, "truncated or corrupt"),
        (lambda entry: {**entry, "data_offsets": [0, 23]}, "truncated or corrupt"),
        (lambda entry: {**entry, "data_offsets": [-24, 0]}, "truncated or corrupt"),
        (lambda entry: {**entry, "data_offsets": [24, 0]}, "truncated or corrupt"),
        (lambda entry: {**entry, "data_offsets": [144, 168]}, "24 bytes at .144, 168. of 144"),
        (lambda entry: {**entry, "data_offsets": [0.0, 24.0]}, "truncated or corrupt"),
        (lambda entry: {**entry, "data_offsets": [0]}, "truncated or corrupt"),
        (lambda entry: {**entry, "data_offsets": "ab"}, "truncated or corrupt"),
        (lambda entry: {key: entry[key] for key in ("dtype", "shape")}, "truncated or corrupt"),
    ],
)
def test_headers_that_do_not_fit(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    entries, data = by_hand(tensors())
    write(tmp_path, {**entries, NAME: change(entries[NAME])}, data)
    refused(tmp_path, message)


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -200, -1])
def test_a_file_that_ends_early(tmp_path: Path, kept: int) -> None:
    save_file(tensors(), tmp_path / SINGLE)
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(data[:kept])
    refused(tmp_path, "truncated or corrupt" if kept == -1 else SINGLE)


@pytest.mark.parametrize(
    "header", [b"", b"[]", b"7", b'"x"', b"{", b"\xff\xfe", b"[" * 100_000, b"[[1, 2]]", b"null"]
)
def test_a_file_that_is_something_else(tmp_path: Path, header: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(200))
    refused(tmp_path, SINGLE)


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", 2**63) + b"{}")
    refused(tmp_path, SINGLE)


def test_no_file_at_all(tmp_path: Path) -> None:
    refused(tmp_path, SINGLE)


@pytest.mark.parametrize(
    "index", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "\0"]
)
def test_a_damaged_index(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    refused(tmp_path, "not an index of tensors|is not valid JSON|contains no JSON object")


def test_an_index_that_lies(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "a.safetensors")
    names = dict.fromkeys(tensors(), "a.safetensors")
    for changes, message in (
        ({NAME: "b.safetensors"}, "b.safetensors"),
        ({NAME: "../../etc/passwd"}, "passwd"),
        ({NAME: None}, f"{INDEX}: tensor {NAME} is missing"),
    ):
        listed = {name: shard for name, shard in {**names, **changes}.items() if shard is not None}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": listed}))
        refused(tmp_path, message)
    assert load_file(tmp_path / "a.safetensors").keys() == names.keys()
