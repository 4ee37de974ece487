"""Published configs as tiny checkpoints: fewer layers, smaller widths, every other key as it is."""

from __future__ import annotations

import json
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
    "n_routed_experts": 16,
}  # fmt: skip
"""Keys that count or measure parts of a model -> their value here. Those that are zero or null stay so."""
EACH_LAYER = ("layer_types", "attn_type_list", "mlp_layer_types")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def shrink(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns a config of a tiny model with the keys of `raw`, a parsed config.json."""
    if TEXT in raw:
        return {**raw, TEXT: shrink(raw[TEXT])}
    small = {key: SIZES.get(key, value) if value else value for key, value in raw.items()}
    heads, key_heads = raw["num_attention_heads"], raw.get("num_key_value_heads")
    small["num_attention_heads"] = 4
    if key_heads is not None:
        small["num_key_value_heads"] = 4 if key_heads == heads else 2
    if "head_dim" in raw:
        small["head_dim"] = 8 if "kv_lora_rank" in raw else 16
    for key in EACH_LAYER:
        if isinstance(raw.get(key), list):
            small[key] = raw[key][:LAYERS]
    if raw.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    small.pop("quantization_config", None)
    return small


FORMATS = {
    "fp8": (quantizers.fp8_blocks(128), False),
    "compressed-tensors": (quantizers.packed(4, 32, True), False),
    "mxfp4": (quantizers.mxfp4, True),
}
"""quant_method of published configs -> how its matrices are written, and whether they are columns."""


def find_quantization(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the quantization_config of a published config; None if it has none."""
    found = raw.get("quantization_config") or raw.get(TEXT, {}).get("quantization_config")
    return None if found is None else dict(found)


def write_quantised(raw: dict[str, Any], path: Path) -> tuple[Any, Path]:
    """Writes a tiny quantised checkpoint of a published config, with its quantization_config as it is.

    Returns transformers' model over the dequantised weights, and the directory.
    """
    model, source = write(raw, path / "source")
    tiny_models.edit(source, torch_dtype="bfloat16")
    settings = find_quantization(raw)
    assert settings is not None
    matrices, is_columns = FORMATS[settings["quant_method"]]
    form = quantizers.Format(matrices, settings, is_columns)
    quantised, plain = quantizers.quantize(source, path, form)
    if "quantization_config" in raw.get(TEXT, {}):
        config = json.loads((quantised / "config.json").read_text())
        config[TEXT]["quantization_config"] = config.pop("quantization_config")
        (quantised / "config.json").write_text(json.dumps(config))
    (plain / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    return type(model).from_pretrained(plain, dtype=torch.float32), quantised


def write(raw: dict[str, Any], path: Path) -> tuple[Any, Path]:
    """Writes a tiny checkpoint of a published config. Returns transformers' model over it, and its directory.

    Its config.json has the keys of the published one, and no quantization.
    """
    small = shrink(raw)
    text = read_text_config(small)
    kind = {"kimi_k2": "deepseek_v3"}.get(text["model_type"], text["model_type"])
    known = {
        key: value for key, value in text.items() if key not in (*IDS, "auto_map", "quantization_config")
    }
    config_class = tiny_models.KINDS[kind][0]
    model = tiny_models.build(kind, config_class.from_dict(known | {"model_type": kind}).to_dict())
    tiny_models.save(model, path, torch.float32)
    outer = {key: value for key, value in small.items() if key != "quantization_config"}
    if small["model_type"] in WRAPPERS:
        outer[TEXT] = {key: value for key, value in small[TEXT].items() if key != "quantization_config"}
    (path / "config.json").write_text(json.dumps(outer))
    return model, path
