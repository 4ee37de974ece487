"""MiniMax-M2, M2.1, M2.5 and M2.7: norms of queries and keys span all heads, a part of each head is rotated.

MiniMax, MiniMax-M2, 2025.
"""

from __future__ import annotations

from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.kernels.gating import Gating
from moesaic.models import rope
from moesaic.models.block import Attention
from moesaic.models.config import Fields, shorten
from moesaic.models.grouped_query import GroupedQuery
from moesaic.models.loader import Loader, read_heads
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
from moesaic.models.whole_norm import whole_norm_attention

__all__ = ["UNUSED_TENSORS", "blocks", "expert_names", "parse"]
# What transformers takes for a key that config.json leaves out.
DEFAULTS = {
    "head_dim": 128,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "rms_norm_eps": 1e-6,
}
KEYS = Keys(experts="num_local_experts", shared_experts=None, expert_width="intermediate_size")
NAMES = Names(
    gates=("block_sparse_moe.gate", "mlp.gate"),
    corrections=("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
    experts="block_sparse_moe.experts",
    words=("w1", "w3", "w2"),
)


class WholeNormQuery(GroupedQuery):
    """Grouped-query attention whose norms span all heads."""

    def load(self, loader: Loader, name: str, rope: rope.RopeTable, window: int | None) -> Attention:
        return whole_norm_attention(loader, name, self.sizes, rope, None)


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(DEFAULTS | raw)
    fields.require_value("model_type", "minimax_m2")
    _read_makers_keys(fields)
    heads = read_heads(fields, fields.number("rms_norm_eps"), has_head_norms=True)
    rotated_width = fields.maybe_integer("rotary_dim") or heads.width
    partial = fields.number_above("partial_rotary_factor", 0.0, rotated_width / heads.width)
    angles = rope.read(fields, fields.integer("max_position_embeddings"), 5e6, partial)
    attention = WholeNormQuery(heads, angles.count_rotated(heads.width))
    top_k = fields.integer("num_experts_per_tok", maximum=fields.integer("num_local_experts"))
    gating = Gating(top_k, normalise=True, scores="sigmoid")
    layers = tuple(range(num_layers(fields)))
    return read(fields, "minimax_m2", attention, angles, gating, layers, NAMES, keys=KEYS)


def _read_makers_keys(fields: Fields) -> None:
    """Reads keys of the makers' own code, which has more kinds of models. Refuses the other kinds."""
    fields.require_value("attention_bias", False)
    fields.require_value("qk_norm_type", "per_layer")
    fields.require_value("scoring_func", "sigmoid")
    fields.require_value("shared_intermediate_size", 0)
    fields.require_value("sliding_window", None)
    fields.require_value("use_qk_norm", True)
    fields.require_value("use_routing_bias", True)
    for part in ("full_attention", "linear_attention", "mlp"):
        fields.require_value(f"layernorm_{part}_beta", 1.0, 1, reason="residuals are not scaled")
    kinds = fields.raw("attn_type_list", None)
    if kinds is not None and kinds != [1] * num_layers(fields):
        raise CheckpointError(
            f"config.json: attn_type_list: got {shorten(repr(kinds))}; allowed: 1 for each of "
            f"{num_layers(fields)} layers"
        )
