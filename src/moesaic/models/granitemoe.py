"""Granite 3 with experts: Mixtral with factors of embeddings, residuals, attention scores and logits.

IBM Granite team, Granite 3.0 language models, 2024. `granitemoeshared` has a shared expert beside the others.

Each layer adds r times what its parts compute, r = residual_multiplier. Here hidden states are divided by r,
so that nothing is multiplied in a layer: a norm gives the same numbers if its epsilon is divided by r^2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.kernels.gating import Gating
from moesaic.models import rope
from moesaic.models.config import Fields
from moesaic.models.grouped_query import GroupedQuery
from moesaic.models.loader import read_heads
from moesaic.models.shared_experts import (
    UNUSED_TENSORS,
    Config,
    Keys,
    Names,
    blocks,
    expert_names,
    num_layers,
    read,
)
from moesaic.models.spec import Multipliers

__all__ = ["UNUSED_TENSORS", "blocks", "expert_names", "parse"]
# What transformers takes for a key that config.json leaves out.
DEFAULTS = {
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-6,
}
KEYS = Keys(experts="num_local_experts", shared_experts=None, expert_width="intermediate_size")
NAMES = Names(
    gates=("block_sparse_moe.router.layer", "block_sparse_moe.router"),
    corrections=(),
    experts="block_sparse_moe.experts",
)
SHARED = "granitemoeshared"
LEAST = 1e-6
"""A factor must be greater, so that one divided by its square is far from the limits of float32."""


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields, kind = Fields(DEFAULTS | raw), raw["model_type"]
    fields.ignore("model_type")
    shared_width = 0
    if kind == SHARED:
        shared_width = fields.integer("shared_intermediate_size", 0, minimum=0)
    fields.require_value("position_embedding_type", "rope", None)
    angles = rope.read(fields, fields.integer("max_position_embeddings"), 10000.0)
    scale, residual = _factor(fields, "attention_multiplier"), _factor(fields, "residual_multiplier")
    factors = Multipliers(
        _factor(fields, "embedding_multiplier") / residual, 1 / _factor(fields, "logits_scaling"), residual
    )
    if fields.integer("hidden_size") % 2:
        raise CheckpointError(f"config.json: hidden_size: got {raw['hidden_size']}; allowed: an even integer")
    heads = replace(read_heads(fields, fields.number("rms_norm_eps")), scale=scale)
    top_k = fields.integer("num_experts_per_tok", maximum=fields.integer("num_local_experts"))
    gating = Gating(top_k, normalise=True)
    layers, attention = tuple(range(num_layers(fields))), GroupedQuery(heads, heads.width)
    config = read(fields, kind, attention, angles, gating, layers, NAMES, keys=KEYS)
    config = replace(config, epsilon=config.epsilon / residual**2, multipliers=factors)
    return replace(config, fused_shared_width=shared_width)


def _factor(fields: Fields, name: str) -> float:
    return fields.number_above(name, LEAST, 1.0)
