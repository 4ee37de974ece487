"""The config files that the makers published are understood, key by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.models.registry import read_spec

GENERIC = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0",
    "use_cache": True,
}
MIXTRAL_8X7B = GENERIC | {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "vocab_size": 32000,
}
MIXTRAL_8X22B = MIXTRAL_8X7B | {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "max_position_embeddings": 65536,
    "num_attention_heads": 48,
    "num_hidden_layers": 56,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "vocab_size": 32768,
}
QWEN3_30B_A3B = GENERIC | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_CODER_30B_A3B = QWEN3_30B_A3B | {
    "max_position_embeddings": 262144,
    "qkv_bias": False,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}
QWEN3_30B_A3B_UNSLOTH = QWEN3_30B_A3B | {"_attn_implementation_autoset": True, "unsloth_fixed": True}
QWEN3_30B_A3B_YARN = QWEN3_30B_A3B | {
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "rope_type": "yarn"},
}
DEEPSEEK_V2_LITE = GENERIC | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV2Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V2 = DEEPSEEK_V2_LITE | {
    "ep_size": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
OLMOE_1B_7B = GENERIC | {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "vocab_size": 50304,
}
QWEN1_5_MOE_A2_7B = GENERIC | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2_57B_A14B = QWEN1_5_MOE_A2_7B | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "moe_intermediate_size": 2560,
    "num_attention_heads": 28,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 20480,
    "sliding_window": 65536,
}


@pytest.mark.parametrize(
    ("config", "layers", "experts", "context", "kv_numbers"),
    [
        (MIXTRAL_8X7B, 32, 8, 32768, 2 * 8 * 128),
        (MIXTRAL_8X22B, 56, 8, 65536, 2 * 8 * 128),
        (QWEN3_30B_A3B, 48, 128, 40960, 2 * 4 * 128),
        (QWEN3_CODER_30B_A3B, 48, 128, 262144, 2 * 4 * 128),
        (QWEN3_30B_A3B_UNSLOTH, 48, 128, 40960, 2 * 4 * 128),
        (QWEN3_30B_A3B_YARN, 48, 128, 131072, 2 * 4 * 128),
        (DEEPSEEK_V2_LITE, 26, 64, 163840, 512 + 64),
        (DEEPSEEK_V2, 59, 160, 163840, 512 + 64),
        (OLMOE_1B_7B, 16, 64, 4096, 2 * 16 * 128),
        (QWEN1_5_MOE_A2_7B, 24, 60, 8192, 2 * 16 * 128),
        (QWEN2_57B_A14B, 28, 64, 131072, 2 * 4 * 128),
    ],
    ids=[
        "mixtral-8x7b",
        "mixtral-8x22b",
        "qwen3-30b-a3b",
        "qwen3-coder-30b-a3b",
        "qwen3-30b-a3b of unsloth",
        "qwen3-30b-a3b with yarn",
        "deepseek-v2-lite",
        "deepseek-v2",
        "olmoe-1b-7b",
        "qwen1.5-moe-a2.7b",
        "qwen2-57b-a14b",
    ],
)
def test_a_published_config_gives_its_published_sizes(
    tmp_path: Path, config: dict[str, Any], layers: int, experts: int, context: int, kv_numbers: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    assert (len(spec.moe_layers), spec.num_experts, spec.max_position) == (layers, experts, context)
    assert spec.kv.kv_heads * sum(spec.kv.widths) == kv_numbers
