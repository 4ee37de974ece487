"""Matrices outside of the experts stay in their stored type, with the bits of the dequantised matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.models.test_gguf import MIXES, WIDE
from tests.models.test_shards import Ranks
from tests.support import gguf_files, model_configs, quantizers, tiny_models
from tests.support.model_driver import Driver

from moesaic.kernels import table
from moesaic.kernels.matrix import QuantizedMatrix, Weight, kind_of
from moesaic.models import registry
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.model import Model
from moesaic.models.shard import WHOLE, Shard

CONFIGS = {
    "qwen3": (
        "qwen3_moe",
        model_configs.qwen3(
            hidden_size=160, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=8, head_dim=32, mlp_only_layers=[1],
        ),
    ),
    "deepseek3": (
        "deepseek_v3",
        model_configs.deepseek3(
            hidden_size=160, moe_intermediate_size=64, intermediate_size=96, num_hidden_layers=2,
            q_lora_rank=32, v_head_dim=16,
        ),
    ),
    "qwen2": ("qwen2_moe", model_configs.qwen2(hidden_size=160, num_hidden_layers=2)),
    "lfm2": ("lfm2_moe", model_configs.lfm2(hidden_size=160)),
    "qwen3-next": ("qwen3_next", model_configs.qwen3_next(hidden_size=160)),
}  # fmt: skip
FORMS = [form for form in quantizers.FORMATS if quantizers.STORED[form] != "float32"]
FAMILIES = [("qwen3", form) for form in FORMS] + [
    ("deepseek3", "fp8 blocks"), ("deepseek3", "packed int8"), ("qwen2", "int8 rows"), ("lfm2", "fp8 rows"),
    ("qwen3-next", "int8 rows, zero points"),
]  # fmt: skip
Made = Callable[[str, str], Path]
FAST = [("qwen3", "packed int4"), ("deepseek3", "fp8 blocks")]
"""Cases that `make check` has too."""
kernels = table.pick("cpu", "auto")
pytestmark = pytest.mark.skipif(
    not kernels.can_use_quantized, reason="these kernels read no quantised matrices"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """name, form -> the quantised checkpoint."""

    @cache
    def source(name: str) -> Path:
        model = tiny_models.build(*CONFIGS[name])
        return tiny_models.save(model, tmp_path_factory.mktemp(name), torch.bfloat16)

    @cache
    def make(name: str, form: str) -> Path:
        return quantizers.quantize(source(name), tmp_path_factory.mktemp("of"), quantizers.FORMATS[form])[0]

    return make


def load(path: Path, shard: Shard = WHOLE, mapped: bool = True, plain: bool = False) -> Model:
    """With what is not quantised in float32 too. plain: the quantised matrices also become float32."""
    chosen = replace(kernels, can_use_quantized=False) if plain else kernels
    return registry.load(path, chosen, dtype="float32", shard=shard, use_mmap=mapped)


def weights(part: object, name: str = "") -> Iterator[tuple[str, Weight]]:
    """Every weight in nested dataclasses, with the names of its fields."""
    if isinstance(part, torch.Tensor | QuantizedMatrix):
        yield name, part
    elif isinstance(part, tuple):
        for place, one in enumerate(part):
            yield from weights(one, f"{name}.{place}")
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from weights(getattr(part, field.name), f"{name}.{field.name}")


def kinds(model: Model) -> dict[str, str]:
    """The type of each matrix of the layers, outside of experts."""
    return {
        name: kind_of(one)
        for name, one in weights(model.blocks)
        if len(one.shape) == 2 and ".rope." not in name
    }


@pytest.mark.parametrize(
    ("name", "form"), [one if one in FAST else pytest.param(*one, marks=pytest.mark.slow) for one in FAMILIES]
)
def test_logits_have_the_bits_of_float32(made: Made, name: str, form: str) -> None:
    model, reference = load(made(name, form)), load(made(name, form), plain=True)
    stored = [name for name, kind in kinds(model).items() if kind == quantizers.STORED[form]]
    assert len(stored) >= 8 and set(kinds(reference).values()) == {"float32"}
    tokens = tiny_models.prompt(40, model_configs.VOCAB)
    assert torch.equal(Driver(model).prefill(tokens), Driver(reference).prefill(tokens))
    assert torch.equal(Driver(model).prefill(tokens, chunk=3), Driver(reference).prefill(tokens))
    assert Driver(model).greedy(tokens, 24) == Driver(reference).greedy(tokens, 24)


def test_all_matrices_but_gates_stay(made: Made) -> None:
    found = kinds(load(made("qwen3", "packed int8")))
    attention = [
        f".{layer}.attention_part.{part}.weight" for layer in (0, 1) for part in ("query", "key", "value")
    ]
    outputs = [f".{layer}.attention_part.out_proj.weight" for layer in (0, 1)]  # rows of whole blocks
    dense = [f".1.dense_part.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
    wanted = {**dict.fromkeys([*attention, *dense], "int8"), **dict.fromkeys(outputs, "int8_g128")}
    assert found == {**wanted, ".0.router.weight": "float32"}


SPLIT = {"fp8 blocks": "float32", "packed int4, zero points": "int4_offset", "packed int8": "int8"}
"""Form -> what the columns of one of four ranks become."""


@pytest.mark.parametrize(
    ("form", "size"),
    [
        ("packed int4", 2),
        ("fp8 blocks", 4),
        *(
            pytest.param(form, size, marks=pytest.mark.slow)
            for form, size in (
                ("fp8 blocks", 2),
                ("packed int4, zero points", 4),
                ("awq", 2),
                ("packed int8", 4),
            )
        ),
    ],
)
def test_ranks_have_parts_of_stored_matrices(made: Made, form: str, size: int) -> None:
    """A head has 32 numbers. So the columns of one rank are whole groups of all types but FP8's.

    But a block of 128 numbers is split where a row is one group.
    """
    path = made("qwen3", form)
    ranks = [load(path, Shard(rank, size)) for rank in range(size)]
    cut = SPLIT.get(form, quantizers.STORED[form]) if size == 4 else quantizers.STORED[form]
    for model in ranks:
        part = model.blocks[0].attention_part
        assert kind_of(part.query.weight) == kind_of(part.value.weight) == quantizers.STORED[form]
        assert kind_of(part.out_proj.weight) == cut
        assert part.query.weight.shape == (256 // size, 160) and part.out_proj.weight.shape == (
            160,
            256 // size,
        )
    tokens = tiny_models.prompt(23, model_configs.VOCAB)
    wanted = Ranks([load(path, Shard(rank, size), plain=True) for rank in range(size)]).prefill(tokens)
    assert torch.equal(Ranks(ranks).prefill(tokens), wanted)


@pytest.mark.parametrize(
    ("name", "form", "mapped"),
    [
        (*FAST[0], True),
        (*FAST[1], False),
        pytest.param("lfm2", "fp8 rows", False, marks=pytest.mark.slow),
        pytest.param("qwen3-next", "int8 rows, zero points", True, marks=pytest.mark.slow),
    ],
)
def test_bytes_are_counted_as_they_are_held(made: Made, name: str, form: str, mapped: bool) -> None:
    path = made(name, form)
    model, reference = load(path, mapped=mapped), load(path, mapped=mapped, plain=True)
    assert model.num_parameters == reference.num_parameters
    outside = replace(model, experts={}).num_bytes
    assert outside == registry.bytes_outside_experts(path, kernels, "float32")
    assert outside < replace(reference, experts={}).num_bytes


def test_an_mlp_of_several_types_becomes_float32(made: Made, tmp_path: Path) -> None:
    tensors = quantizers.FORMATS["packed int4"], r".*layers\.1\.mlp\.up_proj.*"
    source = tiny_models.save(tiny_models.build(*CONFIGS["qwen3"]), tmp_path / "source", torch.bfloat16)
    quantised, _ = quantizers.quantize(source, tmp_path, *tensors)
    model = load(quantised)
    found = {name: kind for name, kind in kinds(model).items() if "dense_part" in name}
    assert found == dict.fromkeys(
        (f".1.dense_part.{part}" for part in ("gate_proj", "up_proj", "down_proj")), "float32"
    )
    tokens = tiny_models.prompt(9, model_configs.VOCAB)
    assert torch.equal(Driver(model).prefill(tokens), Driver(load(quantised, plain=True)).prefill(tokens))


def test_a_part_is_cut_from_the_stored_matrix(made: Made) -> None:
    checkpoint, name = Checkpoint(made("qwen3", "awq")), "model.layers.0.self_attn.o_proj.weight"
    matrix = checkpoint.find_quantized(name, 160, 256)
    assert matrix is not None
    whole = checkpoint.tensor(name, 160, 256, dtype=torch.float32)
    for part in ((slice(3, 40),), (slice(None), slice(64, 128)), (slice(2, 9), slice(224, 256))):
        assert matrix.cuts(part)
        stored = checkpoint.tensor(name, 160, 256, dtype=torch.uint8, part=part)
        columns = whole[part].shape[1]
        assert torch.equal(QuantizedMatrix(stored, columns, matrix.dtype).floats(), whole[part])
    assert not matrix.cuts((slice(None), slice(16, 128))) and not matrix.cuts((slice(None), slice(0, 100)))


@pytest.mark.parametrize(
    ("mix", "found"),
    [
        ("MXFP4", {"q8_0"}),
        *(
            pytest.param(mix, found, marks=pytest.mark.slow)
            for mix, found in (
                ("as Q4_K_M", {"q4_k", "q6_k", "q8_0"}),
                ("linear, as Q4_K_M", {"q4_k", "q6_k", "int4_offset"}),
                ("linear, Q8_0", {"q8_0"}),
                ("linear and joint, as Q4_K_M", {"q4_k", "q6_k"}),
            )
        ),
    ],
)
def test_matrices_of_gguf_files_stay_too(tmp_path: Path, mix: str, found: set[str]) -> None:
    """Also where the file has rows, or whole blocks of columns, in another order.

    Where only groups of columns are whole, as in the output projection of linear attention, they are
    converted.
    """
    name, types = MIXES[mix]
    source = tiny_models.save(tiny_models.build(*WIDE[name]), tmp_path / "source")
    file, _ = gguf_files.write(source, tmp_path / "made", types)
    model, reference = load(file), load(file, plain=True)
    assert {kind_of(model.embedding), kind_of(model.head)} <= found
    gates = [".router.weight", ".dense_part.gate", ".attention_part.gates", ".taps"]
    assert {kind for name, kind in kinds(model).items() if not name.endswith(tuple(gates))} == found
    tokens = tiny_models.prompt(24, model_configs.VOCAB)
    assert torch.equal(Driver(model).prefill(tokens), Driver(reference).prefill(tokens))
    assert replace(model, experts={}).num_bytes == registry.bytes_outside_experts(file, kernels, "float32")
