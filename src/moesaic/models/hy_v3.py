"""Hy3: grouped-query attention with normalized heads, shared experts, a gate of sigmoids and a bias.

Tencent Hunyuan team, Hy3, 2026.
"""

from __future__ import annotations

from typing import Any

from moesaic.kernels.gating import Gating
from moesaic.models import rope
from moesaic.models.config import Fields
from moesaic.models.gates import ADDED
from moesaic.models.grouped_query import GroupedQuery
from moesaic.models.loader import read_heads
from moesaic.models.shared_experts import (
    UNUSED_TENSORS,
    Config,
    Keys,
    Names,
    blocks,
    expert_names,
    layers_by_type,
    read,
)

__all__ = ["UNUSED_TENSORS", "blocks", "expert_names", "parse"]
# What transformers takes for a key that config.json leaves out.
DEFAULTS = {
    "head_dim": 128,
    "intermediate_size": 13312,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "router_scaling_factor": 2.826,
}
KEYS = Keys(experts="num_experts", shared_experts="num_shared_experts")
NAMES = Names(
    gates=("mlp.router.gate", "mlp.gate"),
    corrections=("mlp.expert_bias", "mlp.e_score_correction_bias"),
    shared_experts=("mlp.shared_mlp", "mlp.shared_experts"),
)


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(DEFAULTS | raw)
    fields.require_value("model_type", "hy_v3")
    fields.require_value("mlp_bias", False)
    for name in ("moe_router_use_sigmoid", "moe_router_enable_expert_bias", "qk_norm", "route_norm"):
        fields.require_value(name, True)
    fields.require_value(
        "expert_hidden_dim", fields.integer("moe_intermediate_size"), None, reason="the other name"
    )
    fields.integer("num_shared_experts")  # zero is refused
    angles = rope.read(fields, fields.integer("max_position_embeddings"), 11_158_840.0)
    heads = read_heads(fields, fields.number("rms_norm_eps"), has_head_norms=True)
    gating = Gating(
        top_k=fields.integer("num_experts_per_tok", maximum=fields.integer("num_experts")),
        normalise=True,
        scale=fields.number("router_scaling_factor"),
        scores="sigmoid",
        sum_epsilon=ADDED,
    )
    attention = GroupedQuery(heads, heads.width)
    return read(fields, "hy_v3", attention, angles, gating, layers_by_type(fields), NAMES, keys=KEYS)
