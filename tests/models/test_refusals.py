"""A checkpoint that is not fully understood is refused in one line that names the culprit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import model_configs, tiny_models

from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.kernels.table import pick
from moesaic.models import registry

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
NO_ROPE = {"rope_parameters": None}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each model_type."""
    makers: dict[str, Any] = {
        "dbrx": model_configs.dbrx,
        "deepseek_v3": model_configs.deepseek3,
        "glm4_moe": model_configs.glm4,
        "glm4_moe_lite": model_configs.glm4_lite,
        "dots1": model_configs.dots,
        "ernie4_5_moe": model_configs.ernie,
        "granitemoe": model_configs.granite,
        "granitemoeshared": model_configs.granite,
        "exaone_moe": model_configs.exaone,
        "hy_v3": model_configs.hy3,
        "mellum": model_configs.mellum,
        "minimax_m2": model_configs.minimax,
        "mixtral": model_configs.mixtral,
        "qwen3_moe": model_configs.qwen3,
        "deepseek_v2": model_configs.deepseek,
        "gpt_oss": model_configs.gpt_oss,
        "lfm2_moe": model_configs.lfm2,
        "olmoe": model_configs.olmoe,
        "qwen2_moe": model_configs.qwen2,
        "qwen3_next": model_configs.qwen3_next,
        "qwen3_5_moe_text": model_configs.qwen3_next,
        "solar_open": model_configs.solar,
    }
    found = {
        kind: tiny_models.save(tiny_models.build(kind, make()), tmp_path_factory.mktemp(kind))
        for kind, make in makers.items()
    }
    kimi = shutil.copytree(found["deepseek_v3"], tmp_path_factory.mktemp("kimi") / "k2")
    found["kimi_k2"] = tiny_models.edit(kimi, model_type="kimi_k2")
    text = shutil.copytree(found["qwen3_moe"], tmp_path_factory.mktemp("qwen3") / "vl")
    return found | {"qwen3_vl_moe_text": tiny_models.edit(text, model_type="qwen3_vl_moe_text")}


@pytest.fixture
def copy(saved: dict[str, Path], tmp_path: Path) -> Any:
    """A fresh copy of the checkpoint of a model_type."""

    def make(kind: str) -> Path:
        for file in ("config.json", "model.safetensors"):
            (tmp_path / file).write_bytes((saved[kind] / file).read_bytes())
        return tmp_path

    return make


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError, match=".*".join(map(re.escape, words))) as caught:
        registry.load(path, pick("cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", sorted(registry.MODELS))
def test_an_unknown_key_is_refused_with_its_value(kind: str, copy: Any) -> None:
    refused(tiny_models.edit(copy(kind), attention_sinks=4), "attention_sinks", "4")


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("mixtral", {"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "'silu'")),
        ("mixtral", {"hidden_size": "48"}, ("hidden_size", "'48'", "integer")),
        ("mixtral", {"num_experts_per_tok": 6}, ("num_experts_per_tok", "6", "at most 5")),
        ("mixtral", {"num_key_value_heads": 4}, ("num_key_value_heads", "4", "divisor of 6")),
        ("mixtral", {"quantization_config": {"quant_method": "hqq"}}, ("quantization_config", "hqq")),
        ("mixtral", {"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
        ("mixtral", {"quantization_config": "fp8"}, ("quantization_config", "fp8")),
        ("mixtral", {"head_dim": 7}, ("head_dim", "7", "even")),
        ("mixtral", {"rope_parameters": {"rope_theta": 0}}, ("rope_parameters.rope_theta", "0", "above 1")),
        ("deepseek_v2", {"qk_rope_head_dim": 3}, ("qk_rope_head_dim", "3", "even")),
        ("mixtral", {"sliding_window": 0}, ("sliding_window", "0")),
        ("qwen3_moe", {"use_sliding_window": "yes"}, ("use_sliding_window", "'yes'", "true, false")),
        ("qwen3_moe", {"mlp_only_layers": [1.5]}, ("mlp_only_layers", "list of integers")),
        ("qwen3_moe", {"rope_parameters": [1]}, ("rope_parameters", "[1]", "object")),
        (
            "qwen3_moe",
            {"rope_parameters": {"rope_type": "ntk"}},
            ("rope_type", "'ntk'", "yarn, llama3, longrope"),
        ),
        (
            "qwen3_moe",
            {"rope_parameters": {"rope_type": "longrope"}},
            ("original_max_position_embeddings is missing, for longrope",),
        ),
        (
            "qwen3_moe",
            {"rope_parameters": model_configs.LONGROPE | {"long_factor": [1.0, 0.0]}},
            ("rope_parameters.long_factor", "[1.0, 0.0]", "numbers above 0"),
        ),
        (
            "qwen3_moe",
            {"rope_parameters": model_configs.LONGROPE | {"short_factor": [1.0] * 7}},
            ("short_factor", "got 7 numbers", "8, one for each pair"),
        ),
        (
            "qwen3_moe",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta": 1}},
            ("rope_parameters.beta", "1"),
        ),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "linear"}}, ("rope_parameters.factor is missing",)),
        (
            "qwen3_moe",
            {"rope_parameters": {"rope_type": "linear", "factor": 0.0}},
            ("rope_parameters.factor", "0.0", "above 0"),
        ),
        (
            "qwen3_moe",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            ("partial_rotary_factor", "0.5"),
        ),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, ("scoring_func", "'sigmoid'")),
        ("deepseek_v2", {"norm_topk_prob": True, "num_experts_per_tok": 1}, ("norm_topk_prob", "True")),
        (
            "deepseek_v2",
            {"norm_topk_prob": True, "routed_scaling_factor": 2.5},
            ("norm_topk_prob", "disagree"),
        ),
        ("deepseek_v2", {"norm_topk_prob": 1}, ("norm_topk_prob", "1", "False")),
        ("deepseek_v2", {"norm_topk_prob": True}, ("norm_topk_prob", "transformers leaves it out")),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            ("max_window_layers: got 2", "every layer"),
        ),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, ("topk_method", "'noaux_tc'")),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 5, "topk_group": 2},
            ("n_group, topk_group", "5, 2", "divisor of 12"),
        ),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1},
            ("num_experts_per_tok", "6", "at most 3"),
        ),
        ("deepseek_v2", {"kv_lora_rank": None}, ("kv_lora_rank is missing",)),
        ("deepseek_v3", {"scoring_func": "softmax"}, ("scoring_func", "'softmax'", "'sigmoid'")),
        ("deepseek_v3", {"topk_method": "greedy"}, ("topk_method", "'greedy'", "'noaux_tc'")),
        ("deepseek_v3", {"norm_topk_prob": 1}, ("norm_topk_prob", "1", "true, false")),
        ("deepseek_v3", {"moe_layer_freq": 2}, ("moe_layer_freq", "2", "1")),
        ("deepseek_v3", {"num_key_value_heads": 2}, ("num_key_value_heads", "2", "4")),
        ("deepseek_v3", {"n_group": 12}, ("n_group, topk_group", "12, 2", "at least 2 in a group")),
        ("deepseek_v3", {"topk_group": 5}, ("n_group, topk_group", "4, 5", "at most as many groups")),
        ("deepseek_v3", {"n_group": 6}, ("num_experts_per_tok", "6", "at most 4")),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, ("num_nextn_predict_layers", "-1")),
        ("deepseek_v3", {"rope_interleave": "no"}, ("rope_interleave", "'no'", "true, false")),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ("deepseek_v3", {"index_topk": 2048}, ("index_topk", "2048")),
        ("deepseek_v3", {"first_k_dense_replace": 0}, ("layers.0.mlp.gate.weight", "missing")),
        ("deepseek_v3", {"quantization_config": FOUR_BITS}, ("quantization_config", "'bitsandbytes'")),
        ("kimi_k2", {"quantization_config": FOUR_BITS}, ("quantization_config", "'bitsandbytes'")),
        ("kimi_k2", {"topk_method": "greedy"}, ("topk_method", "'greedy'")),
        ("glm4_moe", {"partial_rotary_factor": 2.0, **NO_ROPE}, ("partial_rotary_factor", "2", "up to 1")),
        ("glm4_moe", {"partial_rotary_factor": 0.2, **NO_ROPE}, ("partial_rotary_factor", "0.2", "even")),
        ("glm4_moe", {"partial_rotary_factor": "x", **NO_ROPE}, ("partial_rotary_factor", "'x'", "above 0")),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0}}, ("rope_parameters.partial",)),
        ("glm4_moe", {"use_qk_norm": True}, ("self_attn.q_norm.weight is missing",)),
        ("glm4_moe", {"scoring_func": "softmax"}, ("scoring_func", "'softmax'")),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5", "whole heads")),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, ("mlp_layer_types", "list of 3 of dense, sparse")),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["dense", "moe", 1]},
            ("mlp_layer_types", "list of 3 of dense, sparse"),
        ),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, ("first_k_dense_replace", "2", "mlp_layer_types")),
        ("dots1", {"scoring_func": "softmax"}, ("scoring_func", "'softmax'", "'sigmoid'")),
        ("dots1", {"moe_layer_freq": 2}, ("moe_layer_freq", "2", "1")),
        ("dots1", {"layer_types": [model_configs.FULL]}, ("layer_types", "list of 3 of full_attention")),
        (
            "dots1",
            {"sliding_window": 9, "layer_types": [model_configs.FULL, "chunked", model_configs.FULL]},
            ("layer_types", "list of 3 of full_attention, sliding_attention"),
        ),
        ("solar_open", {"first_k_dense_replace": 1}, ("first_k_dense_replace", "1", "0")),
        ("solar_open", {"use_qk_norm": True}, ("use_qk_norm", "True", "False")),
        ("solar_open", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5", "whole heads")),
        ("ernie4_5_moe", {"use_bias": True}, ("self_attn.q_proj.bias is missing",)),
        ("ernie4_5_moe", {"attention_bias": True}, ("attention_bias", "True", "False", "as use_bias says")),
        ("exaone_moe", {"first_last_k_dense_replace": 2}, ("first_last_k_dense_replace", "2", "1")),
        ("exaone_moe", {"is_moe_layer": [True] * 4}, ("is_moe_layer", "True", "False")),
        ("mellum", {"use_sliding_window": "yes"}, ("use_sliding_window", "'yes'", "as layer_types says")),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, ("moe_norm_min", "0.1", "at most 1e-09")),
        ("ernie4_5_moe", {"moe_use_aux_free": False}, ("moe_use_aux_free", "False", "True")),
        ("ernie4_5_moe", {"moe_k": 13}, ("moe_k", "13", "at most 12")),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, ("moe_layer_interval", "0", "at least 1")),
        ("ernie4_5_moe", {"moe_layer_start_index": 0}, ("layers.0.mlp.gate.weight is missing",)),
        ("ernie4_5_moe", {"moe_layer_end_index": -2}, ("moe_layer_end_index", "-2", "at least -1")),
        ("granitemoe", {"residual_multiplier": 0}, ("residual_multiplier", "0", "above 1e-06")),
        ("granitemoe", {"logits_scaling": "6"}, ("logits_scaling", "'6'", "above 1e-06")),
        ("granitemoe", {"attention_multiplier": -1}, ("attention_multiplier", "-1", "above 1e-06")),
        ("granitemoe", {"hidden_size": 47, "head_dim": 8}, ("hidden_size", "47", "even")),
        ("granitemoe", {"shared_intermediate_size": 64}, ("shared_intermediate_size", "64")),
        ("granitemoeshared", {"shared_intermediate_size": "7"}, ("shared_intermediate_size", "'7'")),
        ("granitemoeshared", {"shared_intermediate_size": 9}, ("shared_mlp.input_linear.weight is missing",)),
        ("granitemoe", {"num_local_experts": 13}, ("router.layer.weight", "[12, 48]", "[13, 48]")),
        ("hy_v3", {"mlp_bias": True}, ("mlp_bias", "True", "False")),
        ("hy_v3", {"moe_router_use_sigmoid": False}, ("moe_router_use_sigmoid", "False", "True")),
        ("hy_v3", {"route_norm": False}, ("route_norm", "False", "True")),
        ("hy_v3", {"expert_hidden_dim": 24}, ("expert_hidden_dim", "24", "20")),
        ("hy_v3", {"num_shared_experts": 0}, ("num_shared_experts", "0", "at least 1")),
        (
            "hy_v3",
            {"mlp_layer_types": ["dense", "moe", 1]},
            ("mlp_layer_types", "list of 3 of dense, sparse"),
        ),
        ("mellum", {"layer_types": ["chunked"] * 3}, ("layer_types", "full_attention, sliding_attention")),
        ("mellum", {"sliding_window": 0}, ("sliding_window", "0", "at least 1")),
        ("mellum", {"mlp_layer_types": ["dense"]}, ("mlp_layer_types", "list of 3 of dense, sparse")),
        ("mellum", {"rope_parameters": {"rope_type": "default"}}, ("rope_parameters.rope_type", "'default'")),
        (
            "mellum",
            {"rope_parameters": {model_configs.FULL: {"rope_type": "yarn", "beta": 1}}},
            ("rope_parameters.full_attention.beta", "1"),
        ),
        ("exaone_moe", {"attention_bias": True}, ("attention_bias", "True", "False")),
        (
            "exaone_moe",
            {"layer_types": None, "sliding_window_pattern": "LLLG"},
            ("sliding_window_pattern", "'LLLG'"),
        ),
        ("exaone_moe", {"sliding_window": 0}, ("sliding_window", "0", "at least 1")),
        ("exaone_moe", {"scoring_func": "softmax"}, ("scoring_func", "'softmax'", "'sigmoid'")),
        ("minimax_m2", {"attention_bias": True}, ("attention_bias", "True", "False")),
        ("minimax_m2", {"qk_norm_type": "per_head"}, ("qk_norm_type", "'per_head'", "'per_layer'")),
        ("minimax_m2", {"scoring_func": "softmax"}, ("scoring_func", "'softmax'", "'sigmoid'")),
        ("minimax_m2", {"use_routing_bias": False}, ("use_routing_bias", "False", "True")),
        ("minimax_m2", {"layernorm_mlp_beta": 3.5}, ("layernorm_mlp_beta", "3.5", "not scaled")),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, ("attn_type_list", "[1, 0, 1]", "each of 3 layers")),
        ("minimax_m2", {"rotary_dim": 18, **NO_ROPE}, ("partial_rotary_factor", "1.125", "up to 1")),
        ("minimax_m2", {"shared_intermediate_size": 64}, ("shared_intermediate_size", "64", "0")),
        ("minimax_m2", {"num_experts_per_tok": 13}, ("num_experts_per_tok", "13", "at most 12")),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, ("gate_up_proj", "[12, 48, 40]")),
        ("gpt_oss", {"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "'silu'")),
        ("gpt_oss", {"swiglu_limit": 0}, ("swiglu_limit", "0", "above 0")),
        ("gpt_oss", {"swiglu_alpha": "1"}, ("swiglu_alpha", "'1'", "above 0")),
        ("gpt_oss", {"layer_types": [model_configs.FULL]}, ("layer_types", "list of 3", "full_attention")),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, ("layer_types", "'chunked_attention'")),
        ("gpt_oss", {"sliding_window": 0}, ("sliding_window", "0", "at least 1")),
        ("gpt_oss", {"experts_per_token": 2}, ("experts_per_token", "2", "4")),
        ("gpt_oss", {"num_experts": 8}, ("num_experts", "8", "12")),
        ("gpt_oss", {"num_experts_per_tok": 13}, ("num_experts_per_tok", "13", "at most 12")),
        ("gpt_oss", {"attention_bias": False}, ("self_attn.k_proj.bias is not expected",)),
        ("olmoe", {"clip_qkv": 0}, ("clip_qkv", "0", "above 0")),
        ("olmoe", {"clip_qkv": "8"}, ("clip_qkv", "'8'", "above 0")),
        ("olmoe", {"head_dim": 16}, ("head_dim", "16", "8, None", "hidden_size / num_attention_heads")),
        ("olmoe", {"sliding_window": 4096}, ("sliding_window", "4096")),
        ("olmoe", {"num_experts_per_tok": 17}, ("num_experts_per_tok", "17", "at most 16")),
        ("olmoe", {"num_local_experts": 8}, ("num_local_experts", "8", "16")),
        ("qwen2_moe", {"attention_bias": True}, ("attention_bias", "True", "qkv_bias")),
        ("qwen2_moe", {"qkv_bias": 1}, ("qkv_bias", "1", "true, false")),
        ("qwen2_moe", {"qkv_bias": False}, ("self_attn.k_proj.bias is not expected",)),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, ("shared_expert_intermediate_size", "0")),
        ("qwen2_moe", {"use_qk_norm": True}, ("use_qk_norm", "True")),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": None},
            ("layer_types", "None", "list of 3"),
        ),
        ("qwen2_moe", {"layer_types": [model_configs.FULL] * 2}, ("layer_types", "list of 3")),
        (
            "qwen2_moe",
            {"layer_types": [model_configs.FULL, model_configs.SLIDING, model_configs.FULL]},
            ("layer_types", "of full_attention, with use_sliding_window false"),
        ),
        (
            "qwen2_moe",
            {
                "use_sliding_window": True,
                "sliding_window": 0,
                "layer_types": [model_configs.FULL, model_configs.SLIDING, model_configs.FULL],
            },
            ("sliding_window", "0", "at least 1"),
        ),
    ],
)
def test_a_value_that_is_not_supported_is_named(
    kind: str, changes: dict[str, Any], words: tuple[str, ...], copy: Any
) -> None:
    refused(tiny_models.edit(copy(kind), **changes), *words)


def test_an_unknown_model_type_is_refused_with_the_list(copy: Any) -> None:
    refused(
        tiny_models.edit(copy("mixtral"), model_type="llama"),
        "'llama'",
        ", ".join(sorted(registry.MODELS)),
    )


def test_both_spellings_of_rope_mean_the_same(copy: Any) -> None:
    path = copy("qwen3_moe")
    yarn = {key: value for key, value in model_configs.YARN.items() if key != "rope_theta"}
    newer = registry._parse(tiny_models.edit(path, rope_parameters={**yarn, "rope_theta": 5000.0}))[1]
    yarn["type"] = yarn.pop("rope_type")
    older = registry._parse(
        tiny_models.edit(path, rope_parameters=None, rope_theta=5000.0, rope_scaling=yarn)
    )[1]
    assert newer == older
    assert newer.rope.theta == 5000.0


def test_longrope_may_have_its_original_context_outside(copy: Any) -> None:
    inner = {key: value for key, value in model_configs.LONGROPE.items() if not key.startswith("original")}
    one = registry._parse(tiny_models.edit(copy("qwen3_moe"), rope_parameters=model_configs.LONGROPE))[1]
    changes = {"rope_parameters": inner, "original_max_position_embeddings": 24}
    assert registry._parse(tiny_models.edit(copy("qwen3_moe"), **changes))[1] == one
    assert one.rope.reach == 192


def test_the_keys_of_the_makers_own_configs_are_understood(copy: Any) -> None:
    changes = {
        "max_window_layers": 48,
        "num_local_experts": None,
        "num_experts": 12,
        "torch_dtype": "bfloat16",
    }
    registry.read_spec(tiny_models.edit(copy("qwen3_moe"), **changes, rope_theta=1e6))
    changes = {
        "aux_loss_alpha": 0.001, "auto_map": {"AutoConfig": "x.Y"}, "ep_size": 1, "moe_layer_freq": 1,
        "scoring_func": "softmax", "seq_aux": True, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    registry.read_spec(tiny_models.edit(copy("deepseek_v2"), **changes))


def rewrite(path: Path, change: Any) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def test_a_missing_tensor_is_named(copy: Any) -> None:
    refused(rewrite(copy("qwen3_moe"), lambda tensors: tensors.pop(EXPERT)), EXPERT, "missing")


def test_a_missing_tensor_is_named_when_experts_are_not_read(copy: Any) -> None:
    path = rewrite(copy("qwen3_moe"), lambda tensors: tensors.pop(EXPERT))
    with pytest.raises(CheckpointError, match=re.escape(EXPERT)):
        registry.load(path, pick("cpu"), with_experts=False)


def test_an_unexpected_tensor_is_named(copy: Any) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    refused(
        rewrite(copy("mixtral"), lambda tensors: tensors.update({bias: torch.zeros(48)})),
        bias,
        "not expected",
    )


def test_a_tensor_known_to_be_unused_is_no_error(copy: Any) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    registry.load(rewrite(copy("mixtral"), lambda tensors: tensors.update(extra)), pick("cpu"))


def test_tensors_of_ernie_that_predict_several_tokens_are_no_error(copy: Any) -> None:
    extra = {"model.mtp_block.0.input_layernorm.weight": torch.zeros(48)}
    registry.load(rewrite(copy("ernie4_5_moe"), lambda tensors: tensors.update(extra)), pick("cpu"))


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text"])
def test_tensors_of_qwen_that_predict_several_tokens_are_no_error(kind: str, copy: Any) -> None:
    extra = {"mtp.layers.0.input_layernorm.weight": torch.zeros(48), "mtp.fc.weight": torch.zeros(48, 96)}
    registry.load(rewrite(copy(kind), lambda tensors: tensors.update(extra)), pick("cpu"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_num_value_heads": 3}, ("linear_num_value_heads", "3", "a multiple of 2")),
        ({"linear_key_head_dim": 20}, ("linear_key_head_dim", "20", "a multiple of 8 up to 256")),
        ({"linear_conv_kernel_dim": 9}, ("linear_conv_kernel_dim", "9", "at most 8")),
        ({"layer_types": ["full_attention"] * 3}, ("layer_types", "list of 4")),
        ({"attn_output_gate": False}, ("attn_output_gate", "False", "True")),
        ({"partial_rotary_factor": 2.0}, ("partial_rotary_factor", "2")),
    ],
)
def test_sizes_of_linear_attention_that_do_not_fit(changes: Any, words: Any, copy: Any) -> None:
    refused(tiny_models.edit(copy("qwen3_next"), rope_parameters=None, **changes), *words)


def test_a_wrong_shape_is_named(copy: Any) -> None:
    path = rewrite(copy("qwen3_moe"), lambda tensors: tensors.update({EXPERT: torch.zeros(20, 47)}))
    refused(path, EXPERT, "[20, 47]", "[20, 48]")


def test_a_wrong_type_is_named(copy: Any) -> None:
    integers = torch.zeros(20, 48, dtype=torch.int8)
    refused(
        rewrite(copy("qwen3_moe"), lambda tensors: tensors.update({EXPERT: integers})), EXPERT, "I8", "BF16"
    )


def test_without_or_with_a_wrong_embedding_it_is_named(copy: Any) -> None:
    name = "model.embed_tokens.weight"
    refused(rewrite(copy("mixtral"), lambda tensors: tensors.pop(name)), name, "missing")
    half = torch.zeros(96, 48).to(torch.float8_e4m3fn)
    refused(rewrite(copy("mixtral"), lambda tensors: tensors.update({name: half})), name, "F8_E4M3", "BF16")


def test_pickled_weights_are_not_read(copy: Any) -> None:
    path = copy("mixtral")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, "pytorch_model.bin", "safetensors")


def test_a_directory_without_weights_is_refused(copy: Any) -> None:
    path = copy("mixtral")
    (path / "model.safetensors").unlink()
    refused(path, "neither model.safetensors nor")


@pytest.mark.parametrize("keep", [0, 5, 2000, -100])
def test_a_truncated_file_is_one_line(keep: int, copy: Any) -> None:
    path = copy("mixtral")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(path, "model.safetensors", "truncated or corrupt")


def test_a_shard_that_is_missing_or_incomplete_is_named(copy: Any) -> None:
    path = copy("mixtral")
    names = list(load_file(path / "model.safetensors"))
    index = {"weight_map": {**dict.fromkeys(names, "model.safetensors"), "extra": "model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(path, "extra", "missing")
    index["weight_map"]["extra"] = "other.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(path, "other.safetensors", "missing")


def test_experts_that_do_not_exist_are_refused(saved: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="layer 0 has no routed experts"):
        registry.load_experts(saved["deepseek_v2"], pick("cpu"), {0: [1]})
    with pytest.raises(CheckpointError, match="allowed: 0 to 11"):
        registry.load_experts(saved["deepseek_v2"], pick("cpu"), {1: [12]})


def test_an_unknown_dtype_or_device_is_refused(saved: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="dtype: got 'int4'"):
        registry.load(saved["mixtral"], pick("cpu"), dtype="int4")
    with pytest.raises(ConfigError, match="device: got 'tpu'"):
        pick("tpu")


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "hy_v3"])
def test_layers_that_predict_several_tokens_are_left_out_if_the_config_names_them(
    kind: str, copy: Any
) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        some = [name for name in tensors if name.startswith("model.layers.2.")]
        tensors |= {name.replace("layers.2.", "layers.3."): tensors[name].clone() for name in some}
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(48, 96)

    wanted = registry.load(copy(kind), pick("cpu")).num_parameters
    path = rewrite(copy(kind), add)
    assert registry.load(path, pick("cpu")).num_parameters == wanted
    refused(tiny_models.edit(path, num_nextn_predict_layers=0), "model.layers.3.", "not expected")
    more = rewrite(path, lambda tensors: tensors.update({"model.layers.4.enorm.weight": torch.zeros(48)}))
    refused(tiny_models.edit(more, num_nextn_predict_layers=1), "model.layers.4.enorm", "not expected")
    registry.load(tiny_models.edit(more, num_nextn_predict_layers=2), pick("cpu"))
