"""The keys of config.json that architectures of GGUF files have in common."""

from __future__ import annotations

from typing import Any

from moesaic.models.gguf.metadata import Metadata

Config = dict[str, Any]
SOFTMAX, SIGMOID = 1, 2
"""Values of expert_gating_func."""


def read_common(meta: Metadata) -> Config:
    """What all architectures have."""
    extra = meta.integer("nextn_predict_layers", 0)
    heads, hidden = meta.integer("attention.head_count"), meta.integer("embedding_length")
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": meta.integer("block_count") - extra,
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": meta.integer("context_length"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
    }


def read_rope(meta: Metadata, width: int | None, **yarn_keys: Any) -> Config:
    """The rotary keys. width: of the part of a head that is rotated; None: the caller reads it. yarn_keys:
    further keys of yarn."""
    if width is not None:
        meta.require_value("rope.dimension_count", width)
    theta, kind = meta.number("rope.freq_base", 10000.0), meta.raw("rope.scaling.type", "none")
    factor = meta.maybe_number("rope.scaling.factor")
    meta.require_value("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    older = meta.maybe_number("rope.scaling.attn_factor")
    scaling = {
        "original_max_position_embeddings": meta.maybe_integer("rope.scaling.original_context_length"),
        "beta_fast": meta.maybe_number("rope.scaling.yarn_beta_fast"),
        "beta_slow": meta.maybe_number("rope.scaling.yarn_beta_slow"),
        "attention_factor": meta.maybe_number("rope.scaling.yarn_attn_factor") or older,
    }
    parameters: Config = {"rope_theta": theta, "rope_type": "default"}
    if kind == "linear" and factor is not None:
        parameters |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and factor is not None:
        known_scaling = {key: value for key, value in scaling.items() if value is not None}
        parameters |= {"rope_type": "yarn", "factor": factor, **yarn_keys, **known_scaling}
    elif kind != "none":
        raise meta.make_error("rope.scaling.type", kind, "none; linear, yarn with rope.scaling.factor")
    return {"rope_parameters": parameters}


def read_grouped_query(meta: Metadata, rotated_width: int | None = None) -> Config:
    """The keys about grouped-query attention of heads that are rotated whole.

    rotated_width: how many numbers of a head are rotated; None: all.
    """
    query = meta.integer("attention.head_count")
    width = meta.maybe_integer("attention.key_length")
    meta.require_value("attention.value_length", width)
    width = meta.integer("embedding_length") // max(query, 1) if width is None else width
    return {
        "num_key_value_heads": meta.integer("attention.head_count_kv", query),
        "head_dim": width,
        **read_rope(meta, width if rotated_width is None else rotated_width),
    }


def read_corrected_gate(meta: Metadata, groups: int = 1, groups_kept: int = 1) -> Config:
    """The gate of DeepSeek-V3. groups, groups_kept: of experts, if the file does not say it."""
    meta.require_value("expert_gating_func", SIGMOID)
    return {
        "n_routed_experts": meta.integer("expert_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "intermediate_size": meta.integer("feed_forward_length"),
        "n_shared_experts": meta.integer("expert_shared_count", 0),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "n_group": meta.integer("expert_group_count", groups),
        "topk_group": meta.integer("expert_group_used_count", groups_kept),
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0) or 1.0,
    }


def require_one_group(meta: Metadata) -> None:
    """Refuses groups of experts, factors of their weights, and a gate that is not a softmax."""
    meta.require_value("expert_gating_func", SOFTMAX)
    meta.require_value("expert_group_count", 0, 1)
    meta.require_value("expert_group_used_count", 0, 1)
    meta.require_value("expert_weights_scale", 1.0, 0.0)
