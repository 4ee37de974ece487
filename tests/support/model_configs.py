"""Tiny configurations, each with its own combination of the optional parts."""

from __future__ import annotations

from typing import Any

VOCAB = 97
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
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


def glm4_lite(**options: Any) -> dict[str, Any]:
    base = deepseek(num_key_value_heads=options.get("num_attention_heads", 4), q_lora_rank=20, **options)
    del base["first_k_dense_replace"]  # mlp_layer_types says it
    return base


def qwen2(**options: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 36, "num_experts": 12, "num_experts_per_tok": 4,
        "max_position_embeddings": 192,
    }  # fmt: skip
    return {**base, **options}


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
QWEN3_WINDOW_YARN_K8 = (
    "qwen3_moe",
    qwen3(use_sliding_window=True, sliding_window=9, num_experts_per_tok=8, rope_parameters=YARN),
)
"""A model for tests of whole engines."""
