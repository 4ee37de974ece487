"""The architectures of GGUF files that are read: what config.json of the same model would say.

Their keys are those that llama.cpp's converter writes. Where a file leaves one out, llama.cpp's own default
for that architecture counts.

Question: How is a GGUF file read, and how is an architecture added?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moesaic.models.gguf.metadata import Metadata
from moesaic.models.gguf.names import Names
from moesaic.models.gguf.shared_keys import (
    SIGMOID,
    SOFTMAX,
    Config,
    read_corrected_gate,
    read_grouped_query,
    read_rope,
    require_one_group,
)

HasTensor = Callable[[str], bool]
"""Whether the files have a tensor `blk.N.NAME` in any layer."""
DEFAULT_NAMES = Names()
MIXED_NAMES = Names(
    gate="block_sparse_moe.gate",
    correction="block_sparse_moe.e_score_correction_bias",
    experts="block_sparse_moe.experts",
    words=("w1", "w3", "w2"),
)
LFM2_NAMES = Names(
    gate="feed_forward.gate",
    correction="feed_forward.expert_bias",
    experts="feed_forward.experts",
    words=("w1", "w3", "w2"),
    family_names={
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    },
)
DEEPSEEK_GROUPS = {256: (8, 4)}
"""Number of experts -> n_group and topk_group, for files from before these were written. Only DeepSeek-V3 and
R1 have so many."""


@dataclass(frozen=True)
class Architecture:
    """How files with one value of general.architecture are read."""

    config: Callable[[Metadata, HasTensor], Config]
    """Returns this architecture's part of config.json. `read_common` reads the rest."""
    names: Names = DEFAULT_NAMES
    has_permuted_heads: bool = False
    """Whether the converter changed the order of the rows of queries and keys: numbers that are rotated as a
    pair stand side by side."""
    has_norm_offset: bool = False
    """Whether one was added to the weights of norms, other than that of linear attention's output."""
    has_tiled_heads: bool = False
    """Whether the converter changed the order of linear attention's value heads: first one of each key head,
    then the next of each."""


def _qwen3(meta: Metadata, has_tensor: HasTensor) -> Config:
    require_one_group(meta)
    meta.require_value("expert_shared_feed_forward_length", 0)
    return {
        "model_type": "qwen3_moe",
        **read_grouped_query(meta),
        "num_experts": meta.integer("expert_count"),
        "intermediate_size": meta.integer("feed_forward_length"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "norm_topk_prob": meta.flag("expert_weights_norm", True),
        "attention_bias": has_tensor("attn_q.bias"),
    }


def _qwen2(meta: Metadata, has_tensor: HasTensor) -> Config:
    require_one_group(meta)
    shared_width = meta.maybe_integer("expert_shared_feed_forward_length")
    return {
        "model_type": "qwen2_moe",
        **read_grouped_query(meta),
        "num_experts": meta.integer("expert_count"),
        "intermediate_size": meta.integer("feed_forward_length"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": meta.integer("feed_forward_length")
        if shared_width is None
        else shared_width,
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        "qkv_bias": has_tensor("attn_q.bias"),
    }


def _linear(meta: Metadata) -> Config:
    """What Qwen3-Next and Qwen3.5 have in common: linear attention, gated attention, a shared expert."""
    require_one_group(meta)
    rotated_width, heads = meta.integer("rope.dimension_count"), meta.integer("ssm.time_step_rank")
    inner, layers = meta.integer("ssm.inner_size"), meta.integer("block_count")
    if not heads or inner % heads:
        raise meta.make_error("ssm.inner_size", inner, f"a multiple of {heads} value heads")
    step, attention = (
        max(meta.integer("full_attention_interval", 4), 1),
        read_grouped_query(meta, rotated_width),
    )
    recurrent = meta.raw("attention.recurrent_layers", [(layer + 1) % step > 0 for layer in range(layers)])
    if not isinstance(recurrent, list) or len(recurrent) != layers:
        raise meta.make_error("attention.recurrent_layers", recurrent, f"a list of {layers} layers")
    kinds = ["linear_attention" if linear else "full_attention" for linear in recurrent]
    dense, shared_width = (
        meta.integer("feed_forward_length", 0),
        meta.integer("expert_shared_feed_forward_length"),
    )
    return {
        **attention,
        **({"intermediate_size": dense} if dense else {}),
        "partial_rotary_factor": rotated_width / max(attention["head_dim"], 1),
        "linear_num_key_heads": meta.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": meta.integer("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": meta.integer("ssm.conv_kernel"),
        "layer_types": kinds[: layers - meta.integer("nextn_predict_layers", 0)],
        "num_experts": meta.integer("expert_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": shared_width,
    }


def _qwen3_next(meta: Metadata, has_tensor: HasTensor) -> Config:
    config = {"model_type": "qwen3_next", **_linear(meta), "attention_bias": has_tensor("attn_q.bias")}
    return config | {"norm_topk_prob": meta.flag("expert_weights_norm", True)}


def _qwen3_5(meta: Metadata, has_tensor: HasTensor) -> Config:
    meta.require_value("expert_weights_norm", True)
    return {"model_type": "qwen3_5_moe_text", **_linear(meta), "attention_bias": has_tensor("attn_q.bias")}


def _olmoe(meta: Metadata, has_tensor: HasTensor) -> Config:
    require_one_group(meta)
    return {
        "model_type": "olmoe",
        **read_grouped_query(meta),
        "num_experts": meta.integer("expert_count"),
        "intermediate_size": meta.integer("feed_forward_length"),
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        "clip_qkv": meta.maybe_number("attention.clamp_kqv"),
        "attention_bias": has_tensor("attn_q.bias"),
    }


def _mixtral(meta: Metadata, has_tensor: HasTensor) -> Config:
    experts = meta.integer("expert_count", 0)
    if not experts:
        raise meta.make_error("expert_count", experts, "at least 1: llama without experts is not supported")
    require_one_group(meta)
    return {
        "model_type": "mixtral",
        **read_grouped_query(meta),
        "num_local_experts": experts,
        "intermediate_size": meta.integer("feed_forward_length"),
    }


def _granite(meta: Metadata, has_tensor: HasTensor) -> Config:
    require_one_group(meta)
    return {
        "model_type": "granitemoe",
        **read_grouped_query(meta),
        "num_local_experts": meta.integer("expert_count"),
        "intermediate_size": meta.integer("feed_forward_length"),
        "attention_multiplier": meta.number("attention.scale", 1.0),
        "embedding_multiplier": meta.number("embedding_scale", 1.0),
        "residual_multiplier": meta.number("residual_scale", 1.0),
        "logits_scaling": meta.number("logit_scale", 1.0),
        "attention_bias": has_tensor("attn_q.bias"),
    }


def _deepseek(meta: Metadata, has_tensor: HasTensor) -> Config:
    """DeepSeek-V2 with a softmax, DeepSeek-V3, Kimi K2, Moonlight and GLM-4.7-Flash with sigmoids."""
    sigmoid = (
        meta.integer("expert_gating_func", SIGMOID if has_tensor("exp_probs_b.bias") else SOFTMAX) == SIGMOID
    )
    rotated_width, log = (
        meta.integer("rope.dimension_count"),
        meta.maybe_number("rope.scaling.yarn_log_multiplier"),
    )
    scale = {} if not log else {name: round(10 * log, 7) for name in ("mscale", "mscale_all_dim")}
    key, value = meta.integer("attention.key_length"), meta.integer("attention.value_length")
    key = meta.integer("attention.key_length_mla", key)
    meta.raw("attention.head_count_kv", None)  # one latent, or as many as heads in older files
    attention = {
        "num_key_value_heads": meta.integer("attention.head_count"),  # each has keys made of the latent
        "q_lora_rank": meta.maybe_integer("attention.q_lora_rank"),
        "kv_lora_rank": meta.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated_width,
        "qk_nope_head_dim": key - rotated_width,
        "v_head_dim": meta.integer("attention.value_length_mla", value),
        **read_rope(meta, None, **scale),
    }
    if sigmoid:
        usual = DEEPSEEK_GROUPS.get(meta.integer("expert_count"), (1, 1))
        return {"model_type": "deepseek_v3", **attention, **read_corrected_gate(meta, *usual)}
    meta.require_value("expert_gating_func", SOFTMAX)
    groups = meta.integer("expert_group_count", 1)
    groups_kept = meta.integer("expert_group_used_count", 1)
    group_keys = {"topk_method": "group_limited_greedy", "n_group": groups, "topk_group": groups_kept}
    return {
        "model_type": "deepseek_v2",
        **attention,
        "n_routed_experts": meta.integer("expert_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "intermediate_size": meta.integer("feed_forward_length"),
        "n_shared_experts": meta.integer("expert_shared_count", 0),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0) or 1.0,
        **(group_keys if groups > 1 else {"topk_method": "greedy"}),
    }


def _glm4(meta: Metadata, has_tensor: HasTensor) -> Config:
    rotated_width = meta.integer("rope.dimension_count")
    heads = read_grouped_query(meta, rotated_width)
    return {
        "model_type": "glm4_moe",
        **heads,
        **read_corrected_gate(meta),
        "norm_topk_prob": meta.flag("expert_weights_norm", True),
        "partial_rotary_factor": rotated_width / max(heads["head_dim"], 1),
        "use_qk_norm": has_tensor("attn_q_norm.weight"),
        "attention_bias": has_tensor("attn_q.bias"),
    }


def _dots(meta: Metadata, has_tensor: HasTensor) -> Config:
    return {
        "model_type": "dots1",
        **read_grouped_query(meta),
        **read_corrected_gate(meta),
        "attention_bias": has_tensor("attn_q.bias"),
        "sliding_window": None,
    }


def _ernie(meta: Metadata, has_tensor: HasTensor) -> Config:
    require_one_group(meta)
    meta.raw("expert_shared_feed_forward_length", None)  # the tensors say it
    return {
        "model_type": "ernie4_5_moe",
        **read_grouped_query(meta),
        "moe_num_experts": meta.integer("expert_count"),
        "moe_k": meta.integer("expert_used_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "intermediate_size": meta.integer("feed_forward_length"),
        "moe_num_shared_experts": meta.integer("expert_shared_count", 0),
        "moe_layer_start_index": meta.integer("leading_dense_block_count", 0),
        "moe_layer_interval": meta.integer("interleave_moe_layer_step", 1),
    }


def _minimax(meta: Metadata, has_tensor: HasTensor) -> Config:
    meta.require_value("expert_gating_func", SIGMOID)
    meta.require_value("expert_weights_norm", True)
    meta.require_value("expert_weights_scale", 1.0, 0.0)
    meta.raw("feed_forward_length", None)  # that of experts again
    rotated_width = meta.integer("rope.dimension_count")
    return {
        "model_type": "minimax_m2",
        **read_grouped_query(meta, rotated_width),
        "num_local_experts": meta.integer("expert_count"),
        "intermediate_size": meta.integer("expert_feed_forward_length"),
        "rotary_dim": rotated_width,
    }


def _gpt_oss(meta: Metadata, has_tensor: HasTensor) -> Config:
    meta.raw("feed_forward_length", None)  # that of experts again
    width = meta.integer("attention.key_length")
    meta.require_value("attention.value_length", width)
    return {
        "model_type": "gpt_oss",
        "num_key_value_heads": meta.integer("attention.head_count_kv"),
        "head_dim": width,
        "attention_bias": has_tensor("attn_q.bias"),
        "num_local_experts": meta.integer("expert_count"),
        "intermediate_size": meta.integer("expert_feed_forward_length"),
        "sliding_window": meta.integer("attention.sliding_window"),
        **read_rope(meta, width, truncate=False),
    }


def _lfm2(meta: Metadata, has_tensor: HasTensor) -> Config:
    """Layers without key heads have a short convolution."""
    meta.require_value("expert_gating_func", SIGMOID)
    meta.require_value("expert_weights_norm", True)
    meta.require_value("expert_weights_scale", 1.0, 0.0)
    keys, layers = meta.raw("attention.head_count_kv"), meta.integer("block_count")
    counts = set(keys) - {0} if isinstance(keys, list) else set()
    if len(counts) != 1 or len(keys) != layers:
        raise meta.make_error("attention.head_count_kv", keys, f"a list of {layers}: 0, or the same number")
    width = meta.integer("embedding_length") // max(meta.integer("attention.head_count"), 1)
    meta.require_value("attention.key_length", width)
    meta.require_value("attention.value_length", width)
    return {
        "model_type": "lfm2_moe",
        "num_key_value_heads": counts.pop(),
        "layer_types": ["full_attention" if count else "conv" for count in keys],
        "norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "num_experts": meta.integer("expert_count"),
        "intermediate_size": meta.integer("feed_forward_length"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "num_dense_layers": meta.integer("leading_dense_block_count"),
        "conv_L_cache": meta.integer("shortconv.l_cache"),
        "use_expert_bias": has_tensor("exp_probs_b.bias"),
        **read_rope(meta, width),
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek2": Architecture(_deepseek),
    "dots1": Architecture(_dots),
    "ernie4_5-moe": Architecture(
        _ernie, Names(correction="mlp.moe_statics.e_score_correction_bias", correction_axes=1)
    ),
    "glm4moe": Architecture(_glm4),
    "gpt-oss": Architecture(_gpt_oss, Names(gate="mlp.router")),
    "granitemoe": Architecture(
        _granite,
        Names(gate="block_sparse_moe.router.layer", experts="block_sparse_moe.experts"),
        has_permuted_heads=True,
    ),
    "lfm2moe": Architecture(_lfm2, LFM2_NAMES),
    "llama": Architecture(_mixtral, MIXED_NAMES, has_permuted_heads=True),
    "minimax-m2": Architecture(_minimax, MIXED_NAMES),
    "olmoe": Architecture(_olmoe),
    "qwen2moe": Architecture(_qwen2, Names(shared_experts="mlp.shared_expert")),
    "qwen35moe": Architecture(
        _qwen3_5, Names(shared_experts="mlp.shared_expert"), has_norm_offset=True, has_tiled_heads=True
    ),
    "qwen3moe": Architecture(_qwen3),
    "qwen3next": Architecture(
        _qwen3_next,
        Names(
            shared_experts="mlp.shared_expert",
            linear_projections=("linear_attn.in_proj_qkvz.mixed", "linear_attn.in_proj_qkvz.gate"),
        ),
        has_norm_offset=True,
    ),
}
"""general.architecture -> how it is read."""
