"""K-EXAONE: layers with a window rotate normalized heads, the others do not; DeepSeek-V3's gate.

LG AI Research, K-EXAONE, 2026.
"""

from __future__ import annotations

from typing import Any

from moesaic.models import rope, shared_experts
from moesaic.models.block import Attention
from moesaic.models.config import Fields
from moesaic.models.gates import read_corrected
from moesaic.models.grouped_query import GroupedQuery
from moesaic.models.loader import Loader, grouped_query_attention, read_heads
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
    "first_k_dense_replace": 1,
    "intermediate_size": 16384,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1024,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.5,
    "sliding_window": 4096,
    "topk_group": 1,
}
KEYS = Keys(experts="num_experts", shared_experts="num_shared_experts")
NAMES = Names(corrections=("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"))
FULL, SLIDING = "full_attention", "sliding_attention"


class RotatedInWindows(GroupedQuery):
    """Grouped-query attention that rotates in layers with a window alone."""

    def load(self, loader: Loader, name: str, rope: rope.RopeTable, window: int | None) -> Attention:
        return grouped_query_attention(loader, name, self.sizes, None if window is None else rope, window)


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(DEFAULTS | raw | {"num_nextn_predict_layers": 0})  # such layers have other names here
    fields.require_value("model_type", "exaone_moe")
    fields.require_value("attention_bias", False)
    angles = rope.read(fields, fields.integer("max_position_embeddings"), 10000.0)
    heads = read_heads(fields, fields.number("rms_norm_eps"), has_head_norms=True)
    windows = _windows(fields)
    attention = RotatedInWindows(heads, heads.width)
    layers, gating = _moe_layers(fields), read_corrected(fields, fields.integer("num_experts"))
    return read(fields, "exaone_moe", attention, angles, gating, layers, NAMES, windows, KEYS)


def _windows(fields: Fields) -> tuple[int | None, ...]:
    """Returns the window of each layer: layer_types says which have one, or else sliding_window_pattern."""
    layers, width = num_layers(fields), fields.integer("sliding_window")
    step = 1
    if fields.raw("layer_types", None) is None:
        step = fields.integer("sliding_window_pattern", 4)
    fields.ignore("sliding_window_pattern")
    usual = [FULL if (layer + 1) % step == 0 else SLIDING for layer in range(layers)]
    kinds = fields.words("layer_types", layers, (FULL, SLIDING), usual)
    return tuple(width if kind == SLIDING else None for kind in kinds)


def _moe_layers(fields: Fields) -> tuple[int, ...]:
    """Returns the layers with routed experts: mlp_layer_types names them, or else first_k_dense_replace."""
    layers, dense = num_layers(fields), fields.integer("first_k_dense_replace", minimum=0)
    usual = [DENSE if layer < dense else SPARSE for layer in range(layers)]
    kinds = fields.words("mlp_layer_types", layers, (DENSE, SPARSE), usual)
    # The makers' first files have these two keys in place of the others. transformers does not read them.
    reason = "as mlp_layer_types or first_k_dense_replace says, or else its default"
    fields.require_value("first_last_k_dense_replace", kinds.count(DENSE), reason=reason)
    fields.require_value("is_moe_layer", [kind == SPARSE for kind in kinds], reason=reason)
    return tuple(layer for layer, kind in enumerate(kinds) if kind == SPARSE)
