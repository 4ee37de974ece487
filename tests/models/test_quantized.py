"""Quantised checkpoints have the logits and tokens of transformers on the dequantised checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.support import golden_formats, model_configs, quantizers, tiny_models
from tests.support.model_driver import Driver

from moesaic.core.errors import CheckpointError
from moesaic.experts import store
from moesaic.experts.store import Store
from moesaic.kernels import table
from moesaic.kernels.matrix import kind_of
from moesaic.models import registry
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.fingerprint import ExpertDigests
from moesaic.models.headers import Headers

pytestmark = pytest.mark.slow

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "qwen3_moe",
        model_configs.qwen3(
            hidden_size=160, moe_intermediate_size=96, num_hidden_layers=2, mlp_only_layers=[]
        ),
    ),
    "deepseek3": (
        "deepseek_v3",
        model_configs.deepseek3(
            hidden_size=160, moe_intermediate_size=64, intermediate_size=96, num_hidden_layers=2
        ),
    ),
    "rows of 128": (
        "qwen3_moe",
        model_configs.qwen3(
            hidden_size=128, moe_intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
            head_dim=32, mlp_only_layers=[],
        ),
    ),
    "gpt-oss": (
        "gpt_oss", model_configs.gpt_oss(hidden_size=96, intermediate_size=64, num_hidden_layers=2),
    ),
}  # fmt: skip
FORMATS = {**quantizers.FORMATS, "mxfp4": quantizers.MXFP4}
STORED = {**quantizers.STORED, "mxfp4": "mxfp4_e8m0"}
EVERY = [("qwen3", form) for form in quantizers.FORMATS] + [("gpt-oss", "mxfp4")]
FOR_EACH = [*EVERY, ("deepseek3", "fp8 blocks")]
kernels = table.pick("cpu", "auto")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints before they are quantised, in bf16."""
    return {
        name: tiny_models.save(tiny_models.build(*case), tmp_path_factory.mktemp(name), torch.bfloat16)
        for name, case in CASES.items()
    }


def made(sources: dict[str, Path], name: str, form: str, to: Path, kept: str = "") -> tuple[Path, Path]:
    return quantizers.quantize(sources[name], to, FORMATS[form], kept)


def theirs(name: str, plain: Path) -> Any:
    return tiny_models.KINDS[CASES[name][0]][1].from_pretrained(plain, dtype=torch.float32)


def compare(name: str, quantised: Path, plain: Path) -> str:
    """Compares logits and tokens with those of transformers. Returns the type of experts."""
    model, tokens = registry.load(quantised, kernels), tiny_models.prompt(40, model_configs.VOCAB)
    reference = theirs(name, plain)
    logits = Driver(model).prefill(tokens)
    torch.testing.assert_close(logits, tiny_models.reference_logits(reference, tokens), rtol=1e-4, atol=1e-4)
    assert Driver(model).greedy(tokens, 24) == tiny_models.reference_greedy(reference, tokens, 24)
    weights = next(iter(model.experts.values()))
    dtype = weights.matrices_of(0)[0].dtype
    return weights.packed_dtype if dtype is torch.uint8 else str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(("name", "form"), FOR_EACH)
def test_logits_and_tokens_are_those_of_the_dequantised_model(
    sources: dict[str, Path], tmp_path: Path, name: str, form: str
) -> None:
    assert compare(name, *made(sources, name, form, tmp_path)) == STORED[form]


@pytest.mark.parametrize("form", quantizers.GROUPS_OF_128)
def test_groups_of_128_stay_blocks(sources: dict[str, Path], tmp_path: Path, form: str) -> None:
    """Also those of eight bits with zero points, and of GPTQ with columns that were rounded in any order."""
    quantised, plain = quantizers.quantize(sources["rows of 128"], tmp_path, quantizers.GROUPS_OF_128[form])
    wanted = "int4_g128" if form in ("gptq, static groups", "gptq, rows in any order") else "int8_offset_g128"
    wanted = "nvfp4_g128" if "nvfp4" in form else wanted
    assert compare("rows of 128", quantised, plain) == wanted


@pytest.mark.parametrize("mixed", [False, True])
def test_modelopt_may_say_in_a_file_of_its_own_that_it_wrote_fp8(
    sources: dict[str, Path], tmp_path: Path, mixed: bool
) -> None:
    quantised, plain = made(sources, "qwen3", "fp8 matrix, static", tmp_path)
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization_config"]
    (quantised / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    if mixed:
        layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
        settings |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    content = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": settings}
    (quantised / "hf_quant_config.json").write_text(json.dumps(content))
    assert compare("qwen3", quantised, plain) == "fp8"


def test_quark_writes_mxfp4_with_names_of_its_own(sources: dict[str, Path], tmp_path: Path) -> None:
    def write(name: str, matrix: torch.Tensor) -> tuple[quantizers.Tensors, torch.Tensor]:
        tensors, plain = quantizers.packed_mxfp4(name, matrix)
        return {key.removesuffix("_packed"): tensor for key, tensor in tensors.items()}, plain

    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1}
    config = {
        "quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": {"dtype": "fp4"}},
        "layer_quant_config": {}, "exclude": ["lm_head"], "export": {"pack_method": "reorder"},
    }  # fmt: skip
    quantised, plain = quantizers.quantize(sources["qwen3"], tmp_path, quantizers.Format(write, config))
    assert compare("qwen3", quantised, plain) == "mxfp4_e8m0"
    config["global_quant_config"] = {"weight": {"dtype": "int4"}}
    tiny_models.edit(quantised, quantization_config=config)
    with pytest.raises(CheckpointError, match="global_quant_config.weight: got {'dtype': 'int4'"):
        registry.load(quantised, kernels)


@pytest.mark.parametrize("mapped", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "form"), EVERY)
def test_servers_hold_the_bytes_of_the_loader(
    sources: dict[str, Path], tmp_path: Path, name: str, form: str, mapped: bool
) -> None:
    quantised, _ = made(sources, name, form, tmp_path)
    layout = registry.expert_layout(quantised, kernels)
    assert layout.dtype == STORED[form]
    held = Store(quantised, layout, mapped)
    held.load({1: [0, 3]})
    loaded = registry.load_experts(quantised, kernels, {1: [0, 3]})[1]
    for expert in (0, 3):
        parts = (part[expert] for part in loaded.parts)
        for part, wanted, size in zip(held._matrices[1, expert], parts, layout.matrix_bytes, strict=True):
            assert wanted is not None and part.nbytes == size
            assert part.tobytes() == wanted.view(torch.uint8).numpy().tobytes()


def test_servers_read_only_the_experts_that_they_take(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All experts of a layer are in one tensor in MXFP4."""
    quantised, _ = made(sources, "gpt-oss", "mxfp4", tmp_path)
    read, sizes = store._read, []
    monkeypatch.setattr(store, "_read", lambda place: sizes.append(place.size) or read(place))
    Store(quantised, registry.expert_layout(quantised, kernels)).load({1: [2]})
    every = Headers(quantised).list_tensors().items()
    matrices = sum(place.size for name, place in every if "layers.1.mlp.experts.gate_up_proj_" in name)
    biases = 4 * 3 * (96 + 2 * 64)
    assert 0 < sum(sizes) < 3 * matrices / 12 + biases


def test_a_part_of_the_matrices_may_be_left_as_it_is(sources: dict[str, Path], tmp_path: Path) -> None:
    quantised, plain = made(sources, "qwen3", "packed int4", tmp_path, r".*(q_proj|layers\.0\.self_attn).*")
    tokens = tiny_models.prompt(20, model_configs.VOCAB)
    logits = Driver(registry.load(quantised, kernels)).prefill(tokens)
    wanted = tiny_models.reference_logits(theirs("qwen3", plain), tokens)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_columns_may_have_any_group(sources: dict[str, Path], tmp_path: Path, symmetric: bool) -> None:
    settings: dict[str, Any] = {"strategy": "group", "group_size": 32, "actorder": "group"}
    config = quantizers.compressed_tensors("pack-quantized", num_bits=4, symmetric=symmetric, **settings)
    config["sparsity_config"] = {
        "format": "dense",
        "global_sparsity": 0.1,
        "sparsity_structure": "unstructured",
    }
    form = quantizers.Format(quantizers.packed_in_any_order(4, 32, symmetric), config)
    quantised, plain = quantizers.quantize(sources["qwen3"], tmp_path, form)
    tokens = tiny_models.prompt(20, model_configs.VOCAB)
    wanted = tiny_models.reference_logits(theirs("qwen3", plain), tokens)
    logits = Driver(registry.load(quantised, kernels)).prefill(tokens)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


CACHE_SCALES = [
    *("k_scale", "v_scale", "kv_scale", "q_scale", "attn.k_scale", "k_proj.k_scale", "v_proj.output_scale"),
    *("k_zero_point", "qkv_proj.k_scale"),
]


@pytest.mark.parametrize("scheme", ["static", {"num_bits": 8, "type": "float", "dynamic": False}, None])
def test_scales_of_an_fp8_cache_are_skipped_and_the_log_says_so(
    sources: dict[str, Path], tmp_path: Path, scheme: object, caplog: pytest.LogCaptureFixture
) -> None:
    form = "fp8 blocks" if scheme == "static" else "fp8 rows"
    quantised, _ = made(sources, "qwen3", form, tmp_path)
    tokens = tiny_models.prompt(9, model_configs.VOCAB)
    wanted = Driver(registry.load(quantised, kernels)).prefill(tokens)
    assert not caplog.messages
    tiny_models.edit(quantised, quantization_config=FORMATS[form].config | {"kv_cache_scheme": scheme})
    tensors = load_file(quantised / "model.safetensors")
    scales = {f"model.layers.0.self_attn.{name}": torch.tensor(0.5) for name in CACHE_SCALES}
    save_file(tensors | scales, quantised / "model.safetensors")
    assert torch.equal(Driver(registry.load(quantised, kernels)).prefill(tokens), wanted)
    assert [line.partition(" are not used")[0] for line in caplog.messages] == [
        "the scales of an FP8 KV cache (k_scale, v_scale)"
    ]
    save_file(tensors | {"model.layers.0.self_attn.o_scale": torch.ones(1)}, quantised / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor .*\.o_scale is not expected"):
        registry.load(quantised, kernels)


def test_static_scales_of_activations_are_skipped_only_where_the_config_names_them(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    quantised, plain = made(sources, "qwen3", "fp8 matrix, static", tmp_path)
    tokens = tiny_models.prompt(20, model_configs.VOCAB)
    wanted = Driver(registry.load(plain, kernels)).prefill(tokens)
    groups = json.loads(json.dumps(FORMATS["fp8 matrix"].config))
    for static in (FORMATS["fp8 matrix, static"].config, groups):
        groups["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False}
        tiny_models.edit(quantised, quantization_config=static)
        assert torch.allclose(Driver(registry.load(quantised, kernels)).prefill(tokens), wanted, atol=1e-4)
    tiny_models.edit(quantised, quantization_config=FORMATS["fp8 matrix"].config)
    with pytest.raises(CheckpointError, match=r"tensor .*\.input_scale is not expected by this model"):
        registry.load(quantised, kernels)


def test_one_matrix_of_a_shared_expert_may_be_left_as_it_is(sources: dict[str, Path], tmp_path: Path) -> None:
    quantised, plain = made(sources, "deepseek3", "fp8 blocks", tmp_path, r".*shared_experts\.down_proj.*")
    tokens = tiny_models.prompt(20, model_configs.VOCAB)
    wanted = tiny_models.reference_logits(theirs("deepseek3", plain), tokens)
    logits = Driver(registry.load(quantised, kernels)).prefill(tokens)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.bfloat16 not in kernels.unconverted_dtypes, reason="these kernels keep no bf16")
@pytest.mark.parametrize("packed", [True, False])
def test_matrices_become_bf16_if_that_loses_nothing(
    sources: dict[str, Path], tmp_path: Path, packed: bool
) -> None:
    """Where the scales are powers of two, and the config says so. packed: False as in amx_bf16, where no
    matrix stays in FP8. Otherwise those of the heads become bf16.
    """
    quantised, plain = quantizers.quantize(sources["deepseek3"], tmp_path, quantizers.POWERS)
    tokens, chosen = tiny_models.prompt(40, model_configs.VOCAB), replace(kernels, can_use_quantized=packed)
    reference, loaded = theirs("deepseek3", plain), registry.load(quantised, chosen)

    def types(model: Any) -> tuple[str, set[str]]:
        attention, shared = model.blocks[0].attention_part, model.blocks[1].dense_part
        others = attention.out_proj.weight, shared.gate_proj, shared.down_proj
        return kind_of(attention.key_up), set(map(kind_of, others))

    assert types(loaded) == ("bfloat16", {"fp8" if packed else "bfloat16"})
    experts = sum(
        one.nbytes
        for weights in loaded.experts.values()
        for e in weights.resident_ids
        for one in weights.matrices_of(e)
    )
    assert registry.bytes_outside_experts(quantised, chosen) == loaded.num_bytes - experts
    logits = Driver(loaded).prefill(tokens)
    torch.testing.assert_close(logits, tiny_models.reference_logits(reference, tokens), rtol=1e-4, atol=1e-4)
    assert Driver(loaded).greedy(tokens, 24) == tiny_models.reference_greedy(reference, tokens, 24)
    told, wide = {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8" if packed else "float32"
    tiny_models.edit(quantised, quantization_config=told)
    assert types(registry.load(quantised, chosen)) == ("float32", {wide})
    tensors = load_file(quantised / "model.safetensors")
    for name, one in tensors.items():
        if name.endswith("_scale_inv"):
            one *= 1.1
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    tiny_models.edit(quantised, quantization_config=quantizers.POWERS.config)
    assert types(registry.load(quantised, chosen)) == ("float32", {wide})


@pytest.mark.parametrize(("name", "form"), [("qwen3", "packed int4"), ("gpt-oss", "mxfp4")])
def test_digests_cover_every_tensor_of_an_expert(
    sources: dict[str, Path], tmp_path: Path, name: str, form: str
) -> None:
    """By them a server that joins shows that it has the same weights."""
    quantised, _ = made(sources, name, form, tmp_path)
    layout, file = registry.expert_layout(quantised, kernels), quantised / "model.safetensors"
    before = ExpertDigests(quantised, layout).digest_of(1, 2)
    assert before == ExpertDigests(quantised, layout).digest_of(1, 2)
    tensors = load_file(file)
    own = [each for each in tensors if each.startswith("model.layers.1.mlp.experts") and "shape" not in each]
    own = [each for each in own if name == "gpt-oss" or ".experts.2." in each]
    assert len(own) == 6
    for changed in own:
        other = {key: one.clone() for key, one in tensors.items()}
        mine = other[changed][2] if name == "gpt-oss" else other[changed]
        mine.view(torch.uint8).view(-1)[-1] ^= 1
        save_file(other, file, {"format": "pt"})
        assert ExpertDigests(quantised, layout).digest_of(1, 2) != before


EXPERT = "model.layers.1.mlp.experts.2.up_proj"
DAMAGE: dict[str, tuple[str, str, Any, str]] = {
    "a scale that is NaN": (
        "fp8 blocks", f"{EXPERT}.weight_scale_inv", lambda one: one.fill_(torch.nan), "got nan in a scale",
    ),
    "NaN among the codes": (
        "fp8 blocks", f"{EXPERT}.weight",
        lambda one: one.view(torch.uint8).fill_(0x7F).view(torch.float8_e4m3fn), "got nan in the matrix",
    ),
    "few scales": (
        "fp8 blocks", f"{EXPERT}.weight_scale_inv", lambda one: one[:2],
        "weight_scale_inv: got F32 [2, 2]; allowed: F32, BF16, F16 [3, 2]",
    ),
    "scales of another type": (
        "packed int4", f"{EXPERT}.weight_scale", lambda one: one.to(torch.float64),
        "weight_scale: got F64 [96, 5]; allowed: F32, BF16, F16 [96, 5]",
    ),
    "few codes": (
        "packed int4", f"{EXPERT}.weight_packed", lambda one: one[:, :-1],
        "weight_packed: got I32 [96, 19]; allowed: I32 [96, 20]",
    ),
    "another shape": (
        "packed int4", f"{EXPERT}.weight_shape", lambda one: one.flip(0), "weight_shape: got [160, 96]",
    ),
    "NaN among scales of 16": (
        "nvfp4", f"{EXPERT}.weight_scale",
        lambda one: one.view(torch.uint8).fill_(0x7F).view(torch.float8_e4m3fn), "got nan in a scale",
    ),
    "a scale of the matrix that is 0": (
        "nvfp4", f"{EXPERT}.weight_global_scale", lambda one: one.fill_(0),
        "weight_global_scale: got 0.0; allowed: a positive number",
    ),
    "a scale of the matrix that is negative": (
        "nvfp4, modelopt", f"{EXPERT}.weight_scale_2", lambda one: -one.abs(), "weight_scale_2: got -",
    ),
    "an infinite scale of the matrix": (
        "nvfp4, modelopt", f"{EXPERT}.weight_scale_2", lambda one: one.fill_(torch.inf), "got inf in a scale",
    ),
    "few scales of 16": (
        "nvfp4, modelopt", f"{EXPERT}.weight_scale", lambda one: one[:, :-1],
        "weight_scale: got F8_E4M3 [96, 9]; allowed: F8_E4M3 [96, 10]",
    ),
    "no scales": ("awq", f"{EXPERT}.scales", None, "scales is missing"),
    "an infinite scale": ("gptq", f"{EXPERT}.scales", lambda one: one.fill_(torch.inf), "got inf in a scale"),
    "an exponent that is NaN": (
        "mxfp4", "model.layers.1.mlp.experts.gate_up_proj_scales", lambda one: one.fill_(255),
        "got nan in a scale",
    ),
    "few experts": (
        "mxfp4", "model.layers.1.mlp.experts.down_proj_blocks", lambda one: one[:-1],
        "down_proj_blocks: got U8 [11, 96, 2, 16]; allowed: U8 [experts, 96, 2, 16]",
    ),
    "a group that is none": (
        "gptq v2, act order", f"{EXPERT}.g_idx", lambda one: one.fill_(77), "g_idx: got 77; allowed: 0 to 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_matrices_are_one_line(sources: dict[str, Path], tmp_path: Path, what: str) -> None:
    form, name, change, says = DAMAGE[what]
    quantised, _ = made(sources, "gpt-oss" if form == "mxfp4" else "qwen3", form, tmp_path)
    file = quantised / "model.safetensors"
    tensors = load_file(file)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name].clone()).contiguous()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError) as refused:
        registry.load(quantised, kernels)
    assert says in str(refused.value) and "\n" not in str(refused.value)
    if "missing" not in says and "allowed: I32" not in says:
        layout = registry.expert_layout(tmp_path / "quantised", kernels) if "got n" in says else None
        if layout is not None:
            with pytest.raises(CheckpointError, match="got nan"):
                Store(quantised, layout).load({1: [2]})


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a method that is unknown": ("awq", {"quant_method": "bitsandbytes"}, "'bitsandbytes'; allowed: auto-r"),
    "a block of 64": ("fp8 blocks", {"weight_block_size": [64, 64]}, "weight_block_size: got [64, 64]"),
    "an unknown key": ("fp8 blocks", {"twice": True}, "quantization_config.twice: got True"),
    "GPTQ of 3 bits": ("gptq", {"bits": 3}, "quantization_config.bits: got 3; allowed: 4, 8"),
    "groups of 48": ("gptq", {"group_size": 48}, "got groups of 48 in rows of 160"),
    "AWQ for GEMV": ("awq", {"version": "gemv"}, "quantization_config.version: got 'gemv'"),
    "sparsity": ("packed int4", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
    "no groups": ("packed int4", {"config_groups": None}, "config_groups"),
    "another format": ("packed int4", {"format": "marlin-24"}, "got 'marlin-24'"),
}  # fmt: skip


@pytest.mark.parametrize("what", CONFIGS)
def test_what_a_config_asks_for_in_vain_is_one_line(
    sources: dict[str, Path], tmp_path: Path, what: str
) -> None:
    form, changes, says = CONFIGS[what]
    quantised, _ = made(sources, "qwen3", form, tmp_path)
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] |= changes
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        registry.load(quantised, kernels)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def golden() -> list[str]:
    with safe_open(golden_formats.FILE, "pt") as file:
        return sorted(file.metadata())


@pytest.mark.parametrize("case", golden())
def test_what_compressed_tensors_writes_is_read_as_it_reads_it(case: str, tmp_path: Path) -> None:
    """The file was written by the library, which also dequantised each matrix."""
    tensors = load_file(golden_formats.FILE)
    with safe_open(golden_formats.FILE, "pt") as file:
        config = json.loads(file.metadata()[case])
    own = {name.replace(case, "some"): one for name, one in tensors.items() if name.startswith(f"{case}.")}
    save_file(own, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = Checkpoint(tmp_path).tensor(
        "some.weight", golden_formats.ROWS, golden_formats.COLUMNS, dtype=torch.float32
    )
    assert torch.equal(found, tensors[f"{case}.{golden_formats.PLAIN}"])
