"""DeepSeek-V2 and V2-Lite: latent attention, shared experts, device-limited routing.

DeepSeek-AI, DeepSeek-V2, 2024.
"""

from __future__ import annotations

from typing import Any

from moesaic.kernels.gating import Gating
from moesaic.models import rope
from moesaic.models.config import Fields
from moesaic.models.gates import read_groups
from moesaic.models.gguf.model import METHOD
from moesaic.models.latent import read_sizes
from moesaic.models.shared_experts import (
    UNUSED_TENSORS,
    Config,
    Names,
    blocks,
    expert_names,
    layers_after_dense,
    read,
)

__all__ = ["UNUSED_TENSORS", "blocks", "expert_names", "parse"]
# What transformers takes for a key that config.json leaves out.
DEFAULTS = {
    "first_k_dense_replace": 0,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(DEFAULTS | raw)
    fields.require_value("model_type", "deepseek_v2")
    fields.require_value("scoring_func", "softmax")
    fields.require_value("mlp_bias", False)
    angles = rope.read(fields, fields.integer("max_position_embeddings"), 10000.0)
    step = fields.integer("moe_layer_freq", 1)
    sparse = tuple(layer for layer in layers_after_dense(fields) if layer % step == 0)
    attention = read_sizes(fields, angles)
    return read(
        fields, "deepseek_v2", attention, angles, _gating(fields, is_gguf(raw)), sparse, Names(corrections=())
    )


def is_gguf(raw: dict[str, Any]) -> bool:
    """Whether a config is that of a GGUF file."""
    quantization = raw.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == METHOD


def _gating(fields: Fields, is_from_gguf: bool) -> Gating:
    experts = fields.integer("n_routed_experts")
    fields.require_value("topk_method", "greedy", "group_limited_greedy")
    if fields.raw("topk_method", "greedy") == "greedy":
        fields.ignore("n_group", "topk_group")
        groups, groups_kept = 1, 1
    else:
        groups, groups_kept = read_groups(fields, experts)
    top_k = fields.integer("num_experts_per_tok", maximum=experts * groups_kept // groups)
    scale = fields.number("routed_scaling_factor", 1.0)
    # In GGUF files the key means what llama.cpp does.
    if not is_from_gguf or scale != 1.0 or top_k == 1:
        reason = "implementations of deepseek_v2 disagree on it: transformers leaves it out"
        fields.require_value("norm_topk_prob", False, None, reason=reason)
    return Gating(
        top_k=top_k,
        normalise=fields.raw("norm_topk_prob", None) is not None and fields.flag("norm_topk_prob"),
        scale=scale,
        groups=groups,
        groups_kept=groups_kept,
    )
