"""Tiny configurations, each with its own combination of the optional parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

VOCAB = 97
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0],
}  # fmt: skip


def mixtral(**options: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 3, "num_local_experts": 5,
        "num_experts_per_tok": 2, "max_position_embeddings": 192, "head_dim": 8,
    }  # fmt: skip
    return {**base, **options}


def qwen3(**options: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 20,
        "num_experts": 12, "num_experts_per_tok": 4, "max_position_embeddings": 192,
        "norm_topk_prob": True,
    }  # fmt: skip
    return {**base, **options}


QWEN3_VL_VISION: dict[str, Any] = {
    "depth": 1, "out_hidden_size": 48, "num_heads": 2, "deepstack_visual_indexes": [0],
}  # fmt: skip


def qwen3_vl(**options: Any) -> dict[str, Any]:
    base = {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3],
            "mrope_interleaved": True,
        },
    }  # fmt: skip
    return qwen3(**{**base, **options})


def deepseek(**options: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "moe_intermediate_size": 20, "n_routed_experts": 12,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": None,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "max_position_embeddings": 192,
    }  # fmt: skip
    return {**base, **options}


def deepseek3(**options: Any) -> dict[str, Any]:
    return deepseek(
        **{
            "num_key_value_heads": options.get("num_attention_heads", 4),
            "n_group": 4,
            "topk_group": 2,
            **options,
        }
    )


def glm4(**options: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 20,
        "n_routed_experts": 12, "num_experts_per_tok": 4, "max_position_embeddings": 192,
    }  # fmt: skip
    return {**base, **options}


def gpt_oss(**options: Any) -> dict[str, Any]:
    """Its activation is limited at 1, since few products of so small a model would reach 7."""
    base = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 20, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 12,
        "num_experts_per_tok": 4, "max_position_embeddings": 192, "sliding_window": 9,
        "swiglu_limit": 1.0,
        "rope_parameters": {
            **YARN, "rope_theta": 100.0, "beta_fast": 1, "beta_slow": 0.1, "truncate": False,
        },
    }  # fmt: skip
    return {**base, **options}


def olmoe(**options: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 20, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 6, "num_experts": 16, "num_experts_per_tok": 8,
        "max_position_embeddings": 192, "eos_token_id": None,
    }  # fmt: skip
    return {**base, **options}


def dbrx(
    ffn: dict[str, Any] | None = None, attention: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    experts = {"ffn_hidden_size": 20, "moe_num_experts": 6, "moe_top_k": 3, **(ffn or {})}
    attention = {"kv_n_heads": 2, "clip_qkv": 1.2, "rope_theta": 5e4, **(attention or {})}
    base = {
        "vocab_size": VOCAB, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 192,
        "ffn_config": experts, "attn_config": attention,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, "eos_token_id": None,
    }  # fmt: skip
    return {**base, **options}


def glm4_lite(**options: Any) -> dict[str, Any]:
    base = deepseek(num_key_value_heads=options.get("num_attention_heads", 4), q_lora_rank=20, **options)
    del base["first_k_dense_replace"]  # mlp_layer_types says it
    return base


def dots(**options: Any) -> dict[str, Any]:
    return glm4(**{"first_k_dense_replace": 1, "n_shared_experts": 1, "sliding_window": None, **options})


def solar(**options: Any) -> dict[str, Any]:
    base = glm4(**options)
    del base["intermediate_size"]  # no layer is dense
    return base


def hy3(**options: Any) -> dict[str, Any]:
    base = glm4(num_experts=12, **options)
    del base["n_routed_experts"]
    return base


def ernie(**options: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "moe_intermediate_size": 20,
        "moe_num_experts": 12, "moe_k": 4, "moe_num_shared_experts": 2, "max_position_embeddings": 192,
        "pad_token_id": None,
    }  # fmt: skip
    return {**base, **options}


def granite(**options: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 20, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "num_local_experts": 12,
        "num_experts_per_tok": 4, "max_position_embeddings": 192, "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
    }  # fmt: skip
    return {**base, **options}


def mellum(**options: Any) -> dict[str, Any]:
    base = {
        "layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 9,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 1000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        },
    }  # fmt: skip
    return qwen3(**{**base, **options})


def exaone(**options: Any) -> dict[str, Any]:
    base = {"num_experts": 12, "sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING]}
    base = glm4(**{**base, **options})
    del base["n_routed_experts"]
    return base


def minimax(**options: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 20, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 12,
        "num_experts_per_tok": 4, "max_position_embeddings": 192, "rotary_dim": 8,
    }  # fmt: skip
    return {**base, **options}


def qwen2(**options: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 36, "num_experts": 12, "num_experts_per_tok": 4,
        "max_position_embeddings": 192,
    }  # fmt: skip
    return {**base, **options}


def qwen3_next(**options: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 36, "num_experts": 12, "num_experts_per_tok": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "max_position_embeddings": 512,
    }  # fmt: skip
    return {**base, **options}


def lfm2(**options: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 20, "num_experts": 12,
        "num_experts_per_tok": 4, "num_dense_layers": 1, "max_position_embeddings": 512,
        "layer_types": ["conv", "conv", FULL, "conv"],
    }  # fmt: skip
    return {**base, **options}


def around(text_type: str, text: dict[str, Any], vision: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A model that sees images around a text model."""
    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, **vision}
    return {"text_config": {"model_type": text_type, **text}, "vision_config": small, **options}


GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", mixtral()),
    "mixtral-window": ("mixtral", mixtral(sliding_window=7)),
    "mixtral-k1-mqa-tied": (
        "mixtral", mixtral(num_experts_per_tok=1, num_key_value_heads=1, tie_word_embeddings=True),
    ),
    "mixtral-odd-heads-mha": (
        "mixtral", mixtral(num_attention_heads=5, num_key_value_heads=5, hidden_size=40, head_dim=None),
    ),
    "mixtral-linear": (
        "mixtral", mixtral(rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}),
    ),
    "dbrx": ("dbrx", dbrx()),
    "dbrx-odd-heads-k1-plain": (
        "dbrx",
        dbrx(
            {"moe_normalize_expert_weights": None, "moe_top_k": 1}, {"clip_qkv": 8, "kv_n_heads": 5},
            d_model=40, n_heads=5,
        ),
    ),
    "qwen3": ("qwen3_moe", qwen3()),
    "qwen3-k8-plain": (
        "qwen3_moe", qwen3(num_experts=16, num_experts_per_tok=8, norm_topk_prob=False),
    ),
    "qwen3-bias-dense-layers": (
        "qwen3_moe",
        qwen3(attention_bias=True, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[1]),
    ),
    "qwen3-odd-heads-yarn": (
        "qwen3_moe",
        qwen3(num_attention_heads=9, num_key_value_heads=3, head_dim=20, rope_parameters=YARN),
    ),
    "qwen3-llama3-tied": ("qwen3_moe", qwen3(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "qwen3-longrope": ("qwen3_moe", qwen3(rope_parameters=LONGROPE)),
    "qwen3-dynamic": (
        "qwen3_moe", qwen3(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    ),
    "qwen3-window": ("qwen3_moe", qwen3(use_sliding_window=True, sliding_window=9)),
    "olmoe": ("olmoe", olmoe()),
    "olmoe-clip-bias-gqa": (
        "olmoe",
        olmoe(clip_qkv=0.9, attention_bias=True, num_key_value_heads=2, norm_topk_prob=True),
    ),
    "olmoe-odd-heads-k1-yarn-tied": (
        "olmoe",
        olmoe(
            hidden_size=60, num_attention_heads=5, num_key_value_heads=1, num_experts_per_tok=1,
            rope_parameters=YARN, tie_word_embeddings=True,
        ),
    ),
    "qwen2": ("qwen2_moe", qwen2()),
    "qwen2-dense-layers-plain": (
        "qwen2_moe",
        qwen2(
            qkv_bias=False, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[1],
            num_key_value_heads=2, num_experts_per_tok=8, norm_topk_prob=True,
        ),
    ),
    "qwen2-windows-odd-heads": (
        "qwen2_moe",
        qwen2(
            num_attention_heads=3, num_key_value_heads=1, use_sliding_window=True, sliding_window=9,
            layer_types=[SLIDING, FULL, SLIDING],
            shared_expert_intermediate_size=7, tie_word_embeddings=True,
        ),
    ),
    "qwen3-next": ("qwen3_next", qwen3_next()),
    "qwen3-next-dense-layers-odd-heads": (
        "qwen3_next",
        qwen3_next(
            num_attention_heads=3, num_key_value_heads=1, linear_num_key_heads=3, linear_num_value_heads=3,
            linear_conv_kernel_dim=3, layer_types=[LINEAR, FULL, LINEAR, LINEAR], decoder_sparse_step=2,
            mlp_only_layers=[1], norm_topk_prob=False, tie_word_embeddings=True,
        ),
    ),
    "qwen3.5": (
        "qwen3_5_moe_text",
        qwen3_next(
            linear_num_value_heads=6,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        ),
    ),
    "deepseek-lite": ("deepseek_v2", deepseek()),
    "deepseek-lite-yarn": (
        "deepseek_v2",
        deepseek(rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}),
    ),
    "deepseek-full": (
        "deepseek_v2",
        deepseek(
            q_lora_rank=20, qk_rope_head_dim=16, routed_scaling_factor=2.5, n_shared_experts=3,
            attention_bias=True, **GROUPS,
            rope_parameters={
                **YARN, "rope_theta": 100.0, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 1,
                "beta_slow": 0.1,
            },
        ),
    ),
    "deepseek-k1-one-head": (
        "deepseek_v2",
        deepseek(num_attention_heads=1, num_experts_per_tok=1, first_k_dense_replace=0, n_shared_experts=1),
    ),
    "deepseek-odd-heads-linear": (
        "deepseek_v2",
        deepseek(
            num_attention_heads=3, v_head_dim=5, tie_word_embeddings=True,
            rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        ),
    ),
    "deepseek3": ("deepseek_v3", deepseek3()),
    "deepseek3-full": (
        "deepseek_v3",
        deepseek3(
            q_lora_rank=20, qk_rope_head_dim=16, n_shared_experts=2, attention_bias=True, num_hidden_layers=4,
            first_k_dense_replace=2, n_group=3, topk_group=1, num_experts_per_tok=3,
            routed_scaling_factor=1.7,
            rope_parameters={**YARN, "rope_theta": 100.0, "mscale": 0.7, "mscale_all_dim": 1.2},
        ),
    ),
    "deepseek3-plain-odd-heads": (
        "deepseek_v3",
        deepseek3(
            num_attention_heads=3, n_group=1, topk_group=1, norm_topk_prob=False, first_k_dense_replace=0,
            num_experts_per_tok=1, rope_interleave=False, tie_word_embeddings=True,
        ),
    ),
    "glm4": ("glm4_moe", glm4()),
    "glm4-norm-bias-groups": (
        "glm4_moe",
        glm4(
            use_qk_norm=True, attention_bias=True, n_group=3, topk_group=2, num_hidden_layers=4,
            first_k_dense_replace=2, n_shared_experts=2, routed_scaling_factor=2.5,
        ),
    ),
    "glm4-plain-odd-heads-yarn": (
        "glm4_moe",
        glm4(
            num_attention_heads=9, num_key_value_heads=3, head_dim=20, norm_topk_prob=False,
            first_k_dense_replace=0, rope_parameters={**YARN, "partial_rotary_factor": 0.7},
        ),
    ),
    "dots": ("dots1", dots()),
    "dots-windows-bias-shared-groups": (
        "dots1",
        dots(
            sliding_window=9, max_window_layers=1, attention_bias=True, n_shared_experts=2, n_group=3,
            topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, num_hidden_layers=4,
            first_k_dense_replace=2,
        ),
    ),
    "solar": ("solar_open", solar()),
    "solar-bias-yarn-odd-heads-plain": (
        "solar_open",
        solar(
            attention_bias=True, num_attention_heads=9, num_key_value_heads=3, head_dim=20,
            norm_topk_prob=False, routed_scaling_factor=1.5, num_experts_per_tok=1, tie_word_embeddings=True,
            rope_parameters=YARN,
        ),
    ),
    "ernie": ("ernie4_5_moe", ernie()),
    "ernie-biases-tied": ("ernie4_5_moe", ernie(use_bias=True, tie_word_embeddings=True)),
    "ernie-layers-odd-heads-yarn-plain": (
        "ernie4_5_moe",
        ernie(
            num_hidden_layers=5, moe_layer_start_index=1, moe_layer_end_index=3, moe_layer_interval=2,
            moe_num_shared_experts=0, moe_k=1, hidden_size=60, num_attention_heads=5, num_key_value_heads=1,
            rope_parameters=YARN, tie_word_embeddings=False,
        ),
    ),
    "granite": ("granitemoe", granite()),
    "granite-bias-odd-heads-k1-yarn-tied": (
        "granitemoe",
        granite(
            attention_bias=True, num_attention_heads=5, num_key_value_heads=1, hidden_size=60,
            num_experts_per_tok=1, rope_parameters=YARN, tie_word_embeddings=True, residual_multiplier=1.7,
            rms_norm_eps=0.1, embedding_multiplier=1.7, logits_scaling=0.5, attention_multiplier=0.4,
        ),
    ),
    "granite-shared": ("granitemoeshared", granite(shared_intermediate_size=36)),
    "granite-shared-bias-odd-heads-yarn": (
        "granitemoeshared",
        granite(
            attention_bias=True, num_attention_heads=5, num_key_value_heads=1, hidden_size=60,
            rope_parameters=YARN, shared_intermediate_size=7, residual_multiplier=1.7,
            attention_multiplier=0.4, embedding_multiplier=1.7, logits_scaling=0.5,
        ),
    ),
    "hy3": ("hy_v3", hy3()),
    "hy3-layers-bias-shared-yarn": (
        "hy_v3",
        hy3(
            attention_bias=True, num_shared_experts=2, router_scaling_factor=0.7, rope_parameters=YARN,
            mlp_layer_types=["sparse", "dense", "sparse"],
            enable_moe_fp32_combine=False, tie_word_embeddings=True,
        ),
    ),
    "mellum": ("mellum", mellum()),
    "mellum-bias-dense-layers-yarn-tied": (
        "mellum",
        mellum(
            attention_bias=True, mlp_layer_types=["sparse", "dense", "sparse"], norm_topk_prob=False,
            num_attention_heads=5, num_key_value_heads=1, tie_word_embeddings=True,
            rope_parameters={FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 100.0}},
        ),
    ),
    "exaone": ("exaone_moe", exaone()),
    "exaone-pattern-groups-plain-tied": (
        "exaone_moe",
        exaone(
            layer_types=None, sliding_window_pattern=2, num_hidden_layers=4, first_k_dense_replace=2,
            n_group=3, topk_group=2, norm_topk_prob=False, routed_scaling_factor=0.7, num_shared_experts=2,
            num_attention_heads=5, num_key_value_heads=1, rope_parameters=YARN,
        ),
    ),
    "minimax": ("minimax_m2", minimax()),
    "minimax-odd-heads-k1-yarn-tied": (
        "minimax_m2",
        minimax(
            num_attention_heads=5, num_key_value_heads=5, head_dim=12, rotary_dim=None, num_experts_per_tok=1,
            rope_parameters={**YARN, "partial_rotary_factor": 0.5}, tie_word_embeddings=True,
        ),
    ),
    "internvl-qwen3": (
        "internvl",
        around(
            "qwen3_moe", qwen3(), {"num_hidden_layers": 1, "image_size": [28, 28], "patch_size": [14, 14]},
            image_token_id=96,
        ),
    ),
    "kimi-deepseek3": (
        "kimi_k25",
        around(
            "deepseek_v3", deepseek3(), {"num_hidden_layers": 1}, projection_hidden_size=32,
            tie_word_embeddings=False,
        ),
    ),
    "glm4v": (
        "glm4v_moe",
        around(
            "glm4v_moe_text",
            glm4(
                rope_parameters={
                    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                    "mrope_section": [1, 1, 2],
                },
            ),
            {"depth": 1, "out_hidden_size": 48, "num_heads": 2},
            image_token_id=96, video_token_id=95,
        ),
    ),
    "qwen3.5-images": (
        "qwen3_5_moe",
        around(
            "qwen3_5_moe_text",
            qwen3_next(
                rms_norm_eps=1e-4,
                rope_parameters={
                    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                    "mrope_section": [1, 1, 2], "mrope_interleaved": True,
                },
            ),
            {"depth": 1, "out_hidden_size": 48, "num_heads": 2}, image_token_id=96, video_token_id=95,
        ),
    ),
    "qwen3-vl": (
        "qwen3_vl_moe",
        around("qwen3_vl_moe_text", qwen3_vl(), QWEN3_VL_VISION, image_token_id=96, video_token_id=95),
    ),
    "qwen3-vl-odd-heads-dense-layers-bias": (
        "qwen3_vl_moe",
        around(
            "qwen3_vl_moe_text",
            qwen3_vl(
                hidden_size=60, num_attention_heads=5, num_key_value_heads=1, attention_bias=True,
                num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[1], num_experts_per_tok=8,
            ),
            QWEN3_VL_VISION | {"out_hidden_size": 60},
            image_token_id=96, video_token_id=95,
        ),
    ),
    "lfm2": ("lfm2_moe", lfm2()),
    "lfm2-no-bias-odd-heads-plain": (
        "lfm2_moe",
        lfm2(
            layer_types=[FULL, "conv", "conv"], num_hidden_layers=3, num_dense_layers=2, conv_L_cache=4,
            num_attention_heads=3, num_key_value_heads=1, use_expert_bias=False, norm_topk_prob=False,
            routed_scaling_factor=1.7, tie_word_embeddings=False,
        ),
    ),
    "gpt-oss": ("gpt_oss", gpt_oss()),
    "gpt-oss-full-first-plain-tied": (
        "gpt_oss",
        gpt_oss(
            layer_types=[FULL, SLIDING, SLIDING], attention_bias=False, num_attention_heads=5,
            num_key_value_heads=1, num_experts_per_tok=1, swiglu_alpha=1.0, swiglu_limit=7.0,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4}, tie_word_embeddings=True,
        ),
    ),
    "glm4-lite": ("glm4_moe_lite", glm4_lite()),
    "glm4-lite-layers-groups-yarn": (
        "glm4_moe_lite",
        glm4_lite(
            num_attention_heads=2, attention_bias=True, n_group=2, topk_group=1, num_experts_per_tok=5,
            mlp_layer_types=["sparse", "dense", "sparse"],
            rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        ),
    ),
}  # fmt: skip
SAME_KERNELS = frozenset(
    {
        *("dots", "dots-windows-bias-shared-groups", "solar", "solar-bias-yarn-odd-heads-plain", "hy3"),
        *("hy3-layers-bias-shared-yarn", "mellum", "mellum-bias-dense-layers-yarn-tied", "qwen3-longrope"),
        *("ernie-layers-odd-heads-yarn-plain", "granite-bias-odd-heads-k1-yarn-tied"),
        *("exaone-pattern-groups-plain-tied", "minimax-odd-heads-k1-yarn-tied"),
        *("internvl-qwen3", "kimi-deepseek3", "glm4v"),
    }
)
"""Cases that call each kernel as another case does. `make test` has them, on one instruction set alone."""
QWEN3_WINDOW_YARN_K8 = (
    "qwen3_moe",
    qwen3(use_sliding_window=True, sliding_window=9, num_experts_per_tok=8, rope_parameters=YARN),
)
"""A model for tests of whole engines."""


def with_kernels(kernels: Sequence[Any]) -> list[Any]:
    """Each case with each of `kernels`, which may be parameters with marks."""
    both = [(name, one if hasattr(one, "marks") else pytest.param(one)) for name in CASES for one in kernels]
    return [
        pytest.param(
            name,
            *one.values,
            marks=(pytest.mark.full if one.marks else pytest.mark.slow)
            if name in SAME_KERNELS
            else one.marks,
        )
        for name, one in both
    ]
