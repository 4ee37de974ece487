"""Published configs as tiny checkpoints: fewer layers, smaller widths, every other key as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moesaic.core.text_config import TEXT, WRAPPERS, read_text_config
from tests.support import quantizers, tiny_models

LAYERS, VOCABULARY = 4, 131
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "rotary_dim": 8, "num_experts": 16, "num_local_experts": 16,
    "n_routed_experts": 16, "d_model": 64, "n_layers": LAYERS, "ffn_hidden_size": 32, "moe_num_experts": 16,
    "expert_hidden_dim": 32, "first_last_k_dense_replace": 1,
}  # fmt: skip
"""Keys that count or measure parts of a model -> their value here. Those that are zero or null stay so."""
GROUP = 128
WIDE = SIZES | {
    "hidden_size": GROUP, "intermediate_size": GROUP, "moe_intermediate_size": GROUP,
    "shared_expert_intermediate_size": GROUP, "head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
"""The same where 128 numbers of a row share a scale: every row is one group at least."""
EACH_LAYER = ("layer_types", "attn_type_list", "mlp_layer_types", "is_moe_layer")
NESTED = ("attn_config", "ffn_config")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def shrink(raw: dict[str, Any], sizes: Mapping[str, int] = SIZES) -> dict[str, Any]:
    """Returns a config of a tiny model with the keys of `raw`, a parsed config.json."""
    if TEXT in raw:
        return {**raw, TEXT: shrink(raw[TEXT], sizes)}
    small = {key: sizes.get(key, value) if value else value for key, value in raw.items()}
    for key in NESTED:
        if key in raw:
            part = {name: sizes.get(name, value) for name, value in raw[key].items()}
            small[key] = part | ({"kv_n_heads": 2} if "kv_n_heads" in part else {})
    heads_key = "n_heads" if "n_heads" in raw else "num_attention_heads"
    heads, key_heads = raw[heads_key], raw.get("num_key_value_heads")
    small[heads_key] = 4
    if key_heads is not None:
        small["num_key_value_heads"] = 4 if key_heads == heads else 2
    if "head_dim" in raw:
        small["head_dim"] = 8 if "kv_lora_rank" in raw else sizes.get("head_dim", 16)
    for key in EACH_LAYER:
        if isinstance(raw.get(key), list):
            small[key] = raw[key][:LAYERS]
    if raw.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    small.pop("quantization_config", None)
    return small


def choose_writer(settings: dict[str, Any]) -> quantizers.Quantizer:
    """Returns what writes the matrices that a quantization_config describes."""
    method, group = settings["quant_method"], settings.get("group_size", 0)
    if method == "fp8" and "weight_block_size" not in settings:
        return quantizers.with_static_scales(quantizers.fp8_matrix)
    if method == "fp8":
        return quantizers.fp8_powers if "scale_fmt" in settings else quantizers.fp8_blocks(128)
    if method in ("gptq", "auto-round"):
        return quantizers.gptq(settings["bits"], group, 1, settings.get("desc_act", False))
    if method == "modelopt":
        return quantizers.FORMATS["nvfp4, modelopt"].write
    if settings.get("format") == "nvfp4-pack-quantized":
        return quantizers.FORMATS["nvfp4"].write
    if settings.get("format") == "float-quantized":
        return quantizers.fp8_rows
    writers = {"awq": quantizers.awq(group), "mxfp4": quantizers.mxfp4}
    return writers.get(method) or quantizers.packed(4, 32, True)


def find_quantization(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the quantization_config of a published config; None if it has none."""
    found = raw.get("quantization_config") or raw.get(TEXT, {}).get("quantization_config")
    return None if found is None else dict(found)


def write_quantised(raw: dict[str, Any], path: Path) -> tuple[Any, Path]:
    """Writes a tiny quantised checkpoint of a published config, with its quantization_config as it is.

    Returns transformers' model over the dequantised weights, and the directory.
    """
    settings = find_quantization(raw)
    assert settings is not None
    is_wide = settings.get("group_size") == GROUP
    model, source = write(raw, path / "source", WIDE if is_wide else SIZES)
    tiny_models.edit(source, torch_dtype="bfloat16")
    form = quantizers.Format(choose_writer(settings), settings, settings["quant_method"] == "mxfp4")
    quantised, plain = quantizers.quantize(source, path, form)
    if "quantization_config" in raw.get(TEXT, {}):
        config = json.loads((quantised / "config.json").read_text())
        config[TEXT]["quantization_config"] = config.pop("quantization_config")
        (quantised / "config.json").write_text(json.dumps(config))
    (plain / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    return type(model).from_pretrained(plain, dtype=torch.float32), quantised


def write(raw: dict[str, Any], path: Path, sizes: Mapping[str, int] = SIZES) -> tuple[Any, Path]:
    """Writes a tiny checkpoint of a published config. Returns transformers' model over it, and its directory.

    Its config.json has the keys of the published one, and no quantization.
    """
    small = shrink(raw, sizes)
    text = read_text_config(small)
    same = {"kimi_k2": "deepseek_v3", "qwen3_vl_moe_text": "qwen3_moe"}
    kind = same.get(text["model_type"], text["model_type"])
    known = {
        key: value for key, value in text.items() if key not in (*IDS, "auto_map", "quantization_config")
    }
    if kind == "dbrx":  # transformers 5 does not read the angle in attn_config, as transformers 4 did
        theta = text["attn_config"]["rope_theta"]
        known["rope_parameters"] = {"rope_type": "default", "rope_theta": float(theta)}
    config_class = tiny_models.KINDS[kind][0]
    model = tiny_models.build(kind, config_class.from_dict(known | {"model_type": kind}).to_dict())
    tiny_models.save(model, path, torch.float32)
    outer = {key: value for key, value in small.items() if key != "quantization_config"}
    if small["model_type"] in WRAPPERS:
        outer[TEXT] = {key: value for key, value in small[TEXT].items() if key != "quantization_config"}
    (path / "config.json").write_text(json.dumps(outer))
    return model, path
