from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import moesaic
from moesaic.core.errors import CheckpointError
from moesaic.cost.reading import read
from moesaic.cost.sizes import PUBLISHED_MODELS, GroupedQuery, Latent, ModelSizes

PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (140.6, 39.2),
    "dbrx": (131.6, 36.5),
    "deepseek-v2": (235.7, 21.4),
    "deepseek-v2-lite": (15.7, 2.7),
    "deepseek-v3": (671.0, 37.6),
    "qwen3-30b-a3b": (30.5, 3.4),
    "olmoe-1b-7b": (6.9, 1.3),
    "qwen1.5-moe-a2.7b": (14.3, 2.7),
    "qwen2-57b-a14b": (57.4, 14.2),
}
"""Billions of parameters, all and active, with embeddings."""


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_parameters_are_the_published_ones(name: str) -> None:
    model = PUBLISHED_MODELS[name]
    assert (round(model.parameters / 1e9, 1), round(model.active / 1e9, 1)) == PUBLISHED[name]


def test_cached_numbers_of_a_token() -> None:
    assert GroupedQuery(32, 8, 128).cache_width == 2048
    assert Latent(128, 512, 64, 128, 128).cache_width == 576
    assert PUBLISHED_MODELS["mixtral-8x7b"].cache(10, 0.5) == 10 * 2048 * 0.5


def test_integers_in_the_cache_have_scales() -> None:
    """Mixtral has 8 keys and 8 values of 128 numbers. DeepSeek-V3 has one latent of 576 numbers."""
    grouped, latent = PUBLISHED_MODELS["mixtral-8x7b"], PUBLISHED_MODELS["deepseek-v3"]
    for model, rows, width in ((grouped, 16, 128), (latent, 1, 576)):
        for dtype, token in (("bfloat16", 2 * width), ("int8", width + 4), ("int4", width / 2 + 4)):
            assert model.cache(1, model.cache_number(dtype)) == pytest.approx(rows * token)


def test_latent_parameters_do_not_depend_on_the_absorbed_form() -> None:
    """DeepSeek-V2-Lite's tensors are query, the two compressions, the two unfolding matrices, and output."""
    before, after = Latent(16, 512, 64, 128, 128).projection_sizes(2048)
    assert before + after == 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048


CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "vocab_size": 32000,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 14336,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "vocab_size": 151936,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "vocab_size": 50304,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "intermediate_size": 1024,
    },
    "qwen2-57b-a14b": {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "vocab_size": 151936,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
        "intermediate_size": 18944,
    },
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        "num_hidden_layers": 60,
        "hidden_size": 5120,
        "vocab_size": 102400,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": 1536,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "intermediate_size": 12288,
    },
    "dbrx": {
        "model_type": "dbrx",
        "n_layers": 40,
        "d_model": 6144,
        "n_heads": 48,
        "vocab_size": 100352,
        "attn_config": {"kv_n_heads": 8},
        "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 10752},
    },
}

KIMI_K2 = CONFIGS["deepseek-v2"] | {
    "model_type": "kimi_k2",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "intermediate_size": 18432,
}
GLM_4_7_FLASH = CONFIGS["deepseek-v2"] | {
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": 47,
    "hidden_size": 2048,
    "vocab_size": 154880,
    "num_attention_heads": 20,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "q_lora_rank": 768,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "intermediate_size": 10240,
}
del GLM_4_7_FLASH["first_k_dense_replace"]
GLM_4_5_AIR = {
    "model_type": "glm4_moe",
    "num_hidden_layers": 46,
    "hidden_size": 4096,
    "vocab_size": 151552,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "intermediate_size": 10944,
}
DOTS = {
    "model_type": "dots1",
    "num_hidden_layers": 62,
    "hidden_size": 4096,
    "vocab_size": 152064,
    "num_attention_heads": 32,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 10944,
}
SOLAR = {
    "model_type": "solar_open",
    "num_hidden_layers": 48,
    "hidden_size": 4096,
    "vocab_size": 196608,
    "num_attention_heads": 64,
}
ERNIE = {
    "model_type": "ernie4_5_moe",
    "num_hidden_layers": 28,
    "hidden_size": 2560,
    "vocab_size": 103424,
    "num_attention_heads": 20,
    "intermediate_size": 12288,
}
GRANITE = {
    "model_type": "granitemoe",
    "num_hidden_layers": 32,
    "hidden_size": 1536,
    "vocab_size": 49155,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 40,
    "num_experts_per_tok": 8,
    "intermediate_size": 512,
    "tie_word_embeddings": True,
}
MELLUM = {
    "model_type": "mellum",
    "num_hidden_layers": 28,
    "hidden_size": 2304,
    "vocab_size": 98304,
    "num_attention_heads": 32,
}
EXAONE = {
    "model_type": "exaone_moe",
    "num_hidden_layers": 48,
    "hidden_size": 6144,
    "vocab_size": 153600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 128,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
}
HY3 = {
    "model_type": "hy_v3",
    "num_hidden_layers": 80,
    "hidden_size": 4096,
    "vocab_size": 120832,
    "num_attention_heads": 64,
    "intermediate_size": 13312,
}
MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "num_hidden_layers": 62,
    "hidden_size": 3072,
    "vocab_size": 200064,
    "num_attention_heads": 48,
    "intermediate_size": 1536,
}

GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "vocab_size": 201088,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "intermediate_size": 2880,
}
GPT_OSS_120B = GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128}


@pytest.mark.parametrize(("config", "billions"), [(GPT_OSS_20B, (20.9, 4.2)), (GPT_OSS_120B, (116.8, 5.7))])
def test_gpt_oss_has_its_published_parameters(config: dict[str, Any], billions: tuple[float, float]) -> None:
    """Which are 20.9 B and 3.6 B, 116.8 B and 5.1 B; the active ones also count the embedding, of 0.6 B."""
    found = read(config, "x")
    assert (round(found.parameters / 1e9, 1), round(found.active / 1e9, 1)) == billions


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (KIMI_K2, (1026, 33)),
        (GLM_4_7_FLASH, (30, 4)),
        (GLM_4_5_AIR, (107, 13)),
        (MINIMAX_M2, (229, 11)),
        (DOTS, (143, 14)),
        (SOLAR, (103, 12)),
        (HY3, (295, 21)),
        (ERNIE, (22, 3)),
        (GRANITE, (3, 1)),
        (MELLUM, (12, 2)),
        (EXAONE, (237, 24)),
    ],
    ids=[
        "kimi-k2",
        "glm-4.7-flash",
        "glm-4.5-air",
        "minimax-m2",
        "dots.llm1",
        "solar-open",
        "hy3",
        "ernie-4.5",
        "granite-3.1",
        "mellum-2",
        "k-exaone",
    ],
)
def test_families_have_their_published_parameters(config: dict[str, Any], billions: tuple[int, int]) -> None:
    """Those that their makers name, except that the figures here count embeddings too."""
    found = read(config, "x")
    assert (round(found.parameters / 1e9), round(found.active / 1e9)) == billions


def test_glm_lite_lists_its_dense_layers() -> None:
    assert read(GLM_4_7_FLASH, "x").moe_layers == 46
    listed = read(GLM_4_7_FLASH | {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 44}, "x")
    assert listed.moe_layers == 44
    for wrong in (["dense"] * 46 + ["moe"], "dense", ["sparse"]):
        with pytest.raises(CheckpointError, match="mlp_layer_types: got .* 47 layers"):
            read(GLM_4_7_FLASH | {"mlp_layer_types": wrong}, "x")


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs_give_the_known_sizes(name: str) -> None:
    found, known = read(CONFIGS[name], name), PUBLISHED_MODELS[name]
    assert (found.weights, found.active, found.cache(1, 2)) == (
        known.weights,
        known.active,
        known.cache(1, 2),
    )


def test_the_demo_is_read_and_float32_counts_four_bytes() -> None:
    path = Path(moesaic.__file__).parent / "demo" / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    demo = read(raw, "demo")
    assert isinstance(demo, ModelSizes) and demo.number == 2.0
    assert read(raw | {"torch_dtype": "float32"}, "demo").weights == 2 * demo.weights


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok: got 9; allowed: .* at most 8"),
    ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "num_experts_per_tok: got 129; allowed: .* at most 128"),
    ("deepseek-v2", {"num_experts_per_tok": 161}, "num_experts_per_tok: got 161; allowed: .* at most 160"),
    (
        "dbrx",
        {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 5}},
        "moe_top_k: got 5; .* at most 4",
    ),
    ("qwen3-30b-a3b", {"num_key_value_heads": 7}, "num_key_value_heads: got 7; allowed: a divisor of 32"),
    ("qwen3-30b-a3b", {"num_key_value_heads": 99}, "num_key_value_heads: got 99; allowed: a divisor of 32"),
    ("dbrx", {"attn_config": {"kv_n_heads": 7}}, "kv_n_heads: got 7; allowed: a divisor of 48"),
    ("qwen3-30b-a3b", {"mlp_only_layers": [99]}, r"mlp_only_layers: got \[99\]; allowed: .* 0 to 47"),
    ("qwen3-30b-a3b", {"mlp_only_layers": 3}, "mlp_only_layers: got 3; allowed: a list of layers"),
    ("qwen3-30b-a3b", {"head_dim": "x"}, "head_dim: got 'x'; allowed: an integer"),
    ("mixtral-8x7b", {"num_attention_heads": 8192}, "head_dim: got 0; allowed: an integer of at least 1"),
    ("dbrx", {"n_heads": 6145}, "n_heads: got 6145; allowed: .* at most 6144"),
    ("dbrx", {"ffn_config": [1]}, r"ffn_config: got \[1\]; allowed: an object"),
    ("qwen3-30b-a3b", {"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000; allowed: .* 10000"),
    ("deepseek-v2", {"hidden_size": 10**300}, "hidden_size: got 10+; allowed: .* at most 2147483647"),
]


@pytest.mark.parametrize(("name", "change", "message"), CONTRADICTIONS)
def test_numbers_that_contradict_each_other_are_refused(
    name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        read(CONFIGS[name] | change, "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type: got 'llama'; allowed: dbrx, deepseek_v2"),
        ({"hidden_size": "wide"}, "hidden_size: got 'wide'; allowed: an integer of at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"torch_dtype": "int8"}, "torch_dtype: got 'int8'"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match="config.json: ") as refused:
        read(CONFIGS["mixtral-8x7b"] | change, "x")
    assert message in str(refused.value)
    without = {key: value for key, value in CONFIGS["mixtral-8x7b"].items() if key != "vocab_size"}
    with pytest.raises(CheckpointError, match="vocab_size is missing"):
        read(without, "x")


def test_compressed_experts_take_what_their_rows_take() -> None:
    compressed = {"quantization_config": {"quant_method": "moesaic-compressed"}}
    plain = read(CONFIGS["mixtral-8x7b"], "x")
    small = read(CONFIGS["mixtral-8x7b"] | compressed, "x")
    inner, outer = 4 * 1600, 14 * 1600  # rows of 4096 and of 14336 numbers, in blocks of 1024
    assert small.expert_bytes == 2 * 14336 * inner + 4096 * outer
    assert small.expert_bytes / plain.expert_bytes == 1600 / 2048
    assert (small.other_bytes, small.parameters, small.active) == (
        plain.other_bytes,
        plain.parameters,
        plain.active,
    )
    assert small.with_number(4.0).expert_bytes == plain.with_number(4.0).expert_bytes
