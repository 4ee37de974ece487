"""Mellum 2: grouped-query attention whose layers with a window have rotation angles of their own.

JetBrains, Mellum 2, 2026.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.kernels.gating import Gating
from moesaic.models import rope, shared_experts
from moesaic.models.config import Fields
from moesaic.models.grouped_query import GroupedQuery
from moesaic.models.loader import read_heads
from moesaic.models.shared_experts import (
    DENSE,
    SPARSE,
    Config,
    Keys,
    Names,
    blocks,
    expert_names,
    num_layers,
    read,
)

__all__ = ["UNUSED_TENSORS", "blocks", "expert_names", "parse"]
UNUSED_TENSORS = (*shared_experts.UNUSED_TENSORS, r"mtp\..*")
"""Tensors that are not needed, with those that predict several tokens at once."""
# What transformers takes for a key that config.json leaves out.
DEFAULTS = {
    "head_dim": 128,
    "intermediate_size": 7168,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 896,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "sliding_window": 1024,
}
FULL, SLIDING = "full_attention", "sliding_attention"
THETAS = {FULL: 500000.0, SLIDING: 10000.0}


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    keys = Keys("num_experts" if "num_experts" in raw else "num_local_experts", shared_experts=None)
    fields = Fields(DEFAULTS | {keys.experts: 64} | raw | {"num_nextn_predict_layers": 0})
    fields.require_value("model_type", "mellum")
    layers, heads = num_layers(fields), read_heads(fields, fields.number("rms_norm_eps"), has_head_norms=True)
    angles = _angles(fields)
    gating = Gating(
        top_k=fields.integer("num_experts_per_tok", maximum=fields.integer(keys.experts)),
        normalise=fields.flag("norm_topk_prob", True),
    )
    kinds = fields.words("mlp_layer_types", layers, (DENSE, SPARSE), [SPARSE] * layers)
    sparse = tuple(layer for layer, kind in enumerate(kinds) if kind == SPARSE)
    attention, windows = GroupedQuery(heads, heads.width), _windows(fields, layers)
    names = Names(corrections=())
    config = read(fields, "mellum", attention, angles[FULL], gating, sparse, names, windows, keys)
    return replace(config, local_rope=angles[SLIDING])


def _angles(fields: Fields) -> dict[str, rope.RopeConfig]:
    """Returns the angles of layers without a window, and of those with one."""
    parts = fields.child("rope_parameters") or Fields({}, "rope_parameters.")
    longest = fields.integer("max_position_embeddings")
    configs = {kind: rope.read(parts, longest, theta, key=kind) for kind, theta in THETAS.items()}
    parts.refuse_unread()
    return configs


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    width = fields.maybe_integer("sliding_window")
    allowed_kinds = (FULL,) if width is None else (FULL, SLIDING)
    kinds = fields.words("layer_types", layers, allowed_kinds, [FULL] * layers)
    # transformers does not read this key, so layers that should have a window would have none.
    fields.require_value("use_sliding_window", SLIDING in kinds, False, reason="as layer_types says")
    return tuple(width if kind == SLIDING else None for kind in kinds)
