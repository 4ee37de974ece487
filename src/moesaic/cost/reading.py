"""Reads the sizes of a model that cost time or memory from its config.json.

It knows more models than models/, so that models can be planned that cannot be served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.core.text_config import read_text_config
from moesaic.core.weight_types import is_unquantized
from moesaic.cost.hybrid import DeltaRule, HybridAttention, Recurrent, ShortConvolution
from moesaic.cost.sizes import BYTES, GroupedQuery, Latent, ModelSizes

Raw = Mapping[str, Any]
_REQUIRED = object()
LAYERS, MAX_INTEGER = 10_000, 2**31 - 1
"""The maximum number of layers, and the maximum value of all other numbers."""


def read(raw: Raw, name: str) -> ModelSizes:
    """The sizes in a parsed config.json. name: the model's name in reports.

    Raises CheckpointError, naming the key, for an unknown model_type, a missing or wrong number,
    contradicting numbers, and quantized weights.
    """
    raw = read_text_config(raw)
    kind = str(raw.get("model_type"))
    if kind not in _READERS:
        raise _refuse("model_type", raw.get("model_type"), ", ".join(sorted(_READERS)))
    if not is_unquantized(raw):
        raise _refuse("quantization_config", "a quantization", "none: plans are for unquantized weights")
    dtype = number_type(raw)
    if dtype not in BYTES:
        raise _refuse("torch_dtype", dtype, ", ".join(BYTES))
    compressed = raw.get("quantization_config") is not None
    return replace(_READERS[kind](raw, name), number=BYTES[dtype], has_compressed_experts=compressed)


def number_type(raw: Raw) -> str:
    """The type of weights that a config.json names, which may be any text."""
    return str(raw.get("torch_dtype", raw.get("dtype")) or "bfloat16")


def _mixtral(raw: Raw, name: str) -> ModelSizes:
    layers, experts = (
        _integer(raw, "num_hidden_layers", maximum=LAYERS),
        _integer(raw, "num_local_experts", 8),
    )
    return ModelSizes(
        name,
        layers=layers,
        hidden=_integer(raw, "hidden_size"),
        vocab=_integer(raw, "vocab_size"),
        attention=_read_grouped(raw),
        moe_layers=layers,
        experts=experts,
        top_k=_integer(raw, "num_experts_per_tok", 2, maximum=experts),
        expert_width=_integer(raw, "intermediate_size"),
        ties_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def _granite_shared(raw: Raw, name: str) -> ModelSizes:
    return replace(_mixtral(raw, name), shared_width=_integer(raw, "shared_intermediate_size", 0, minimum=0))


def _qwen(raw: Raw, name: str) -> ModelSizes:
    layers = _integer(raw, "num_hidden_layers", maximum=LAYERS)
    dense, every = _dense_layers(raw, layers), _integer(raw, "decoder_sparse_step", 1)
    experts = _integer(raw, "num_experts" if "num_experts" in raw else "num_local_experts")
    return ModelSizes(
        name,
        layers=layers,
        hidden=_integer(raw, "hidden_size"),
        vocab=_integer(raw, "vocab_size"),
        attention=_read_grouped(raw),
        moe_layers=sum((layer + 1) % every == 0 and layer not in dense for layer in range(layers)),
        experts=experts,
        top_k=_integer(raw, "num_experts_per_tok", maximum=experts),
        expert_width=_integer(raw, "moe_intermediate_size"),
        shared_width=_integer(raw, "shared_expert_intermediate_size", 0, minimum=0),
        dense_width=_integer(raw, "intermediate_size"),
        ties_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def _qwen_next(raw: Raw, name: str) -> ModelSizes:
    usual = {"head_dim": 256, "num_key_value_heads": 2, "moe_intermediate_size": 512}
    usual |= {"shared_expert_intermediate_size": 512, "intermediate_size": 5632}
    newer = raw.get("model_type") != "qwen3_next"
    usual |= {"num_experts": 256, "num_experts_per_tok": 8} if newer else {"num_experts": 512}
    raw = {"num_experts_per_tok": 10, **usual, **raw}
    layers, kinds = _integer(raw, "num_hidden_layers", maximum=LAYERS), raw.get("layer_types")
    every = _integer(raw, "full_attention_interval", 4)
    if kinds is None:
        kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    recurrent = DeltaRule(
        key_heads=_integer(raw, "linear_num_key_heads", 16),
        value_heads=_integer(raw, "linear_num_value_heads", 32),
        key_width=_integer(raw, "linear_key_head_dim", 128),
        value_width=_integer(raw, "linear_value_head_dim", 128),
        taps=_integer(raw, "linear_conv_kernel_dim", 4),
    )
    return _with_states(_qwen(raw, name), raw, kinds, recurrent, has_gate=True)


def _with_states(
    sizes: ModelSizes, raw: Raw, kinds: Any, recurrent: Recurrent, has_gate: bool = False
) -> ModelSizes:
    """A model whose layers have states unless they are full_attention. kinds: of each layer."""
    layers = sizes.layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise _refuse("layer_types", kinds, f"a list of {layers} layers")
    full = kinds.count("full_attention")
    attention = HybridAttention(_read_grouped(raw), full / layers, recurrent, has_gate)
    page, seat = (4.0 * (layers - full) * numbers for numbers in recurrent.state_numbers())
    return replace(sizes, attention=attention, page=page, seat=seat)


def _lfm2(raw: Raw, name: str) -> ModelSizes:
    usual = {"num_hidden_layers": 32, "hidden_size": 2048, "intermediate_size": 7168, "num_experts": 32}
    usual |= {"moe_intermediate_size": 1792, "num_experts_per_tok": 4, "num_dense_layers": 2}
    raw = {**usual, "vocab_size": 65536, "tie_word_embeddings": True, **raw}
    layers = _integer(raw, "num_hidden_layers", maximum=LAYERS)
    dense = _integer(raw, "num_dense_layers", minimum=0, maximum=layers)
    recurrent = ShortConvolution(_integer(raw, "hidden_size"), _integer(raw, "conv_L_cache", 3))
    found = _with_states(_qwen(raw, name), raw, raw.get("layer_types"), recurrent)
    return replace(
        found,
        moe_layers=layers - dense,
        ties_embeddings=bool(raw.get("tie_embedding", found.ties_embeddings)),
    )


def _gpt_oss(raw: Raw, name: str) -> ModelSizes:
    usual = {"num_local_experts": 128, "num_experts_per_tok": 4, "head_dim": 64}
    found = _mixtral(usual | dict(raw), name)
    return replace(found, expert_biases=2 * found.expert_width + found.hidden)


def _olmoe(raw: Raw, name: str) -> ModelSizes:
    layers, experts = _integer(raw, "num_hidden_layers", maximum=LAYERS), _integer(raw, "num_experts", 64)
    attention = _read_grouped(raw)
    return ModelSizes(
        name,
        layers=layers,
        hidden=_integer(raw, "hidden_size"),
        vocab=_integer(raw, "vocab_size"),
        attention=replace(attention, normed_heads=(attention.heads, attention.kv_heads)),
        moe_layers=layers,
        experts=experts,
        top_k=_integer(raw, "num_experts_per_tok", 8, maximum=experts),
        expert_width=_integer(raw, "intermediate_size"),
        ties_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def _deepseek(raw: Raw, name: str) -> ModelSizes:
    attention = Latent(
        heads=_integer(raw, "num_attention_heads"),
        rank=_integer(raw, "kv_lora_rank"),
        rope_width=_integer(raw, "qk_rope_head_dim"),
        nope_width=_integer(raw, "qk_nope_head_dim"),
        value=_integer(raw, "v_head_dim"),
        query_rank=None if raw.get("q_lora_rank") is None else _integer(raw, "q_lora_rank"),
    )
    return _read_with_shared(raw, name, attention, _sparse_layers(raw))


def _minimax(raw: Raw, name: str) -> ModelSizes:
    attention = _read_grouped({"head_dim": 128, "num_key_value_heads": 8, **raw})
    found = _mixtral({"num_experts_per_tok": 8, "num_local_experts": 256, **raw}, name)
    return replace(found, attention=replace(attention, normed_heads=(attention.heads, attention.kv_heads)))


def _mellum(raw: Raw, name: str) -> ModelSizes:
    layers = _integer(raw, "num_hidden_layers", maximum=LAYERS)
    kinds = raw.get("mlp_layer_types") or ["sparse"] * layers
    key = "num_experts" if "num_experts" in raw else "num_local_experts"
    usual = {"head_dim": 128, "moe_intermediate_size": 896, key: 64, "num_experts_per_tok": 8}
    raw = {**usual, "num_key_value_heads": 4, "intermediate_size": 7168, **raw, "mlp_layer_types": kinds}
    return _read_with_shared(raw, name, _read_grouped(raw), _count_listed_sparse_layers(raw), key)


def _exaone(raw: Raw, name: str) -> ModelSizes:
    layers = _integer(raw, "num_hidden_layers", maximum=LAYERS)
    dense = min(layers, _integer(raw, "first_k_dense_replace", 1, minimum=0))
    kinds = raw.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (layers - dense)
    usual = {"moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8}
    usual |= {"num_shared_experts": 1, "num_key_value_heads": 32, "intermediate_size": 16384}
    raw = {**usual, **raw, "mlp_layer_types": kinds}
    keys = "num_experts", "num_shared_experts"
    return _read_with_shared(raw, name, _read_grouped(raw), _count_listed_sparse_layers(raw), *keys)


def _glm(raw: Raw, name: str) -> ModelSizes:
    return _read_with_shared(raw, name, _read_grouped(raw), _sparse_layers(raw))


def _glm_lite(raw: Raw, name: str) -> ModelSizes:
    return replace(_deepseek(raw, name), moe_layers=_count_listed_sparse_layers(raw))


def _count_listed_sparse_layers(raw: Raw) -> int:
    """Number of layers with routed experts, where mlp_layer_types lists them."""
    layers, kinds = _integer(raw, "num_hidden_layers", maximum=LAYERS), raw.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense"] + ["sparse"] * (layers - 1)
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {"dense", "sparse"}:
        raise _refuse("mlp_layer_types", kinds, f"'dense' or 'sparse' for each of {layers} layers")
    return kinds.count("sparse")


def _sparse_layers(raw: Raw) -> int:
    """Number of layers with routed experts, where the first layers are dense."""
    layers = _integer(raw, "num_hidden_layers", maximum=LAYERS)
    dense, interval = _integer(raw, "first_k_dense_replace", 0, minimum=0), _integer(raw, "moe_layer_freq", 1)
    return sum(layer % interval == 0 for layer in range(dense, layers))


def _solar(raw: Raw, name: str) -> ModelSizes:
    usual = {"head_dim": 128, "num_experts_per_tok": 8, "num_key_value_heads": 8}
    raw = {**usual, "n_routed_experts": 128, "n_shared_experts": 1, "intermediate_size": 1, **raw}
    layers = _integer(raw, "num_hidden_layers", maximum=LAYERS)
    return _read_with_shared({"moe_intermediate_size": 1280, **raw}, name, _read_grouped(raw), layers)


def _ernie(raw: Raw, name: str) -> ModelSizes:
    usual = {"moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2}
    raw = {**usual, "num_key_value_heads": 4, "tie_word_embeddings": True, **raw}
    first, last = (
        _integer(raw, "moe_layer_start_index", 1, minimum=0),
        _integer(raw, "moe_layer_end_index", -1, -1),
    )
    layers, interval = (
        _integer(raw, "num_hidden_layers", maximum=LAYERS),
        _integer(raw, "moe_layer_interval", 1),
    )
    stop = layers if last == -1 else min(layers, last + 1)
    sparse = sum((layer + 1) % interval == 0 for layer in range(first, stop))
    keys = "moe_num_experts", "moe_num_shared_experts", "moe_k"
    return _read_with_shared(raw, name, _read_grouped(raw), sparse, *keys)


def _hy3(raw: Raw, name: str) -> ModelSizes:
    usual = {"head_dim": 128, "moe_intermediate_size": 1536, "num_experts": 192, "num_shared_experts": 1}
    raw = {**usual, "num_experts_per_tok": 8, "num_key_value_heads": 8, **raw}
    keys = "num_experts", "num_shared_experts"
    return _read_with_shared(raw, name, _read_grouped(raw), _count_listed_sparse_layers(raw), *keys)


def _read_with_shared(
    raw: Raw,
    name: str,
    attention: GroupedQuery | Latent,
    moe_layers: int,
    expert_key: str = "n_routed_experts",
    shared_key: str = "n_shared_experts",
    top_key: str = "num_experts_per_tok",
) -> ModelSizes:
    """The sizes of a model with routed experts beside shared ones, and dense layers."""
    experts, width = _integer(raw, expert_key), _integer(raw, "moe_intermediate_size")
    return ModelSizes(
        name,
        layers=_integer(raw, "num_hidden_layers", maximum=LAYERS),
        hidden=_integer(raw, "hidden_size"),
        vocab=_integer(raw, "vocab_size"),
        attention=attention,
        moe_layers=moe_layers,
        experts=experts,
        top_k=_integer(raw, top_key, maximum=experts),
        expert_width=width,
        shared_width=width * _integer(raw, shared_key, 0, minimum=0),
        dense_width=_integer(raw, "intermediate_size"),
        ties_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def _dbrx(raw: Raw, name: str) -> ModelSizes:
    ffn, attention = _table(raw, "ffn_config"), _table(raw, "attn_config")
    layers, hidden = _integer(raw, "n_layers", maximum=LAYERS), _integer(raw, "d_model")
    heads, experts = _integer(raw, "n_heads", maximum=hidden), _integer(ffn, "moe_num_experts")
    return ModelSizes(
        name,
        layers=layers,
        hidden=hidden,
        vocab=_integer(raw, "vocab_size"),
        attention=GroupedQuery(heads, _key_heads(attention, "kv_n_heads", heads), hidden // heads),
        moe_layers=layers,
        experts=experts,
        top_k=_integer(ffn, "moe_top_k", maximum=experts),
        expert_width=_integer(ffn, "ffn_hidden_size"),
        ties_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


_READERS: dict[str, Callable[[Raw, str], ModelSizes]] = {
    "exaone_moe": _exaone,
    "lfm2_moe": _lfm2,
    "mellum": _mellum,
    "minimax_m2": _minimax,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen,
    "qwen3_moe": _qwen,
    "qwen3_vl_moe_text": _qwen,
    "qwen3_next": _qwen_next,
    "qwen3_5_moe_text": _qwen_next,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "glm4_moe": _glm,
    "glm4_moe_lite": _glm_lite,
    "dots1": _glm,
    "solar_open": _solar,
    "hy_v3": _hy3,
    "granitemoe": _mixtral,
    "granitemoeshared": _granite_shared,
    "ernie4_5_moe": _ernie,
    "gpt_oss": _gpt_oss,
    "dbrx": _dbrx,
}


def _read_grouped(raw: Raw) -> GroupedQuery:
    heads = _integer(raw, "num_attention_heads")
    width = _integer(raw, "head_dim", _integer(raw, "hidden_size") // heads)
    return GroupedQuery(heads, _key_heads(raw, "num_key_value_heads", heads, heads), width)


def _key_heads(raw: Raw, name: str, heads: int, default: Any = _REQUIRED) -> int:
    """Number of key-value heads. Raises CheckpointError if they cannot be divided evenly among the query
    heads."""
    key_heads = _integer(raw, name, default)
    if heads % key_heads:
        raise _refuse(name, key_heads, f"a divisor of {heads} attention heads")
    return key_heads


def _dense_layers(raw: Raw, layers: int) -> set[int]:
    """The dense layers that a config.json lists, for a model with routed experts in its other layers."""
    dense_layers = raw.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or any(layer not in range(layers) for layer in dense_layers):
        raise _refuse("mlp_only_layers", dense_layers, f"a list of layers, 0 to {layers - 1}")
    return set(dense_layers)


def _table(raw: Raw, name: str) -> Raw:
    table = raw.get(name) or {}
    if not isinstance(table, Mapping):
        raise _refuse(name, table, "an object")
    return table


def _integer(
    raw: Raw, name: str, default: Any = _REQUIRED, minimum: int = 1, maximum: int = MAX_INTEGER
) -> int:
    value = raw.get(name, default)
    if value is None:
        value = default
    if value is _REQUIRED:
        raise CheckpointError(f"config.json: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise _refuse(name, value, f"an integer of at least {minimum} and at most {maximum}")
    return value


def _refuse(name: str, value: object, allowed_values: str) -> CheckpointError:
    return CheckpointError(f"config.json: {name}: got {repr(value)[:80]}; allowed: {allowed_values}")
