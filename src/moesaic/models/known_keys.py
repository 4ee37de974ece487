"""Keys of config.json that change no answer, and why.

A key that a family does not read is one of these, or the checkpoint is refused:

- It stands in `WITHOUT_EFFECT`, for this family or for all.
- It is a generic key of transformers and has its default there (generic_keys.json, which
  scripts/generic_keys.py writes).
- It is null, false, zero or empty.

Question: Which keys of config.json are skipped?
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).parent / "generic_keys.json"


class Row(NamedTuple):
    """Keys that change no answer, whatever their value."""

    reason: str
    keys: tuple[str, ...]
    families: tuple[str, ...] = ()
    """The values of model_type for which this holds; empty: all."""


DEEPSEEK = ("deepseek_v2", "deepseek_v3", "kimi_k2")
WITHOUT_EFFECT: tuple[Row, ...] = (
    Row(
        "names of the checkpoint, of its code and of the program that wrote it",
        (
            *("_name_or_path", "architectures", "auto_map", "transformers_version", "tokenizer_class"),
            *("unsloth_fixed", "unsloth_version", "model_name", "name_or_path"),
        ),
    ),
    Row("the tensors have a type of their own", ("dtype", "torch_dtype")),
    Row("read with the formats, in models/quantization", ("quantization_config",)),
    Row(
        "how transformers computes and what it returns, with the same numbers",
        (
            *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "use_cache"),
            *("return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
            *("torchscript", "use_bfloat16", "chunk_size_feed_forward", "gradient_checkpointing"),
            *("use_grouped_mm", "use_flash_attn", "disable_ffn_model_parallel"),
        ),
    ),
    Row(
        "heads of classifiers, and what transformers' pipelines do around a model",
        ("problem_type", "id2label", "label2id", "task_specific_params", "finetuning_task", "prefix"),
    ),
    Row("weights before training", ("initializer_range", "initializer_std")),
    Row(
        "dropout and noise of training",
        (
            *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "emb_pdrop"),
            "router_jitter_noise",
        ),
    ),
    Row(
        "losses of training",
        (*("router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "router_z_loss_coef", "load_balance_coeff"),),
    ),
    Row("parallelism of training", ("pretraining_tp", "ep_size")),
    Row(
        "the tokenizer and generation_config.json have them, and end ids are read apart",
        (
            *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
            *("bos_token", "eos_token", "pad_token", "eod_token_id"),
        ),
    ),
    Row("widths that follow from other keys", ("head_dim", "qk_head_dim"), (*DEEPSEEK, "glm4_moe_lite")),
    Row("latent attention has one key head for all queries", ("num_key_value_heads",), ("deepseek_v2",)),
    Row("tokens of an expert in training", ("moe_capacity",), ("ernie4_5_moe",)),
    Row(
        "layers that predict several tokens at once, which are not loaded",
        ("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
        ("mellum",),
    ),
    Row(
        "layers that predict several tokens at once, which are not loaded",
        ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
        ("minimax_m2",),
    ),
    Row(
        "sizes of parts that other models of the makers' code have",
        ("mlp_intermediate_size", "shared_moe_mode"),
        ("minimax_m2",),
    ),
    Row(
        "layers that predict several tokens at once, which are not loaded",
        ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        ("qwen3_5_moe_text",),
    ),
    Row("states are float32 here", ("mamba_ssm_dtype",), ("qwen3_5_moe_text",)),
    Row("hidden_act is the key that counts", ("activation_function",), ("granitemoe", "granitemoeshared")),
    Row("the rotary keys say it too", ("initial_context_length",), ("gpt_oss",)),
    Row(
        "sums that are float32 here",
        ("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine"),
        ("hy_v3",),
    ),
)
"""Keys at the top of config.json, or of its text_config, with the reason why they change no answer."""


def changes_nothing(name: str, value: Any, family: str | None) -> bool:
    """Whether a key that is not read can be skipped.

    family: model_type, for a key at the top of config.json or of its text_config; None for a key of another
    object.
    """
    is_known = family is not None and name in list_without_effect(family)
    return is_known or is_neutral(value) or any(_equals(value, default) for default in find_defaults(name))


def is_neutral(value: Any) -> bool:
    """Whether a value is null, false, zero or empty.

    >>> [is_neutral(value) for value in (None, False, 0, 0.0, "", [], {})]
    [True, True, True, True, True, True, True]
    >>> [is_neutral(value) for value in (True, 1, "no", [0])]
    [False, False, False, False]
    """
    return not value


def find_defaults(name: str) -> tuple[Any, ...]:
    """Returns the values that versions of transformers give to a generic key; none for another key."""
    return tuple(defaults[name] for defaults in _generic_keys().values() if name in defaults)


@cache
def _generic_keys() -> Mapping[str, Mapping[str, Any]]:
    """Version of transformers -> generic key -> its default."""
    table: Mapping[str, Mapping[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


@cache
def list_without_effect(family: str) -> frozenset[str]:
    """Returns the keys that change no answer of a model_type, whatever their value."""
    rows = [row for row in WITHOUT_EFFECT if not row.families or family in row.families]
    return frozenset(key for row in rows for key in row.keys)


def _equals(value: Any, default: Any) -> bool:
    # In Python True equals 1, but `true` is no number of a config.
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)
