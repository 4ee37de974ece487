"""DeepSeek-V3, V3.1, R1, Moonlight, and Kimi K2: latent attention, shared experts, a gate of sigmoids.

DeepSeek-AI, DeepSeek-V3, 2024.
"""

from __future__ import annotations

from typing import Any

from moesaic.models import rope
from moesaic.models.config import Fields
from moesaic.models.gates import read_corrected
from moesaic.models.latent import read_sizes
from moesaic.models.shared_experts import (
    UNUSED_TENSORS,
    Config,
    blocks,
    expert_names,
    layers_after_dense,
    prediction_layer,
    read,
)

__all__ = ["UNUSED_TENSORS", "blocks", "expert_names", "parse", "prediction_layer"]
# What transformers takes for a key that config.json leaves out.
DEFAULTS = {
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "max_position_embeddings": 4096,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(DEFAULTS | raw)
    fields.require_value("model_type", "deepseek_v3", "kimi_k2")
    fields.require_value("moe_layer_freq", 1)
    fields.require_value("num_key_value_heads", fields.integer("num_attention_heads"), None)
    angles = rope.read(fields, fields.integer("max_position_embeddings"), 10000.0)
    attention = read_sizes(fields, angles, is_interleaved=fields.flag("rope_interleave", True))
    gating = read_corrected(fields, fields.integer("n_routed_experts"))
    return read(fields, "deepseek_v3", attention, angles, gating, layers_after_dense(fields))
