"""ERNIE 4.5 with experts: numbers side by side are rotated, and a bias helps the softmax gate to choose.

ERNIE team, Baidu, ERNIE 4.5, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.kernels.gating import Gating
from moesaic.models import rope, shared_experts
from moesaic.models.config import Fields
from moesaic.models.grouped_query import GroupedQuery
from moesaic.models.loader import read_heads
from moesaic.models.shared_experts import Config, Keys, Names, blocks, expert_names, num_layers, read

__all__ = ["UNUSED_TENSORS", "blocks", "expert_names", "parse"]
UNUSED_TENSORS = (*shared_experts.UNUSED_TENSORS, r"model\.mtp_.*")
"""Tensors that are not needed, with those that predict several tokens at once."""
# What transformers takes for a key that config.json leaves out.
DEFAULTS = {
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
KEYS = Keys(experts="moe_num_experts", shared_experts="moe_num_shared_experts")
NAMES = Names(
    corrections=(
        "mlp.moe_statics.e_score_correction_bias",
        "mlp.gate.moe_statics.e_score_correction_bias",
    ),
    correction_axes=(1,),
)
MOST_NORM_MIN = 1e-9
"""Largest moe_norm_min. The makers divide by the sum of the chosen scores, or by it if that is more.
Here it is added to the sum. With the usual 1e-12 no float32 sum from 1e-4 on changes by that."""


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(DEFAULTS | raw)
    fields.require_value("model_type", "ernie4_5_moe")
    has_biases = fields.flag("use_bias", False)
    fields.require_value("use_rmsnorm", True)
    fields.require_value("moe_gate", "topk", "top2_fused")
    fields.require_value("moe_use_aux_free", True, reason="the gate has a bias")
    angles = rope.read(fields, fields.integer("max_position_embeddings"), 500000.0)
    fields.require_value("attention_bias", has_biases, reason="as use_bias says")
    heads = read_heads(fields, fields.number("rms_norm_eps"))
    heads = replace(heads, bias=has_biases, out_bias=has_biases, is_interleaved=True)
    attention, layers = GroupedQuery(heads, heads.width), _moe_layers(fields)
    config = read(fields, "ernie4_5_moe", attention, angles, _gating(fields), layers, NAMES, keys=KEYS)
    return replace(config, has_biases=has_biases)


def _gating(fields: Fields) -> Gating:
    least = fields.number("moe_norm_min", 1e-12)
    if least > MOST_NORM_MIN:
        raise CheckpointError(f"config.json: moe_norm_min: got {least:g}; allowed: at most {MOST_NORM_MIN:g}")
    top_k = fields.integer("moe_k", maximum=fields.integer("moe_num_experts"))
    return Gating(top_k, normalise=True, sum_epsilon=least)


def _moe_layers(fields: Fields) -> tuple[int, ...]:
    """Returns the layers with routed experts: every moe_layer_interval-th from first to last index."""
    step, first = fields.integer("moe_layer_interval"), fields.integer("moe_layer_start_index", minimum=0)
    last = fields.integer("moe_layer_end_index", minimum=-1)
    stop = num_layers(fields) if last == -1 else min(num_layers(fields), last + 1)
    return tuple(layer for layer in range(first, stop) if (layer + 1) % step == 0)
