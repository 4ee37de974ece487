"""Quantised matrices and configs that do not fit are refused in one line that names the tensor or key."""

from __future__ import annotations

import copy
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.models.test_quantized import CASES, kernels
from tests.support import quantizers, tiny_models

from moesaic.core.errors import CheckpointError
from moesaic.experts.store import Store
from moesaic.models import registry
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.headers import SINGLE, Headers
from moesaic.models.quantization.scheme import Matrix

ROWS, COLUMNS = 16, 160


def written(path: Path, form: str, columns: int = COLUMNS, **changes: Callable[[Any], Any]) -> torch.Tensor:
    """Writes one matrix, with some tensors changed. Returns the dequantised matrix."""
    matrix = 0.1 * torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(0))
    tensors, plain = quantizers.FORMATS[form].write("some", matrix)
    for name, change in changes.items():
        tensors[f"some.{name}"] = change(tensors[f"some.{name}"].clone())
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / SINGLE)
    configured(path, quantizers.FORMATS[form].config)
    return plain


def configured(path: Path, config: dict[str, Any]) -> None:
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))


def read(path: Path, dtype: torch.dtype = torch.float32, columns: int = COLUMNS) -> torch.Tensor:
    return Checkpoint(path).tensor("some.weight", ROWS, columns, dtype=dtype)


def refused(path: Path, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(CheckpointError) as error:
        read(path, dtype)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    return str(error.value)


def in_group(**weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    return quantizers.compressed_tensors("pack-quantized", **{"num_bits": 4, **weights})


def in_blocks(block: Any) -> dict[str, Any]:
    return in_group(num_bits=8, type="float", strategy="block", block_structure=block)


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "groups of 0": ("packed int4", in_group(strategy="group", group_size=0), "weights.group_size: got 0"),
    "groups below 0": ("packed int4", in_group(strategy="group", group_size=-32), "group_size: got -32"),
    "groups of no size": ("packed int4", in_group(strategy="group"), "group_size: got None"),
    "groups by a word": ("packed int4", in_group(strategy="group", group_size="32"), "group_size: got '32'"),
    "groups of yes": ("packed int4", in_group(strategy="group", group_size=True), "group_size: got True"),
    "FP8 by group": (
        "fp8 rows",
        in_group(num_bits=8, type="float", strategy="group", group_size=32),
        "by 'group'",
    ),
    "an endless block": ("fp8 rows", in_blocks([float("inf"), 128]), "block_structure: got [inf, 128]"),
    "half a row": ("fp8 rows", in_blocks([1.5, 128]), "block_structure: got [1.5, 128]"),
    "a block of yes": ("fp8 rows", in_blocks([True, 128]), "block_structure: got [True, 128]"),
    "no groups": (
        "packed int4",
        in_group() | {"config_groups": {}},
        "config_groups: allowed: an object of groups, at",
    ),
    "a group of two lines": (
        "packed int4",
        in_group() | {"config_groups": {"a\nb": {"weights": {"type": "int"}}}},
        r"a\nb.weights.num_bits",
    ),
    "GPTQ groups of 0": ("gptq", {"group_size": 0}, "group_size: got 0; allowed: -1, or at least 1"),
    "AWQ groups of 0": ("awq", {"q_group_size": 0}, "q_group_size: got 0; allowed: -1, or at least 1"),
    "a format that is none": ("gptq", {"checkpoint_format": []}, "checkpoint_format: got []"),
    "a long format": ("gptq", {"checkpoint_format": "v" * 5000}, "checkpoint_format: got 'vvv"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_configs_that_do_not_fit(tmp_path: Path, what: str) -> None:
    form, changes, says = CONFIGS[what]
    written(tmp_path, form)
    configured(tmp_path, quantizers.FORMATS[form].config | changes)
    assert says in refused(tmp_path)


def with_last(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
        changed.view(-1)[-1] = number
        return changed

    return change


TENSORS: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {
    "fewer columns": (
        "packed int4",
        "weight_shape",
        with_last(158),
        "tensor some.weight_shape: got [16, 158]; allowed: [16, 160]",
    ),
    "a shape below 0": (
        "packed int8",
        "weight_shape",
        with_last(-160),
        "tensor some.weight_shape: got [16, -160]",
    ),
    "a group below 0": (
        "gptq v2, act order",
        "g_idx",
        with_last(-1),
        "tensor some.g_idx: got -1; allowed: 0 to 4",
    ),
    "columns in another order": (
        "gptq",
        "g_idx",
        lambda one: one.flip(0),
        "tensor some.g_idx: columns in another order",
    ),
    "FP8 beyond float32": (
        "fp8 blocks",
        "weight_scale_inv",
        with_last(2e36),
        "tensor some: got inf in the matrix",
    ),
    "int8 beyond float32": (
        "int8 rows",
        "weight_scale",
        with_last(-3e38),
        "tensor some: got inf in the matrix",
    ),
    "int4 beyond float32": (
        "packed int4",
        "weight_scale",
        with_last(1e38),
        "tensor some: got inf in the matrix",
    ),
    "offsets beyond float32": (
        "int8 rows, zero points",
        "weight_scale",
        with_last(2e36),
        "tensor some: got inf in",
    ),
    "act order beyond float32": ("gptq v2, act order", "scales", with_last(3e38), "in the matrix"),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_do_not_fit(tmp_path: Path, what: str) -> None:
    form, name, change, says = TENSORS[what]
    written(tmp_path, form, **{name: change})
    assert says in refused(tmp_path)


def test_numbers_that_only_a_narrow_type_makes_infinite(tmp_path: Path) -> None:
    written(tmp_path, "packed int4", weight_scale=with_last(6e4))
    assert read(tmp_path).isfinite().all()
    assert "tensor some.weight: got " in refused(tmp_path, torch.float16)


@pytest.mark.parametrize("rows", [10**15, 10**30])
@pytest.mark.parametrize("columns", [128, 128 * 10**9])
def test_blocks_larger_than_the_matrix_take_no_memory(tmp_path: Path, rows: int, columns: int) -> None:
    def first(scales: torch.Tensor) -> torch.Tensor:
        return scales[:1, : -(-COLUMNS // columns)]

    written(tmp_path, "fp8 blocks")
    whole = read(tmp_path)
    written(tmp_path, "fp8 blocks", weight_scale_inv=first)
    configured(tmp_path, quantizers.FORMATS["fp8 blocks"].config | {"weight_block_size": [rows, columns]})
    found = read(tmp_path)
    assert torch.equal(found[:, :128], whole[:, :128])


@pytest.mark.parametrize("form", ["gptq", "gptq v2, act order"])
def test_gptq_columns_that_leave_a_word_unfilled(tmp_path: Path, form: str) -> None:
    """One group for 13 columns, which take two words of eight codes, or four of four."""
    bits = 8 if "v2" in form else 4
    matrix = torch.randn(ROWS, 13, generator=torch.Generator().manual_seed(0))
    tensors, plain = quantizers.gptq(bits, 13, 0 if "v2" in form else 1, "order" in form)("some", matrix)
    save_file({name: one.contiguous() for name, one in tensors.items()}, tmp_path / SINGLE)
    configured(tmp_path, quantizers.FORMATS[form].config | {"group_size": -1})
    torch.testing.assert_close(read(tmp_path, columns=13), plain)


@pytest.mark.parametrize("shape", [[16.0, 160], ["x", 160], [[16], 160], [None, 160]], ids=str)
def test_headers_whose_shapes_are_no_integers(tmp_path: Path, shape: list[Any]) -> None:
    """Expert servers read headers themselves."""
    written(tmp_path, "fp8 rows")
    data = (tmp_path / SINGLE).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header["some.weight"]["shape"] = shape
    text = json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    headers = Headers(tmp_path)
    matrix = headers.find_quantized("some.weight", ROWS, COLUMNS)
    assert isinstance(matrix, Matrix)
    with pytest.raises(CheckpointError, match="truncated or corrupt: tensor some.weight has no bytes"):
        headers.place(matrix.parts[0])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(
        tiny_models.build(*CASES["qwen3"]), tmp_path_factory.mktemp("qwen3"), torch.bfloat16
    )


def mixed(source: Path, to: Path, others: str, other: str | None) -> Path:
    """An int4 checkpoint. Names that match `others` are in the format `other`, or bf16."""
    int4 = quantizers.FORMATS["packed int4"]
    config = copy.deepcopy(int4.config)
    if other is not None:
        config["config_groups"]["group_1"] = quantizers.FORMATS[other].config["config_groups"]["group_0"]

    def write(name: str, matrix: torch.Tensor) -> tuple[quantizers.Tensors, torch.Tensor]:
        special = other is not None and re.search(others, name)
        return (quantizers.FORMATS[str(other)] if special else int4).write(name, matrix)

    kept = f".*{others}.*" if other is None else ""
    return quantizers.quantize(source, to, quantizers.Format(write, config), kept)[0]


MIXED = {
    "the first is bf16": (
        r"layers\.1\.mlp\.experts\.0\.",
        None,
        "experts.1.gate_proj.weight: got int4_g32; allowed: no quantised type",
    ),
    "the first gate is bf16": (
        r"1\.mlp\.experts\.0\.gate",
        None,
        "experts.0.up_proj.weight: got int4_g32; allowed: no quantised type",
    ),
    "another is bf16": (
        r"layers\.1\.mlp\.experts\.2\.",
        None,
        "experts.2.gate_proj.weight: got bfloat16; allowed: int4",
    ),
    "another is int8": (r"experts\.2\.", "int8 rows", "experts.2.gate_proj.weight: got int8; allowed: int4"),
}


@pytest.mark.parametrize("what", MIXED)
def test_experts_of_a_layer_with_several_types(source: Path, tmp_path: Path, what: str) -> None:
    others, other, says = MIXED[what]
    path = mixed(source, tmp_path, others, other)
    with pytest.raises(CheckpointError, match=re.escape(says)):
        registry.load(path, kernels)


LAYERS = {
    "a layer is bf16": (r"layers\.0\.mlp\.experts\.", None, "bfloat16", {1: "int4_g32"}),
    "downs are FP8": (r"experts\.\d+\.down", "fp8 rows", "int4_g32+fp8", {}),
    "downs of a layer are FP8": (r"1\.mlp\.experts\.\d+\.down", "fp8 rows", "int4_g32", {1: "int4_g32+fp8"}),
}


@pytest.mark.parametrize("what", LAYERS)
@pytest.mark.parametrize("mapped", [True, False])
def test_servers_hold_layers_of_several_types(source: Path, tmp_path: Path, what: str, mapped: bool) -> None:
    names, other, dtype, others = LAYERS[what]
    path = mixed(source, tmp_path, names, other)
    layout = registry.expert_layout(path, kernels)
    assert (layout.dtype, layout.layer_dtypes) == (dtype, others)
    store, wanted = Store(path, layout, mapped), {0: [1], 1: [0, 3]}
    store.load(wanted)
    for layer, loaded in registry.load_experts(path, kernels, wanted).items():
        for expert in wanted[layer]:
            parts = [part[expert] for part in loaded.parts]
            for mine, theirs in zip(store._matrices[layer, expert], parts, strict=True):
                assert theirs is not None
                assert mine.tobytes() == theirs.view(torch.uint8).numpy().tobytes()
    sizes = [sum(part.nbytes for part in store._matrices[layer, wanted[layer][0]]) for layer in (0, 1)]
    assert layout.num_bytes == layout.num_experts * sum(sizes)
    assert layout.expert_bytes == max(sizes)


def test_servers_name_the_tensor_of_another_type(source: Path, tmp_path: Path) -> None:
    path = mixed(source, tmp_path / "int8", r"experts\.2\.", "int8 rows")
    store = Store(path, registry.expert_layout(path, kernels))
    with pytest.raises(
        CheckpointError, match=r"tensor .*1.*experts\.2\.gate_proj: an expert is stored as int8"
    ):
        store.load({1: [2]})
    path = mixed(source, tmp_path / "bf16", r"experts\.2\.", None)
    store = Store(path, registry.expert_layout(path, kernels))
    with pytest.raises(
        CheckpointError, match=r"tensor .*experts\.2\.gate_proj\.weight: an expert is stored as BF"
    ):
        store.load({1: [2]})
