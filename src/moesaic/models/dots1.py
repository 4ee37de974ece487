"""dots.llm1: grouped-query attention with normalized heads and optional windows, the gate of DeepSeek-V3.

rednote-hilab, dots.llm1, 2025.
"""

from __future__ import annotations

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
    num_layers,
    read,
)

__all__ = ["UNUSED_TENSORS", "blocks", "expert_names", "parse"]
# What transformers takes for a key that config.json leaves out.
DEFAULTS = {
    "first_k_dense_replace": 0,
    "intermediate_size": 10944,
    "max_position_embeddings": 2048,
    "max_window_layers": 62,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "norm_topk_prob": False,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 1.0,
    "sliding_window": 4096,
    "topk_group": 1,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    scoring = {"scoring_func": "sigmoid"} if raw.get("scoring_func") == "noaux_tc" else {}
    fields = Fields(DEFAULTS | raw | scoring)  # the makers' files name the gate, which has sigmoids
    fields.require_value("model_type", "dots1")
    fields.require_value("moe_layer_freq", 1)
    angles = rope.read(fields, fields.integer("max_position_embeddings"), 10000.0)
    heads = read_heads(fields, fields.number("rms_norm_eps"), has_head_norms=True)
    gating = read_corrected(fields, fields.integer("n_routed_experts"))
    return read(
        fields,
        "dots1",
        GroupedQuery(heads, heads.width),
        angles,
        gating,
        layers_after_dense(fields),
        windows=_windows(fields),
    )


def _windows(fields: Fields) -> tuple[int | None, ...]:
    """Returns the window of each layer: layer_types says which have one, or else max_window_layers."""
    layers, width = num_layers(fields), fields.maybe_integer("sliding_window")
    full = layers if width is None else min(layers, fields.integer("max_window_layers", minimum=0))
    fields.ignore("max_window_layers", "use_sliding_window")
    allowed_kinds = (FULL,) if width is None else (FULL, SLIDING)
    kinds = fields.words("layer_types", layers, allowed_kinds, [FULL] * full + [SLIDING] * (layers - full))
    return tuple(width if kind == SLIDING else None for kind in kinds)
