"""Qwen3-MoE: grouped-query attention with a norm on each query and key head, many small experts.

Yang et al., Qwen3 technical report, 2025. Bai et al., Qwen3-VL, 2025: its text model is the same.
Its makers' files have experts in columns. Those that transformers saves or that are quantised have rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.core.experts import HALF_COLUMNS
from moesaic.kernels.gating import Gating
from moesaic.models import rope
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import Fields
from moesaic.models.grouped_query import GroupedQuery
from moesaic.models.loader import read_heads
from moesaic.models.qwen import sparse_layers
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

__all__ = ["UNUSED_TENSORS", "blocks", "expert_names", "match_files", "parse"]
SEES_IMAGES = "qwen3_vl_moe_text"
# What transformers takes for a key that config.json leaves out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "intermediate_size": 6144,
        "max_position_embeddings": 32768,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-6,
    },
    SEES_IMAGES: {
        "intermediate_size": 5632,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
    },
}
NAMES = Names(corrections=())


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    kind = raw["model_type"]
    fields = Fields(DEFAULTS[kind] | raw)
    fields.ignore("model_type")
    # Keys of Qwen3-Coder that repeat what all models of this type have in common.
    fields.require_value("qkv_bias", False)
    fields.require_value("use_qk_norm", True)
    fields.require_value("shared_expert_intermediate_size", 0, None)
    experts_key = "num_experts" if "num_experts" in raw else "num_local_experts"
    experts = fields.integer(experts_key)
    fields.require_value("num_local_experts", experts)
    layers = num_layers(fields)
    moe_layers = sparse_layers(
        layers, fields.integers("mlp_only_layers"), fields.integer("decoder_sparse_step", 1)
    )
    heads = read_heads(fields, fields.number("rms_norm_eps"), has_head_norms=True)
    if kind == SEES_IMAGES:
        fields.require_value("norm_topk_prob", True, reason="as transformers computes this model_type")
    gating = Gating(
        fields.integer("num_experts_per_tok", maximum=experts), fields.flag("norm_topk_prob", True)
    )
    return read(
        fields,
        kind,
        GroupedQuery(heads, heads.width),
        rope.read(fields, fields.integer("max_position_embeddings"), 10000.0),
        gating,
        moe_layers,
        NAMES,
        _windows(fields, layers),
        Keys(experts=experts_key, shared_experts=None),
    )


def match_files(config: Config, checkpoint: Checkpoint) -> Config:
    """Returns the config with the form in which the files have experts. Both matrices must have it.

    One of them alone may fit both forms, where an expert is half or twice as wide as a hidden state.
    """
    if config.model_type != SEES_IMAGES or not config.moe_layers:
        return config
    experts, hidden, width = config.num_experts, config.hidden_size, config.expert_width
    prefix = expert_names(config, config.moe_layers[0]).prefix
    shapes = [checkpoint.find_shape(f"{prefix}.{word}") for word in ("gate_up_proj", "down_proj")]
    has_columns = shapes == [(experts, hidden, 2 * width), (experts, width, hidden)]
    return replace(config, names=replace(config.names, form=HALF_COLUMNS)) if has_columns else config


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Returns the window of each layer, which all layers have or none."""
    window = fields.maybe_integer("sliding_window")
    if not fields.flag("use_sliding_window", False) or window is None:
        fields.ignore("max_window_layers")
        return ()
    reason = "transformers gives every layer the window, the makers' code only those from this one on"
    fields.require_value("max_window_layers", 0, None, reason=reason)
    return (window,) * layers
