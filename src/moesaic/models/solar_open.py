"""Solar Open: grouped-query attention, routed and shared experts in every layer, the gate of DeepSeek-V3.

Upstage, Solar Open, 2026.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.models import rope
from moesaic.models.config import Fields
from moesaic.models.gates import read_corrected
from moesaic.models.grouped_query import GroupedQuery
from moesaic.models.loader import read_heads
from moesaic.models.shared_experts import UNUSED_TENSORS, Config, blocks, expert_names, num_layers, read

__all__ = ["UNUSED_TENSORS", "blocks", "expert_names", "parse"]
# What transformers takes for a key that config.json leaves out.
DEFAULTS = {
    "head_dim": 128,
    "intermediate_size": 10240,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1280,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
"""No layer is dense, so intermediate_size has no effect."""


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(DEFAULTS | raw)
    fields.require_value("model_type", "solar_open")
    fields.require_value("first_k_dense_replace", 0)
    fields.require_value("use_qk_norm", False)
    fields.require_value("partial_rotary_factor", 1.0, 1, None, reason="this model rotates whole heads")
    angles = rope.read(fields, fields.integer("max_position_embeddings"), 1e6)
    heads = replace(read_heads(fields, fields.number("rms_norm_eps")), out_bias=False)
    attention = GroupedQuery(heads, heads.width)
    gating = read_corrected(fields, fields.integer("n_routed_experts"))
    return read(fields, "solar_open", attention, angles, gating, tuple(range(num_layers(fields))))
