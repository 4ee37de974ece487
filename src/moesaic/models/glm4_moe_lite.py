"""GLM-4.7-Flash: the latent attention and the gate of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from moesaic.models import rope
from moesaic.models.config import Fields
from moesaic.models.gates import read_corrected
from moesaic.models.latent import read_sizes
from moesaic.models.shared_experts import UNUSED_TENSORS, Config, blocks, expert_names, layers_by_type, read

__all__ = ["UNUSED_TENSORS", "blocks", "expert_names", "parse"]
# What transformers takes for a key that config.json leaves out.
DEFAULTS = {
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
}


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(DEFAULTS | raw)
    fields.require_value("model_type", "glm4_moe_lite")
    fields.require_value("moe_layer_freq", 1)
    fields.require_value("num_key_value_heads", fields.integer("num_attention_heads"), None)
    fields.require_value("partial_rotary_factor", 1.0, 1, None, reason="this model rotates whole heads")
    angles = rope.read(fields, fields.integer("max_position_embeddings"), 10000.0)
    attention = read_sizes(fields, angles, is_interleaved=fields.flag("rope_interleave", True))
    gating = read_corrected(fields, fields.integer("n_routed_experts"))
    return read(fields, "glm4_moe_lite", attention, angles, gating, layers_by_type(fields))
