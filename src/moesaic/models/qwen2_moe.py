"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): many small experts and a shared expert with its own gate.

Yang et al., Qwen2 technical report, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.kernels.gating import Gating
from moesaic.models import rope
from moesaic.models.block import DecoderBlock
from moesaic.models.config import MOST_LAYERS, Fields, shorten
from moesaic.models.gates import load_gate
from moesaic.models.loader import ExpertNames, Heads, Loader, grouped_query_attention, read_heads
from moesaic.models.qwen import dense_part, sparse_layers
from moesaic.models.spec import KVLayout, ModelSpec

UNUSED_TENSORS = (r".*\.rotary_emb\.inv_freq",)
"""Tensors of some checkpoints that are not needed."""
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Config:
    """config.json of a qwen2_moe checkpoint."""

    vocab_size: int
    hidden_size: int
    dense_width: int
    expert_width: int
    shared_width: int
    num_layers: int
    heads: Heads
    epsilon: float
    has_tied_embeddings: bool
    num_experts: int
    top_k: int
    normalise: bool
    sparse_step: int
    dense_layers: tuple[int, ...]
    windows: tuple[int | None, ...]
    """The window of each layer: how many tokens a token attends to. None means all."""
    max_position: int
    rope: rope.RopeConfig

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            model_type="qwen2_moe",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            moe_layers=sparse_layers(self.num_layers, self.dense_layers, self.sparse_step),
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_width=self.expert_width,
            max_position=max(self.max_position, self.rope.reach),
            heads=self.heads.query,
            kv=KVLayout(self.heads.key, self.heads.width, self.heads.width),
            sliding_windows=self.windows,
        )


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(raw)
    fields.require_value("model_type", "qwen2_moe")
    fields.require_value("hidden_act", "silu")
    fields.require_value("attention_bias", False, reason="this model_type has qkv_bias")
    max_position = fields.integer("max_position_embeddings", 32768)
    num_layers = fields.integer("num_hidden_layers", maximum=MOST_LAYERS)
    experts = fields.integer("num_experts", 60)
    epsilon = fields.number("rms_norm_eps", 1e-6)
    config = Config(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        dense_width=fields.integer("intermediate_size", 5632),
        expert_width=fields.integer("moe_intermediate_size"),
        shared_width=fields.integer("shared_expert_intermediate_size"),
        num_layers=num_layers,
        heads=replace(read_heads(fields, epsilon=epsilon), bias=fields.flag("qkv_bias", True)),
        epsilon=epsilon,
        has_tied_embeddings=fields.flag("tie_word_embeddings", False),
        num_experts=experts,
        top_k=fields.integer("num_experts_per_tok", 4, maximum=experts),
        normalise=fields.flag("norm_topk_prob", False),
        sparse_step=fields.integer("decoder_sparse_step", 1),
        dense_layers=fields.integers("mlp_only_layers"),
        windows=_windows(fields, num_layers),
        max_position=max_position,
        rope=rope.read(fields, max_position, 10000.0),
    )
    fields.refuse_unread()
    return config


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Returns the window of each layer. Only layer_types says which layers have one.

    From max_window_layers alone, versions of transformers conclude different layers.
    """
    fields.ignore("max_window_layers")
    width, has_windows = (
        fields.maybe_integer("sliding_window", minimum=0),
        fields.flag("use_sliding_window", False),
    )
    kinds = fields.raw("layer_types", None)
    if kinds is None and not has_windows:
        return (None,) * num_layers
    allowed_kinds = (FULL, SLIDING) if has_windows else (FULL,)
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in allowed_kinds for kind in kinds)
    ):
        raise CheckpointError(
            f"config.json: layer_types: got {shorten(repr(kinds))}; allowed: a list of {num_layers} of "
            f"{', '.join(allowed_kinds)}, with use_sliding_window {str(has_windows).lower()}"
        )
    if SLIDING in kinds and not width:
        raise CheckpointError(
            f"config.json: sliding_window: got {width}; allowed: an integer of at least 1, since layer_types "
            f"has {SLIDING}"
        )
    return tuple(width if kind == SLIDING else None for kind in kinds)


def expert_names(config: Config, layer: int) -> ExpertNames:
    """Returns the tensor names of a layer's routed experts."""
    prefix = f"model.layers.{layer}.mlp.experts"
    return ExpertNames(prefix, config.hidden_size, config.expert_width, config.num_experts)


def blocks(config: Config, loader: Loader) -> tuple[DecoderBlock, ...]:
    """Loads every layer without its routed experts."""
    spec = config.spec
    table = loader.rope_table(config.rope, config.heads.width, spec.max_position)
    return tuple(_block(config, spec, loader, table, layer) for layer in range(config.num_layers))


def _block(
    config: Config, spec: ModelSpec, loader: Loader, table: rope.RopeTable, layer: int
) -> DecoderBlock:
    name, hidden = f"model.layers.{layer}", config.hidden_size
    sparse = layer in spec.moe_layers
    window = spec.sliding_windows[layer]
    gating = Gating(config.top_k, config.normalise)
    return DecoderBlock(
        kernels=loader.kernels,
        epsilon=config.epsilon,
        input_norm=loader.exact(f"{name}.input_layernorm.weight", hidden),
        attention_part=grouped_query_attention(loader, f"{name}.self_attn", config.heads, table, window),
        post_norm=loader.exact(f"{name}.post_attention_layernorm.weight", hidden),
        router=load_gate(loader, f"{name}.mlp.gate", gating, config.num_experts, hidden) if sparse else None,
        dense_part=dense_part(
            loader, f"{name}.mlp", hidden, config.dense_width, config.shared_width if sparse else None
        ),
    )
