"""config.json -> the sizes that cost something. Wider than models/: what cannot be served can be planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.cost.sizes import BYTES, GroupedQuery, Latent, ModelSizes

Raw = Mapping[str, Any]
_REQUIRED = object()


def read(raw: Raw, name: str) -> ModelSizes:
    """The sizes in a config.json, as it was parsed; `name` is what reports call the model.

    Raises CheckpointError, naming the key, for a model_type without routed experts that we know, a missing
    or wrong number, and quantized weights.
    """
    kind = str(raw.get("model_type"))
    if kind not in _READERS:
        raise _refuse("model_type", raw.get("model_type"), ", ".join(sorted(_READERS)))
    if raw.get("quantization_config") is not None:
        raise _refuse("quantization_config", "a quantization", "none: plans are for unquantized weights")
    dtype = str(raw.get("torch_dtype", raw.get("dtype")) or "bfloat16")
    if dtype not in BYTES:
        raise _refuse("torch_dtype", dtype, ", ".join(BYTES))
    return _READERS[kind](raw, name).with_number(BYTES[dtype])


def _mixtral(raw: Raw, name: str) -> ModelSizes:
    layers = _integer(raw, "num_hidden_layers")
    return ModelSizes(
        name,
        layers=layers,
        hidden=_integer(raw, "hidden_size"),
        vocab=_integer(raw, "vocab_size"),
        attention=_grouped(raw),
        moe_layers=layers,
        experts=_integer(raw, "num_local_experts", 8),
        top_k=_integer(raw, "num_experts_per_tok", 2),
        expert_width=_integer(raw, "intermediate_size"),
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _qwen(raw: Raw, name: str) -> ModelSizes:
    layers, every = _integer(raw, "num_hidden_layers"), _integer(raw, "decoder_sparse_step", 1)
    dense = set(raw.get("mlp_only_layers") or ())
    return ModelSizes(
        name,
        layers=layers,
        hidden=_integer(raw, "hidden_size"),
        vocab=_integer(raw, "vocab_size"),
        attention=_grouped(raw),
        moe_layers=sum((layer + 1) % every == 0 and layer not in dense for layer in range(layers)),
        experts=_integer(raw, "num_experts" if "num_experts" in raw else "num_local_experts"),
        top_k=_integer(raw, "num_experts_per_tok"),
        expert_width=_integer(raw, "moe_intermediate_size"),
        dense_width=_integer(raw, "intermediate_size"),
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _deepseek(raw: Raw, name: str) -> ModelSizes:
    layers, width = _integer(raw, "num_hidden_layers"), _integer(raw, "moe_intermediate_size")
    attention = Latent(
        heads=_integer(raw, "num_attention_heads"),
        rank=_integer(raw, "kv_lora_rank"),
        turned=_integer(raw, "qk_rope_head_dim"),
        straight=_integer(raw, "qk_nope_head_dim"),
        value=_integer(raw, "v_head_dim"),
        query_rank=None if raw.get("q_lora_rank") is None else _integer(raw, "q_lora_rank"),
    )
    dense, every = _integer(raw, "first_k_dense_replace", 0, least=0), _integer(raw, "moe_layer_freq", 1)
    return ModelSizes(
        name,
        layers=layers,
        hidden=_integer(raw, "hidden_size"),
        vocab=_integer(raw, "vocab_size"),
        attention=attention,
        moe_layers=sum(layer % every == 0 for layer in range(dense, layers)),
        experts=_integer(raw, "n_routed_experts"),
        top_k=_integer(raw, "num_experts_per_tok"),
        expert_width=width,
        shared_width=width * _integer(raw, "n_shared_experts", 0, least=0),
        dense_width=_integer(raw, "intermediate_size"),
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _dbrx(raw: Raw, name: str) -> ModelSizes:
    ffn, attention = raw.get("ffn_config") or {}, raw.get("attn_config") or {}
    layers, hidden, heads = (_integer(raw, key) for key in ("n_layers", "d_model", "n_heads"))
    return ModelSizes(
        name,
        layers=layers,
        hidden=hidden,
        vocab=_integer(raw, "vocab_size"),
        attention=GroupedQuery(heads, _integer(attention, "kv_n_heads"), hidden // heads),
        moe_layers=layers,
        experts=_integer(ffn, "moe_num_experts"),
        top_k=_integer(ffn, "moe_top_k"),
        expert_width=_integer(ffn, "ffn_hidden_size"),
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


_READERS: dict[str, Callable[[Raw, str], ModelSizes]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "dbrx": _dbrx,
}


def _grouped(raw: Raw) -> GroupedQuery:
    heads = _integer(raw, "num_attention_heads")
    width = raw.get("head_dim") or _integer(raw, "hidden_size") // heads
    return GroupedQuery(heads, _integer(raw, "num_key_value_heads", heads), int(width))


def _integer(raw: Raw, name: str, default: Any = _REQUIRED, least: int = 1) -> int:
    value = raw.get(name, default)
    if value is None:
        value = default
    if value is _REQUIRED:
        raise CheckpointError(f"config.json: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _refuse(name, value, f"an integer of at least {least}")
    return value


def _refuse(name: str, value: object, allowed: str) -> CheckpointError:
    return CheckpointError(f"config.json: {name}: got {value!r}; allowed: {allowed}")
