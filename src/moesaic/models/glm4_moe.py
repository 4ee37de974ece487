"""GLM-4.5, 4.6 and 4.7: grouped-query attention that rotates half of each head, the gate of DeepSeek-V3.

GLM-4.5 Team, GLM-4.5, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.models import rope
from moesaic.models.config import Fields
from moesaic.models.gates import read_corrected
from moesaic.models.grouped_query import GroupedQuery
from moesaic.models.loader import read_heads
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
    "first_k_dense_replace": 1,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(DEFAULTS | raw)
    fields.require_value("model_type", "glm4_moe")
    partial = fields.number_above("partial_rotary_factor", 0.0, 0.5)
    angles = rope.read(fields, fields.integer("max_position_embeddings"), 10000.0, partial)
    has_head_norms = fields.flag("use_qk_norm", False)
    heads = replace(read_heads(fields, fields.number("rms_norm_eps"), has_head_norms), out_bias=False)
    attention = GroupedQuery(heads, angles.count_rotated(heads.width))
    gating = read_corrected(fields, fields.integer("n_routed_experts"))
    return read(fields, "glm4_moe", attention, angles, gating, layers_after_dense(fields))
